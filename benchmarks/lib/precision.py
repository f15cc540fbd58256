"""Results of experiments/precision.py as Markdown."""

from __future__ import annotations

import statistics

from .markdown import table

OWN, ROUNDED, SDPA = "xlnet_kernels", "xlnet_kernels, delta from the rounded output", "plain SDPA, no positions"
DELTAS = (ROUNDED, OWN)
WITH_ROUNDED = "delta from the rounded output"
SHOWN = {
    "u, SDPA": ("content_bias", SDPA),
    "u, rounded": ("content_bias", ROUNDED),
    "u, ours": ("content_bias", OWN),
    "v, rounded": ("position_bias", ROUNDED),
    "v, ours": ("position_bias", OWN),
}


def delta_name(implementation: str) -> str:
    """Which of the two deltas a training run has."""
    return ROUNDED if implementation.endswith(WITH_ROUNDED) else OWN


def markdown(results: dict) -> str:
    """A table for every section that was measured, and the machine."""
    sections = {"errors": _errors, "cost": _cost, "training": _training}
    found = []
    for section, show in sections.items():
        rows = [row for row in results["rows"] if row["section"] == section]
        if rows:
            found.append(show(rows))
    facts = results["environment"]
    found.append(f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads; torch {facts['torch']}.\n")
    return "\n\n".join(found)


def _errors(rows: list[dict]) -> str:
    """One line for each dtype and case; every cell has all lengths."""
    lengths = sorted({row["length"] for row in rows})
    found = {(row["dtype"], row["case"], row["implementation"], row["length"]): row["errors"] for row in rows}
    lines = []
    for case in dict.fromkeys((row["dtype"], row["case"]) for row in rows):
        cells = [
            " / ".join(f"{found[(*case, name, length)][leaf]:.2g}" for length in lengths)
            for leaf, name in SHOWN.values()
        ]
        lines.append([*case, *cells])
    return f"Each at L {' / '.join(map(str, lengths))}:\n\n" + table(["dtype", "rows, offsets", *SHOWN], lines)


def _cost(rows: list[dict]) -> str:
    """Medians with the residual and without, and what waits for backward."""
    pairs: dict[tuple[int, str], dict[str, dict]] = {}
    for row in rows:
        pairs.setdefault((row["length"], row["direction"]), {})[row["implementation"]] = row
    lines = []
    for (length, direction), pair in pairs.items():
        without, with_residual = pair[ROUNDED], pair[OWN]
        times = [
            f"{row['median_ms']:.2f} ({row['q1_ms']:.2f} - {row['q3_ms']:.2f})" for row in (without, with_residual)
        ]
        ratio = f"{with_residual['median_ms'] / without['median_ms']:.3f}"
        extra = with_residual["saved_bytes"] - without["saved_bytes"]
        sizes = [f"{extra:,}", f"{with_residual['out_bytes']:,}"]
        name = {"forward": "forward", "backward": "forward and backward"}[direction]
        lines.append([f"{rows[0]['dtype']}, L {length}", name, *times, ratio, *sizes])
    headers = ["call", "passes", "CPU ms without residual", "with", "ratio", "bytes of the residual", "of the output"]
    return table(headers, lines)


def _training(rows: list[dict]) -> str:
    """Where the runs end, how far they are from the first one, and errors of the position bias with either delta."""
    base = dict(rows[0]["held_out"])
    lines = []
    for row in rows:
        late = row["held_out"][len(row["held_out"]) // 2 :]
        distance = statistics.fmean(loss - base[step] for step, loss in late)
        spread = max(abs(loss - base[step]) for step, loss in late)
        cells = [f"{row['held_out'][-1][1]:.4f}", f"{distance:+.4f}, at most {spread:.4f}"]
        for part in ("attention", "model"):
            for delta in DELTAS:
                found = [_mean(probe[part][delta]) for probe in row["errors"]]
                cells.append(f"{min(found):.2g} - {max(found):.2g}" if found else "-")
        lines.append([row["implementation"], *cells])
    headers = ["training", "last held-out loss", "less float32's, second half: mean"]
    headers += [f"{part}, {delta}" for part in ("attention alone", "whole model") for delta in ("rounded", "ours")]
    return table(headers, lines)


def _mean(errors: float | list[float]) -> float:
    """The mean over layers."""
    return statistics.fmean(errors) if isinstance(errors, list) else errors
