"""`--budget` of attn.py, by a clock that only the measured calls advance."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("scripts")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0


@pytest.fixture
def clock(monkeypatch, scripts) -> Clock:
    clock = Clock()
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # slow with all of transformers in memory
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(
        "lib.products.seconds", lambda call, device: 1e-3
    )  # of matrix products, which cost no time here
    return clock


def timed(clock: Clock, name: str, seconds: float, compiling: float = 0.0):
    """An implementation whose every call takes `seconds`, and its first `compiling` more."""
    from lib.harness import Run
    from lib.implementations import Implementation

    def prepare(problem) -> Run:
        leaf, todo = torch.zeros(1, requires_grad=True), [compiling]

        def forward():
            clock.now += seconds + (todo.pop() if todo else 0.0)
            return leaf * 2

        return Run(forward, {"query": leaf}, torch.ones(1))

    return Implementation(name, prepare, checked=False, compiled=compiling > 0)


@pytest.fixture
def small():
    from lib.problem import Case

    return Case(64, 1, 1, 8, 0, torch.float32, "cpu")


def run(clock, budget, implementations, cases, section="core"):
    from lib import sections
    from lib.measure import DIRECTIONS, Bench

    bench = Bench("cpu", DIRECTIONS, seconds=1, rounds=(3, 50), budget=budget, started=clock.now)
    getattr(sections, section)(bench, {one.name: one for one in implementations}, cases)
    return bench.rows


@pytest.mark.parametrize("section", ["core", "peers"])
@pytest.mark.parametrize("each", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("budget", [20, 60])
def test_budget_is_kept(clock, small, budget, each, section):
    peers = [timed(clock, f"peer {index}", each) for index in range(8)]
    run(clock, budget, peers, [replace(small, length=length) for length in (64, 32, 48, 56)], section)
    # The last to begin is called twice, and then once for a sample.
    assert clock.now <= budget + 3 * each


def test_peers_compile_while_there_is_time(clock, small):
    peers = [timed(clock, f"peer {index}", 0.01, 12) for index in range(4)]
    rows = run(clock, 40, peers, [small], "peers")
    reasons = [row.get("reason") for row in rows if row["direction"] == "forward"]
    wanted = "left out to stay within the time budget: compiling others has taken 36 s (--budget, --full)"
    assert reasons == [None, None, None, wanted] and clock.now <= 40


def test_nothing_is_said_of_compiling_that_has_not_been(clock, small):
    rows = run(clock, 15, [timed(clock, "peer", 0.01, 12)], [small], "peers")
    (reason,) = {row["reason"] for row in rows}
    assert reason == "left out to stay within the time budget: compiling takes about 20 s (--budget, --full)"


def test_peers_are_related_to_the_baseline_measured_before(clock, small):
    from lib import sections
    from lib.implementations import BASELINE, TRANSFORMERS
    from lib.measure import DIRECTIONS, Bench

    bench = Bench("cpu", DIRECTIONS, seconds=1, rounds=(3, 50), budget=60, started=clock.now)
    sections.core(
        bench, {name: timed(clock, name, each) for name, each in ((BASELINE, 0.1), (TRANSFORMERS, 0.4))}, [small]
    )
    sections.peers(bench, {"peer": timed(clock, "peer", 0.2)}, [small])
    for row in bench.rows[-2:]:
        assert row["implementation"] == "peer" and row["baseline"] == BASELINE
        assert (row["ratio_to_baseline"], row["speedup"]) == (2, 2)


@pytest.mark.parametrize("compiling", [30, 300])
@pytest.mark.parametrize("each", [0.02, 2.0])
def test_ours_and_the_baselines_come_first(clock, monkeypatch, tmp_path, capsys, each, compiling):
    """On a machine where peers take minutes to compile, and where a call takes seconds."""
    import attn
    from lib import sections

    first = ["xlnet_kernels cpu", "plain SDPA, no positions", "transformers eager"]
    later, late = ["xlnet_kernels torch", "SDPA + bias"], ["transformers compiled", "FlexAttention"]
    offered = [timed(clock, name, each, compiling) for name in late]
    offered += [timed(clock, name, each) for name in (*later, *reversed(first))]
    monkeypatch.setattr(attn, "_own_backends", lambda *_: ["cpu", "torch"])
    measured = []
    for name in ("streams", "module", "precision", "long"):
        monkeypatch.setattr(sections, name, lambda bench, *rest, name=name: measured.append((name, len(bench.rows))))
    monkeypatch.setattr(attn, "chosen", lambda words, device: {one.name: one for one in offered})
    monkeypatch.setattr("signal.signal", lambda *_: None)
    output, lengths = tmp_path / "results.json", (32, 48, 64)
    sizes = ["--heads", "1", "--head-dim", "8", "--batch", "1", "--lengths", *map(str, lengths)]
    assert attn.main(["--device", "cpu", *sizes, "--budget", "240", "--output", str(output)]) == 0

    results = json.loads(output.read_text())
    rows = results["rows"]
    timed_rows = [(row["implementation"], row["length"]) for row in rows if "median_ms" in row]
    wanted = {(name, length) for name in first for length in lengths}
    assert set(timed_rows[: 2 * len(wanted)]) == wanted  # both directions
    assert [name for name, _ in timed_rows[: 2 * len(first)]] == [name for name in first for _ in range(2)]
    # The other sections come next, each of them, then what is left.
    assert measured == [(name, 2 * len(wanted)) for name in ("streams", "module", "precision", "long")]
    assert timed_rows[2 * len(wanted)][0] == later[0]
    # One that has begun is not stopped: two calls, one of them compiling, and a sample.
    assert clock.now <= 240 + compiling + 3 * each and results["settings"]["budget"] == 240

    # Each left-out case is named twice, in the file with its reason.
    reasons = {(row["implementation"], row["length"]): row["reason"] for row in rows if row["status"] != "ok"}
    assert each > 1 or {(name, length) for name in later for length in lengths} <= set(timed_rows)
    names = {name for name, _ in timed_rows} | {name for name, _ in reasons}
    assert names == {*first, *later, *late}
    said = capsys.readouterr().out
    for (name, _), reason in reasons.items():
        assert "budget" in reason and f"{name} (" in said and reason in said
