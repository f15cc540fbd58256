"""Which GPU backend is faster where: `python benchmarks/backend_choice.py RESULTS.json [RESULTS.json ...]`.

Reads runs of attn.py. Where both have right results, a class of lengths gets the geometric mean of their ratios. The
order in xlnet_kernels/backends/__init__.py is one for all calls; classes where the other backend wins show what that
costs.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lib.report import DIRECTION_NAMES

BACKENDS = ("cuda", "triton")
CLASSES = (256, 1024, 4096)  # lengths up to these, and beyond


@dataclass(frozen=True)
class Choice:
    """`ratios` are triton's time over cuda's by length; `alone` is the only backend that has right results."""

    dtype: str
    head_dim: int
    lengths: str
    direction: str
    ratios: dict[int, float]
    alone: str | None = None

    @property
    def ratio(self) -> float:
        return statistics.geometric_mean(self.ratios.values())

    @property
    def best(self) -> str:
        return self.alone or BACKENDS[self.ratio < 1]

    def __str__(self) -> str:
        where = f"{self.dtype}, heads of {self.head_dim}, L {self.lengths}, {DIRECTION_NAMES[self.direction]}"
        if self.alone:
            return f"{where}: {self.alone} alone"
        each = ", ".join(f"L {length}: {ratio:.2f}" for length, ratio in self.ratios.items())
        return f"{where}: {self.best} {max(self.ratio, 1 / self.ratio):.2f}x as fast (triton / cuda {each})"


def class_of(length: int) -> str:
    """
    >>> class_of(128), class_of(512), class_of(8192)
    ('up to 256', '257 to 1024', 'beyond 4096')
    """
    bounds = (0, *CLASSES)
    for below, bound in zip(bounds, CLASSES, strict=False):
        if length <= bound:
            return f"{below + 1} to {bound}" if below else f"up to {bound}"
    return f"beyond {CLASSES[-1]}"


def choices(rows: Iterable[dict]) -> list[Choice]:
    """The core section's, by dtype, head width, class of lengths and direction; a wrong backend counts as absent."""
    core = [row for row in rows if row["section"] == "core"]
    wrong = {_kind(row) for row in core if not row.get("check", {"passed": True})["passed"]}
    groups: dict[tuple, dict[int, dict[str, float]]] = {}
    for row in core:
        name = row["implementation"].removeprefix("xlnet_kernels ")
        if name in BACKENDS and "median_ms" in row and _kind(row) not in wrong:
            key = (row["dtype"], row["head_dim"], class_of(row["length"]), row["direction"])
            groups.setdefault(key, {}).setdefault(row["length"], {})[name] = row["median_ms"]
    found = []
    for key, lengths in groups.items():
        both = {length: times for length, times in sorted(lengths.items()) if len(times) == len(BACKENDS)}
        ratios = {length: times["triton"] / times["cuda"] for length, times in both.items()}
        alone = None if ratios else " or ".join(sorted({name for times in lengths.values() for name in times}))
        found.append(Choice(*key, ratios, alone))
    return sorted(found, key=lambda one: (one.dtype, one.head_dim, one.direction != "forward", _first(one)))


def _kind(row: dict) -> tuple:
    return row["implementation"], row["dtype"], row["head_dim"], row["direction"]


def _first(one: Choice) -> int:
    """Where its class begins, to sort by."""
    names = [class_of(length) for length in (1, *(bound + 1 for bound in CLASSES))]
    return names.index(one.lengths)


def summary(found: list[Choice]) -> list[str]:
    """For each dtype and head width, which backend wins how many classes, and what taking it everywhere costs there."""
    lines = []
    for kind in dict.fromkeys((one.dtype, one.head_dim) for one in found):
        here = [one for one in found if (one.dtype, one.head_dim) == kind and not one.alone]
        if not here:
            continue
        ratio = statistics.geometric_mean(one.ratio for one in here)
        best = BACKENDS[ratio < 1]
        lost = [max(one.ratio, 1 / one.ratio) for one in here if one.best != best]
        cost = f"; at worst {max(lost):.2f}x slower where it does not" if lost else ""
        wins = f"{best} wins {len(here) - len(lost)} of {len(here)}"
        lines.append(f"{kind[0]}, heads of {kind[1]}: {wins}, by {max(ratio, 1 / ratio):.2f}x in the mean{cost}")
    return lines


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    found = choices(row for name in arguments for row in json.loads(Path(name).read_text())["rows"])
    if not found:
        print("no run of a GPU backend in these files", file=sys.stderr)
        return 1
    print(*found, "", *summary(found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
