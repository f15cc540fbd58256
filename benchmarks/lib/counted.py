"""Times of a run of attn.py on a GPU beside what its kernels were counted to need (`make gpu-counts`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .headline import OWN, core_times
from .implementations import BASELINE

COUNTS = Path(__file__).resolve().parents[1] / "results/gpu-counts.json"
PAIRS = 1024  # of query and key, for which cycles are given


@dataclass(frozen=True)
class Line:
    """One kernel in one direction: cycles of a multiprocessor for 1024 pairs.

    `counted` is what its busiest resource, `bound_by`, needs at least; `ratio` and `counted_ratio` are multiples of
    the fastest plain attention's time and of the plain kernel's count, None where that was not timed.
    """

    kernel: str
    direction: str
    length: int
    counted: float
    bound_by: str
    measured: float
    counted_ratio: float
    ratio: float | None


def beside(run: dict, counts: dict | None = None) -> list[Line]:
    """Cases that were both timed and counted, none where the GPU's clock is not known, or nothing was counted for it.

    A backward pass alone is forward and backward together less the forward.
    """
    counts = counts or json.loads(COUNTS.read_text())
    gpu, settings = run["environment"], run["settings"]
    lines = []
    if "clock_mhz" not in gpu:  # nvidia-smi is not there
        return lines
    for row in counts["rows"]:
        if row["architecture"] != gpu["architecture"] or row["head_dim"] != settings["head_dim"]:
            continue
        if row["dtype"] != settings["dtype"] or row["case"] != "order+segments":
            continue
        times, pairs = core_times(run["rows"], row["length"], row["direction"])
        name = OWN + row["kernel"]
        if name in times:
            plain = min((time for one, time in times.items() if one.startswith(BASELINE)), default=None)
            cycles = times[name] / 1e3 * gpu["clock_mhz"] * 1e6 * gpu["multiprocessors"] / pairs * PAIRS
            lines.append(
                Line(
                    row["kernel"], row["direction"], row["length"], row["bound_cycles"], row["bound_by"], cycles,
                    row["ratio"], None if plain is None else times[name] / plain,
                )
            )  # fmt: skip
    return lines


def cells(run: dict, counts: dict | None = None) -> Iterator[tuple[str, ...]]:
    """The table, its header first; nothing where there is no line."""
    lines = beside(run, counts)
    if lines:
        yield "kernel", "direction", "L", "counted", "measured", "quotient", "counted vs plain", "measured vs plain"
    for line in lines:
        ratio = "-" if line.ratio is None else f"{line.ratio:.2f}x"
        counted = f"{line.counted:.0f} {line.bound_by}"
        quotient = f"{line.measured / line.counted:.2f}"
        yield (
            line.kernel, line.direction, str(line.length), counted, f"{line.measured:.0f}", quotient,
            f"{line.counted_ratio:.2f}x", ratio,
        )  # fmt: skip


def text(run: dict) -> Iterator[str]:
    """For a terminal."""
    rows = list(cells(run))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if rows:
        yield "cycles of a multiprocessor for 1024 pairs of query and key, counted (at least) and measured:"
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def markdown(run: dict) -> str:
    rows = [f"| {' | '.join(row)} |" for row in cells(run)]
    if not rows:
        raise ValueError("nothing in it was counted as well: gpu-counts.json has bfloat16 on sm_80 and sm_90")
    gpu = run["environment"]
    rows.insert(1, "|---" * 8 + "|")
    machine = f"{gpu['gpu']}, {gpu['multiprocessors']} multiprocessors at {gpu['clock_mhz']:.0f} MHz"
    return "\n".join([*rows, "", f"Cycles of a multiprocessor for 1024 pairs of query and key; {machine}.", ""])
