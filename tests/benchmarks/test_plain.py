"""Tables where rich is missing or the terminal is narrow."""

from __future__ import annotations

import json
import re

import pytest

from tests import ROOT

pytestmark = pytest.mark.usefixtures("scripts")
FILES = sorted((ROOT / "benchmarks" / "results").glob("*-2-cores.json"))
EXPERIMENTS = ("objectives", "precision")  # have tables of their own
RESULTS = [file for file in FILES if "rows" in json.loads(file.read_text()) and not file.name.startswith(EXPERIMENTS)]


def words(rows: list[dict], width: int) -> tuple[list[str], set[str]]:
    """The lines of all tables, and the words and numbers in them."""
    from lib.plain import PlainTable
    from lib.report import tables

    text = "\n".join(table.text(width) for table in tables(rows, PlainTable))
    return text.splitlines(), set(text.split())


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_80_columns_cut_no_number(file):
    rows = json.loads(file.read_text())["rows"]
    wide, every = words(rows, 1000)
    narrow, found = words(rows, 80)
    assert max(map(len, narrow)) <= 80
    assert not [word for word in found if "…" in word]
    # Beyond what whole columns hold that are left out, and are named, each number stands there as it is.
    left_out = [line for line in narrow if line.startswith("(too narrow for: ")]
    if not left_out:
        assert every - {word for word in every if set(word) == {"-"}} <= found
    times = re.compile(r"\d+\.\d\dx")
    assert {word for word in every if times.fullmatch(word)} <= found


def test_rich_tables_are_printed_where_they_fit(capsys):
    pytest.importorskip("rich")
    from lib.report import show

    rows = json.loads(RESULTS[0].read_text())["rows"]
    show(rows, 200)
    assert "━" in (wide := capsys.readouterr().out) or "│" in wide
    show(rows, 80)
    narrow = capsys.readouterr().out
    assert "│" not in narrow and max(map(len, narrow.splitlines())) <= 80


def test_without_rich_there_are_headings(capsys, monkeypatch):
    from lib import report

    monkeypatch.setattr(report, "Console", None)
    report.show([{"section": "capacity", "case": "L", "implementation": "own", "status": "skipped"}], 80)
    assert capsys.readouterr().out.splitlines()[:2] == [
        "Largest training step",
        "largest  implementation    found  tokens  vs transformers",
    ]
