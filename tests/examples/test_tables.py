"""Tables as people have them: every form that can be read is, and every other ends in one sentence with its name."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

from tests import ROOT

pytestmark = pytest.mark.usefixtures("scripts")

ROWS = [{"text": "a b", "label": "x"}, {"text": "c,d", "label": "y"}]


def test_forms_that_are_read(tmp_path):
    """Every line end, marks of encodings, long fields, and line separators within JSON and CSV."""
    from parts.table import read_table

    def read(name: str, content: bytes) -> list[dict]:
        (tmp_path / name).write_bytes(content)
        return read_table(tmp_path / name, ["text", "label"])

    plain = 'text,label\na b,x\n"c,d",y\n'
    for content in (plain.encode(), plain.replace("\n", "\r\n").encode(), plain.encode("utf-8-sig")):
        assert read("rows.csv", content) == ROWS
    assert read("rows.csv", plain.encode("utf-16")) == read("rows.csv", plain.replace("\n", "\n\n").encode()) == ROWS
    assert read("rows.tsv", b"text\tlabel\na b\tx\nc,d\ty\n") == ROWS
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    for content in (lines.encode(), lines.replace("\n", "\r\n\r\n").encode(), lines.encode("utf-8-sig")):
        assert read("rows.jsonl", content) == ROWS
    separated = "a\u2028b\u2029c\x85d"
    assert read("rows.jsonl", f'{{"text": "{separated}", "label": 1}}\n'.encode())[0]["text"] == separated
    assert read("rows.csv", f'text,label\n"{separated}\ne",1\n'.encode())[0]["text"] == f"{separated}\ne"
    assert read("rows.csv", b"text,label\n" + b"a" * 200_000 + b",x\n")[0]["text"] == "a" * 200_000


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.csv", "text,label\ncafé,x\n".encode("latin-1"), "is not UTF-8 in line 2 .*: save it as UTF-8, or convert"),
        ("a.jsonl", '{"text": "é"}'.encode("latin-1"), "is not UTF-8 in line 1"),
        ("a.csv", "text,label\na,x\n".encode("utf-16")[2:], "holds NUL characters"),
        ("a.csv", b"text,label\na\0,x\n", "holds NUL characters"),
        (
            "a.csv",
            b"text;label\na;x\n",
            "has semicolons between its columns: save it with commas as .csv, or with tabs",
        ),
        ("a.csv", b"text\tlabel\na\tx\n", "has tabs between its columns"),
        ("a.tsv", b"text,label\na,x\n", "has commas between its columns"),
        (
            "a.csv",
            b"text,label\na,x\na,b,x\n",
            "row 2 of .* has 3 fields, its header 2: a field that holds commas stands",
        ),
        ("a.csv", b"text,label\na\n", "row 1 of .* has 1 fields, its header 2"),
        ("a.csv", b"text,label,text\na,x,b\n", "has several columns of the name 'text'"),
        ("a.csv", b'text,label\n"a,x\nb,y\n', "is no CSV: .*; a field in quotes ends with one"),
        ("a.csv", b"", "has no rows"),
        ("a.csv", b"text,label\n", "has no rows"),
        ("a.jsonl", b"\n", "has no rows"),
        ("a.csv", b"words,label\na,x\n", "row 1 of .* has no column 'text', it has words, label"),
        ("a.jsonl", b'{"text": null, "label": 1}', "row 1 of .* has nothing in column 'text'"),
        ("a.jsonl", b'{"text": "a", "label": 1}\n[1, 2]', "each line must hold one object, line 2 is list"),
        ("a.jsonl", b'"text"', "line 1 is str"),
        ("a.json", b'[\n{"text": "a"}\n]', "line 1 is no JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 is no JSON"),
    ],
)
def test_forms_that_are_refused(tmp_path, name, content, message):
    from parts.table import read_table

    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as refused:
        read_table(tmp_path / name, ["text", "label"], "--validation")
    shown = str(refused.value)
    assert shown.startswith("--validation: ") and name in shown and len(shown) < 400 and "\n" not in shown


@pytest.mark.parametrize(
    "task, row, message",
    [
        ("classification", {"label": ""}, "column 'label' is empty"),
        ("classification", {"label": " "}, "column 'label' is empty"),
        ("classification", {"label": float("nan")}, "column 'label' is empty"),
        ("classification", {"label": ["a"]}, "column 'label' must hold one label in each row, got"),
        ("classification", {"text": {"a": 1}}, "column 'text' must hold text, got"),
        ("regression", {"label": ""}, "column 'label' must hold numbers"),
        ("regression", {"label": "inf"}, "column 'label' must hold numbers"),
        ("regression", {"label": 10**400}, "column 'label' must hold numbers"),
        ("choice", {"pair": ["a", "b"], "label": float("inf")}, "the index of the right one of 2 choices, got inf"),
        ("choice", {"pair": ["a", "b"], "label": 2}, "the index of the right one of 2 choices, got 2"),
        ("choice", {"pair": ["a", "b"], "label": "a"}, "the index of the right one of 2 choices, got 'a'"),
        ("choice", {"pair": 3, "label": 0}, "column 'pair' must hold a list"),
        ("tagging", {"text": ["a", "b"], "label": ["O"]}, "2 words and 1 tags"),
        ("tagging", {"text": ["a"], "label": [""]}, "has an empty tag"),
        ("answer", {"label": "z" * 10_000}, "is not in its context"),
    ],
)
def test_labels_that_a_task_cannot_read(task, row, message):
    from parts import labels

    row = {"text": "a " * 10_000, "label": "a"} | row
    with pytest.raises(ValueError, match=message) as refused:
        labels.check(task, [row], [row], labels.Columns(pair="pair" if task == "choice" else None))
    assert len(str(refused.value)) < 400


def test_classes_have_one_order_whatever_order_they_come_in():
    """--resume reads them again; a class may be called nan."""
    from parts.labels import class_names

    names = ["2", "10", "a", "nan", "inf"]
    assert {tuple(class_names(some)) for some in itertools.permutations(names)} == {("2", "10", "inf", "a", "nan")}


def test_columns_that_are_no_classes():
    """A text column and a numeric one have too many classes; the message names three of them."""
    from parts import labels

    texts = [{"text": f"row {i} " * 100, "label": str(i % 5)} for i in range(400)]
    labels.check("classification", texts, texts, labels.Columns())
    with pytest.raises(ValueError, match="'text' has 400 different labels .*and 397 more.*--label-column") as refused:
        labels.check("classification", texts, texts, labels.Columns(label="text"))
    assert len(str(refused.value)) < 400
    numbers = [{"text": "a", "label": i / 7} for i in range(340)]
    with pytest.raises(ValueError, match="'label' has 340 different labels .*: --task regression"):
        labels.check("classification", numbers, numbers, labels.Columns())
    few = [{"text": "a", "label": f"{i} " * 100} for i in range(20)]
    with pytest.raises(ValueError, match="is none of the training rows'.* and 12 more") as refused:
        labels.check("classification", few, [{"text": "a", "label": "b " * 1000}], labels.Columns())
    assert len(str(refused.value)) < 1200


def test_tables_are_read_before_torch_is_imported(tmp_path):
    """Such errors come at once, in a process that has loaded neither torch nor transformers."""
    (tmp_path / "rows.csv").write_text("text;label\na;x\n")
    code = (
        "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\nimport finetune\n"
        "sys.exit(finetune.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--data", str(tmp_path / "rows.csv"), "--output", str(tmp_path / "out")],
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
    )
    pytest.importorskip("sklearn")
    assert done.returncode == 2 and "has semicolons between its columns" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


def test_backends_of_the_help_are_the_packages():
    import xlnet_kernels as xk
    from parts.command import BACKENDS

    assert set(BACKENDS) == set(xk.backends()) - {"cuda-on-host"}  # which tests add


def test_examples_in_the_help_break_between_options_and_words():
    from parts.command import Formatter

    shown = Formatter("x", width=60)._fill_text(
        'Help.\n\n    python x.py --fill "one two three" --order best --seed 12     words\n    python x.py   short',
        60,
        "",
    )
    assert shown == (
        'Help.\n\n    python x.py --fill "one two three" --order best \\\n        --seed 12\n        words\n'
        "    python x.py   short"
    )
