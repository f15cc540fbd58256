"""Pictures of the numbers in metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path


def draw_curves(metrics: Path) -> None:
    """Draw every number of `metrics` over the steps, into curves.png beside it, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step":
                steps, values = curves.setdefault(name, ([], []))
                steps.append(line["step"])
                values.append(value)
    # A training loss and its validation loss share a panel.
    panels = [name for name in curves if not name.startswith("validation_") or name[11:] not in curves]
    if not panels:
        return
    figure = Figure(figsize=(4 * len(panels), 3), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.plot(*curves[name], linewidth=1, label="training")
        held_out = curves.get(f"validation_{name}")
        if held_out:
            axes.plot(*held_out, "o-", markersize=3, label="validation")
            axes.legend()
        axes.set_title(name.replace("_", " "))
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.savefig(metrics.with_name("curves.png"), dpi=120)
