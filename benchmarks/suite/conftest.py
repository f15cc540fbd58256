"""What the cases share: the floor beside each case, and the facts that go into the results instead of a host's name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from lib.harness import Run, environment, seconds  # noqa: E402
from regressions import summary  # noqa: E402


def pytest_addoption(parser):
    group = parser.getgroup("suite")
    group.addoption("--seconds", type=float, default=2.0, help="per case, its floor included")
    group.addoption("--tiny", action="store_true", help="tiny inputs, to see whether the suite runs")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def measure(benchmark, pytestconfig, device) -> Callable[[Run, Run, str], None]:
    """Times `run`, with `floor` before each of its calls, so that both meet the same state of the machine."""

    def measure(run: Run, floor: Run, direction: str) -> None:
        floors: list[float] = []

        def call() -> None:
            run.step(direction)
            if device == "cuda":
                torch.cuda.synchronize()

        def floor_calls(times: int) -> float:
            return seconds(lambda: [floor.step(direction) for _ in range(times)], device) / times

        for _ in range(2):
            once, floor_once = seconds(call, device), floor_calls(1)
        # a floor much shorter than the case would be measured too carelessly
        times = max(1, round(0.2 * once / floor_once))
        rounds = min(max(int(pytestconfig.getoption("seconds") / (once + times * floor_once)), 5), 300)
        benchmark.pedantic(call, setup=lambda: floors.append(floor_calls(times)), rounds=rounds)
        if benchmark.enabled:
            benchmark.extra_info |= summary(benchmark.stats.stats.data, floors)

    return measure


def pytest_benchmark_generate_machine_info(config):
    return environment("cuda" if torch.cuda.is_available() else "cpu")


def pytest_benchmark_generate_commit_info(config):
    return {}  # in the facts of the machine
