"""Runs of whole models in a few lines: this package against the fastest of its peers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .report import direction_name, markdown

OWN = "xlnet_kernels"
SUFFIX = "-2-cores"  # of names of runs
PARTS = {"speech": "attention, ", "speech-layer": "layer, "}  # sections whose cases have the same names
HEADS = ("run", "case", "direction", "ms", "peer", "peer's ms", "times as fast", "peak MB", "peer's peak MB")


def table(runs: dict[str, dict]) -> str:
    """One Markdown table of several runs by name: a line for each case and direction.

    Raises:
        ValueError: a result of a run is wrong.
    """
    lines = [HEADS, ["---"] * len(HEADS)]
    for name, run in runs.items():
        lines += ([name.removesuffix(SUFFIX), *cells] for cells in _lines(run["rows"]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _lines(rows: list[dict]) -> Iterator[list[str]]:
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if not row.get("check", {"passed": True})["passed"]:
            raise ValueError(f"{row['implementation']} is wrong in {row['case']}")
        if "median_ms" in row:
            groups.setdefault((row["section"], row["case"], row["direction"]), []).append(row)
    for (section, case, _), group in groups.items():
        peers = [row for row in group if not row["implementation"].startswith(OWN)]
        peer = min(peers, key=lambda row: row["median_ms"], default=None)
        for row in (row for row in group if row not in peers):
            kind = row["implementation"].removeprefix(OWN)  # ", medium"
            faster = "-" if peer is None else f"{peer['median_ms'] / row['median_ms']:.2f}"
            name = "-" if peer is None else peer["implementation"]
            numbers = (_ms(row), name, _ms(peer), faster, _megabytes(row), _megabytes(peer))
            yield [PARTS.get(section, "") + case + kind, direction_name(row), *numbers]


def _ms(row: dict | None) -> str:
    return "-" if row is None else f"{row['median_ms']:,.{0 if row['median_ms'] >= 100 else 2}f}"


def _megabytes(row: dict | None) -> str:
    return "-" if row is None or row.get("peak_bytes") is None else f"{row['peak_bytes'] / 1e6:,.0f}"


def page(runs: dict[str, dict], where: Path) -> None:
    """Writes a page of all tables of all runs by name; curves of training have none."""
    parts = (f"## {name}\n\n{markdown(run)}" for name, run in runs.items() if "curves" not in run)
    where.write_text("# Tables of all results\n\n" + "\n".join(parts))
