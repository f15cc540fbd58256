"""benchmarks/host_time.py: how it samples, and what the committed file says. The script itself compiles kernels."""

from __future__ import annotations

import itertools
import json
import sys
from types import SimpleNamespace

import pytest

from tests import ROOT

pytest.importorskip("triton")
sys.path.insert(0, str(ROOT / "benchmarks"))
import host_time  # noqa: E402
from lib import report  # noqa: E402

# Times of the operator in forward calls of torch's SDPA on one row, because processors differ by a factor of two.
MOST = {"triton": {"forward": 12, "backward": 30}, "cuda": {"forward": 2, "backward": 3}}


def test_a_row_holds_the_median_and_quartiles_of_a_call(monkeypatch):
    ticks, used = itertools.count(), itertools.count()  # used by the thread: a second for 100 calls
    clock = SimpleNamespace(perf_counter=lambda: next(ticks), thread_time=lambda: next(used))
    monkeypatch.setattr(host_time, "time", clock)
    calls = []
    (row,) = host_time.measure({("call", "forward"): lambda: calls.append(None)}, 5)
    assert row["median_us"] == row["low_us"] == row["high_us"] == 10_000
    assert (row["what"], row["direction"]) == ("call", "forward")
    assert len(calls) == 50 + 120 * row["samples"] and row["samples"] > 2


def test_the_operator_takes_no_longer_than_it_should():
    rows = json.loads((ROOT / "benchmarks/results/host-time.json").read_text())["rows"]
    found = [row for row in rows if row["what"] == "operator"]
    assert len(found) == 8  # two backends, two problems, two directions
    (unit,) = [row["median_us"] for row in rows if (row["what"], row["direction"]) == ("sdpa of one row", "forward")]
    assert all(row["median_us"] <= unit * MOST[row["backend"]][row["direction"]] for row in found), (unit, found)


def test_a_fast_path_of_cuda_takes_little_more_than_torchs():
    rows = json.loads((ROOT / "benchmarks/results/host-time.json").read_text())["rows"]
    times = {(row["problem"], row["what"], row["direction"]): row["median_us"] for row in rows
             if row["backend"] != "triton"}  # fmt: skip
    for direction, most in (("forward", 2), ("forward and backward", 2.5)):
        assert times["plain", "call", direction] <= most * times["plain", "sdpa of one row", direction], direction


def test_a_table_has_a_column_for_each_backend():
    row = {"problem": "plain", "what": "call", "direction": "forward"}
    rows = [row | {"backend": "triton", "median_us": 52.5}, row | {"backend": "cuda", "median_us": 10.2},
            row | {"backend": "torch", "what": "sdpa", "median_us": 48.3}]  # fmt: skip
    results = {"benchmark": "host time", "rows": rows, "environment": {"cpu": "a CPU", "torch": "2.13"}}
    lines = report.markdown(results).splitlines()
    assert lines[0] == "| problem | what | direction | triton | cuda | torch |"
    assert lines[2:4] == ["| plain | call | forward | 52 | 10 |  |", "| plain | sdpa | forward |  |  | 48 |"]
