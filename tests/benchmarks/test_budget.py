"""`--budget` of attn.py, by a clock that only the measured calls advance."""

from __future__ import annotations

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


def run(clock, budget, implementations, cases):
    from lib.measure import DIRECTIONS, Bench
    from lib.sections import core

    bench = Bench("cpu", DIRECTIONS, seconds=1, rounds=(3, 50), budget=budget, started=clock.now)
    core(bench, {one.name: one for one in implementations}, cases)
    return bench.rows


@pytest.mark.parametrize("each", [0.3, 1.0])
@pytest.mark.parametrize("budget", [20, 60])
def test_budget_is_kept(clock, small, budget, each):
    peers = [timed(clock, f"peer {index}", each) for index in range(8)]
    run(clock, budget, peers, [replace(small, length=length) for length in (64, 32, 48, 56)])
    assert clock.now <= 1.2 * budget


def test_compiled_peers_leave_half(clock, small):
    own, peers = timed(clock, "own", 0.01), [timed(clock, f"peer {index}", 0.01, 12) for index in range(4)]
    rows = run(clock, 60, [own, *peers], [small])
    reasons = {row["implementation"]: row.get("reason") for row in rows}
    assert reasons["own"] is None and reasons["peer 0"] is None and reasons["peer 1"] is None
    wanted = "left out to stay within the time budget: compiling others has taken 24 s (--budget, --full)"
    assert reasons["peer 2"] == reasons["peer 3"] == wanted and clock.now <= 72


def test_nothing_is_said_of_compiling_that_has_not_been(clock, small):
    rows = run(clock, 30, [timed(clock, "own", 0.01), timed(clock, "peer", 0.01, 12)], [small])
    (reason,) = {row["reason"] for row in rows if row["status"] == "skipped"}
    assert reason == "left out to stay within the time budget: compiling takes about 20 s (--budget, --full)"
