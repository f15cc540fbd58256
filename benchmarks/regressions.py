"""Which cases of the suite have become slower than a baseline says: ratios to plain SDPA, and how sure they are.

A case is timed in turn with plain SDPA of the same size. Each pair gives one ratio. Their median hardly knows how
fast the machine was that minute, and is what is compared between runs.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass

LEAST_GROWTH = 0.10  # what is never called a regression
NOISES = 3  # growth must be larger than so many standard errors


@dataclass(frozen=True)
class Ratio:
    """Time of a case as a multiple of plain SDPA's: median and quartiles over `rounds` pairs."""

    median: float
    q1: float
    q3: float
    rounds: int

    @property
    def noise(self) -> float:
        """Standard error of the median, relative to it, as of normal samples with these quartiles."""
        return 0.93 * (self.q3 - self.q1) / (self.median * self.rounds**0.5)


@dataclass(frozen=True)
class Change:
    """One case then and now; either is None where the case is only in the other run."""

    name: str
    before: Ratio | None
    now: Ratio | None

    @property
    def growth(self) -> float | None:
        """0.2: a fifth more time than before, relative to plain SDPA; None where there is nothing to compare."""
        return self.now.median / self.before.median - 1 if self.before and self.now else None

    @property
    def bound(self) -> float | None:
        """Growth beyond this is a regression."""
        if self.growth is None:
            return None
        return max(LEAST_GROWTH, NOISES * (self.before.noise**2 + self.now.noise**2) ** 0.5)

    @property
    def is_regression(self) -> bool:
        return self.growth is not None and self.growth > self.bound


def summary(samples: list[float], floors: list[float]) -> dict[str, float | int]:
    """The fields of a Ratio from the seconds of a case and those of the floor right before each.

    Raises:
        ValueError: the lists are empty or of unequal length.
    """
    if not samples or len(samples) != len(floors):
        raise ValueError(f"samples and floors must be pairs, got {len(samples)} and {len(floors)}")
    ratios = [sample / floor for sample, floor in zip(samples, floors, strict=True)]
    q1, median, q3 = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {"median": round(median, 4), "q1": round(q1, 4), "q3": round(q3, 4), "rounds": len(ratios)}


def ratios(report: dict) -> dict[str, Ratio]:
    """The cases of a pytest-benchmark report by name."""
    return {case["name"].removeprefix("test_"): Ratio(**case["extra_info"]) for case in report["benchmarks"]}


def compare(before: dict[str, Ratio], now: dict[str, Ratio]) -> list[Change]:
    """Every case of either run, in the order of the newer one."""
    return [Change(name, before.get(name), now.get(name)) for name in dict.fromkeys([*now, *before])]


def confirmed(changes: list[Change], again: dict[str, Ratio]) -> list[Change]:
    """The changes, each case that was measured again with the better of both measurements."""
    found = []
    for change in changes:
        second = again.get(change.name)
        is_better = second is not None and change.now is not None and second.median < change.now.median
        found.append(Change(change.name, change.before, second) if is_better else change)
    return found


def machine(facts: dict) -> str:
    """A name for machines of one kind: the GPU, or the CPU and how many threads.

    >>> machine({"cpu": "Intel(R) Xeon(R) Processor @ 2.50GHz", "threads": 2})
    'intel-xeon-2.50ghz-2-threads'
    """
    name = facts.get("gpu") or f"{facts['cpu']} {facts['threads']} threads"
    name = re.sub(r"\((R|TM)\)|\b(CPU|Processor)\b", " ", name)
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def differences(before: dict, now: dict) -> list[str]:
    """What else has changed between two runs that may change the ratios."""
    names = ("cpu", "gpu", "cpu_capability", "threads", "torch", "cuda", "python")
    pairs = [(name, before.get(name), now.get(name)) for name in names]
    return [f"{name}: {old} before, {new} now" for name, old, new in pairs if old != new]
