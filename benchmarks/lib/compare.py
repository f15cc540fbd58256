"""Comparison of two runs of attn.py, to find slower cases: ratios to plain SDPA then and now, and how sure they are.

Both runs timed an implementation in turn with plain SDPA, so their ratio hardly knows how fast the machine was then.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_GROWTH = 0.10  # what is never called slower
NOISES = 3  # growth must be larger than so many standard errors
SAME = ("section", "implementation", "case", "length", "batch", "heads", "head_dim", "mem_len", "dtype", "direction")


@dataclass(frozen=True)
class Change:
    """One row of both runs: its ratio then and now. `bound` is the growth beyond which it counts as slower."""

    name: str
    before: float
    now: float
    bound: float

    @property
    def growth(self) -> float:
        return self.now / self.before - 1

    @property
    def is_slower(self) -> bool:
        return self.growth > self.bound

    def __str__(self) -> str:
        times = f"{self.before:6.2f}x {self.now:6.2f}x {self.growth:+7.1%} (bound {self.bound:+.1%})"
        return f"{self.name:60} {times}{'  SLOWER' if self.is_slower else ''}"


def changes(before: list[dict], now: list[dict]) -> list[Change]:
    """This package's rows that both runs have, in the order of the newer one."""
    earlier = {_key(row): (row, before) for row in before if _is_compared(row)}
    found = []
    for row in filter(_is_compared, now):
        if _key(row) in earlier:
            old, rows = earlier[_key(row)]
            noise = (_noise(old, rows) ** 2 + _noise(row, now) ** 2) ** 0.5
            name = f"{row['section']} L {row['length']} x {row['batch']} {row['direction']} {row['implementation']}"
            ratios = old["ratio_to_baseline"], row["ratio_to_baseline"]
            found.append(Change(name, *ratios, max(LEAST_GROWTH, NOISES * noise)))
    return found


def _is_compared(row: dict) -> bool:
    own = row["implementation"].startswith("xlnet_kernels") and "samples" in row
    return own and row.get("baseline", "").startswith("plain SDPA")


def _key(row: dict) -> tuple:
    return tuple(row.get(name) for name in SAME)


def _noise(row: dict, rows: list[dict]) -> float:
    """Standard error of the ratio of two medians, relative to it, as of normal samples with these quartiles."""
    baseline = {"implementation": row["baseline"]}
    parts = [row, *(one for one in rows if _key(one) == _key(row | baseline))]
    spreads = [(one["q3_ms"] - one["q1_ms"]) / one["median_ms"] for one in parts]
    return 0.93 * sum(x**2 / one["samples"] for x, one in zip(spreads, parts, strict=True)) ** 0.5
