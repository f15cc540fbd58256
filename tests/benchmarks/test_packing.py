"""packing.py: what it writes, and that a wrong result ends it with a status."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("rich")
pytestmark = pytest.mark.usefixtures("scripts", "one_thread")


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_both_ways_are_checked_and_timed(wrong, tmp_path, monkeypatch, capsys):
    import packing

    if wrong:  # each sequence also sees the one before it
        made = packing.xk.RankMask.packed
        monkeypatch.setattr(packing.xk.RankMask, "packed", lambda ids: made(ids // 2))
    output = tmp_path / "packing.json"
    assert packing.main(["--device", "cpu", "--quick", "--output", str(output)]) == wrong
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == len(packing.SPREADS) * 2 * 2 and all(row["median_ms"] > 0 for row in rows)
    assert [row["check"]["passed"] for row in rows if row["implementation"] == "padded"] == [True] * 6
    assert any(not row["check"]["passed"] for row in rows if row["implementation"] == "packed") == wrong
    assert {row["ratio_to_baseline"] for row in rows if row["implementation"] == "padded"} == {1}
    assert ("x padded" in capsys.readouterr().out) and rows[0]["case"].startswith("64, 128 .. 1024 / 16: 544 of 1024")


def test_all_ways_of_an_encoder(tmp_path, capsys):
    pytest.importorskip("transformers")
    import packing

    output = tmp_path / "packing.json"
    assert packing.main(["--device", "cpu", "--quick", "--layers", "1", "--forward", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["implementation"] for row in rows] == ["transformers", "accelerated", "skip_padding", "one by one"]
    assert all(row["check"]["passed"] for row in rows)
    assert "129 of 372" in rows[0]["case"] and "x padded" in capsys.readouterr().out
