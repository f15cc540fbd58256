"""A run of objectives.py as a picture: a panel for each experiment, two for memory. Bands and dots are the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from . import THEIRS
from .report import BINS, names, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "permutation": "#d9480f",
    "masked": "#3b82c4",
    "autoregressive": "#2f9e6e",
    "permutation, half the time": "#e8890c",
    "permutation, the same time": "#f2b35e",
    "two streams": "#d9480f",
    "single stream": "#a463c9",
    "majority": "#b8b8b8",
}
OTHER = "#7a7a7a"  # transformers and baselines
MEMORIES = ("#7a7a7a", "#f2b35e", "#e8890c", "#d9480f", "#8f2f0a")


def draw(plt: ModuleType, rows: list[dict]) -> tuple[Figure, Axes]:
    """The panels of the experiments that were run."""
    panels = [(section, panel) for section, panel in PANELS if any(row["section"] == section for row in rows)]
    across = min(2, len(panels))  # three would be too small on a page
    down = -(-len(panels) // across)
    figure, grid = plt.subplots(down, across, figsize=(5.6 * across, 0.8 + 4 * down), squeeze=False)
    for axes, (section, panel) in zip(grid.flat, panels, strict=False):
        panel(axes, [row for row in rows if row["section"] == section])
        axes.title.set_color(plt.rcParams["text.color"])
        axes.grid(True, axis="y", color=OTHER, alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    return figure, grid[0][0]


def _pairs(axes: Axes, rows: list[dict]) -> None:
    for name in ("permutation", "masked"):
        curves = [[(one["bin"], one["gain"]) for one in row["bins"]] for row in rows_of(rows, name)]
        _band(axes, curves, name, COLOURS[name], marker="o")
    axes.set_xticks(range(len(BINS)), BINS)
    axes.set_xlabel("mutual information of two words (nats)")
    axes.set_title("gain: log p(A, B) - log p(A) - log p(B), nats")
    _legend(axes)


def _context(axes: Axes, rows: list[dict]) -> None:
    tasks = list(dict.fromkeys((row["task"], metric) for row in rows for metric in ("accuracy", "f1")))
    found = names(rows)
    width = 0.8 / len(found)
    for index, name in enumerate(found):
        label, offset = name, width * (index - (len(found) - 1) / 2)
        for place, (task, metric) in enumerate(tasks):
            values = [row[metric] for row in rows_of(rows, name) if row["task"] == task]
            if values:
                _bar(axes, place + offset, values, width, COLOURS.get(name, OTHER), label)
                label = ""
    axes.set_xticks(range(len(tasks)), [f"{task}\n{metric.replace('f1', 'F1')}" for task, metric in tasks])
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_ylim(top=1.3)  # room for the legend
    axes.set_title("fine-tuned models and baselines (grey)")
    _legend(axes, ncols=2)


def _positions(axes: Axes, rows: list[dict]) -> None:
    sizes = names(rows)
    # Three, because the curves of all sizes lie on each other.
    shown = {*sizes[:2], sizes[-1]}
    rows = [row for row in rows if row["implementation"] in shown]
    _memories(axes, rows, lambda row: list(enumerate(row["by_position"])))
    axes.set_xlabel("position in the segment (tokens)")
    axes.set_title("memory: held-out loss by position, nats per token")


def _contexts(axes: Axes, rows: list[dict]) -> None:
    _memories(axes, rows, lambda row: [(int(c), loss) for c, loss in row["by_context"].items()])
    axes.set_xlabel("context (tokens, at least)")
    axes.set_title("memory: held-out loss by context, nats per token")


def _memories(axes: Axes, rows: list[dict], curve: Callable[[dict], list[tuple[float, float]]]) -> None:
    for name in names(rows):
        found = rows_of(rows, name)
        label = f"{name} segment" if name.endswith(" 1") else f"{name} segments"
        _band(axes, [curve(row) for row in found], label, MEMORIES[found[0]["segments"] % len(MEMORIES)])
    _legend(axes)


def _streams(axes: Axes, rows: list[dict]) -> None:
    for place, name in enumerate(names(rows)):
        _bar(axes, place, [row["held_out"] for row in rows_of(rows, name)], 0.6, COLOURS[name], "")
    labels = []
    for name in names(rows):
        variation = statistics.fmean(row["other_position"] for row in rows_of(rows, name))
        labels.append(f"{name}\npredictions of two positions\ndiffer by {variation:.2g}")
    axes.set_xticks(range(len(labels)), labels)
    axes.set_title("streams: held-out loss, nats per target")


def _trainer(axes: Axes, rows: list[dict]) -> None:
    for name in names(rows):
        for number, row in enumerate(row for row in rows_of(rows, name) if row["course"]):
            points = [(seconds, loss) for _, seconds, loss in row["course"]]
            style = {"color": COLOURS.get(name, OTHER), "linewidth": 2.5 if name == THEIRS else 1.5}
            axes.plot(*zip(*points, strict=True), label="" if number else name, alpha=0.8, **style)
    axes.set_xlabel("processor seconds of training, one thread")
    axes.set_title("training speed: held-out loss,\neach target from its context alone, nats")
    _legend(axes)


def _band(axes: Axes, curves: Sequence[Sequence[tuple[float, float]]], label: str, colour: str, **style) -> None:
    """The mean of several curves over the same places, and all that lies between them."""
    places = [place for place, _ in curves[0]]
    values = [[y for _, y in points] for points in zip(*curves, strict=True)]
    axes.plot(places, [statistics.fmean(x) for x in values], label=label, color=colour, **style)
    axes.fill_between(places, [min(x) for x in values], [max(x) for x in values], color=colour, alpha=0.2, linewidth=0)


def _bar(axes: Axes, place: float, values: list[float], width: float, colour: str, label: str) -> None:
    axes.bar(place, statistics.fmean(values), width, color=colour, label=label, alpha=0.85)
    if len(values) > 1:
        axes.plot([place] * len(values), values, "o", color=OTHER, markersize=3)


def _legend(axes: Axes, ncols: int = 1) -> None:
    axes.legend(frameon=False, labelcolor=OTHER, fontsize=8, ncols=ncols)


PANELS: tuple[tuple[str, Callable[[Axes, list[dict]], None]], ...] = (
    ("pairs", _pairs),
    ("context", _context),
    ("memory", _positions),
    ("memory", _contexts),
    ("streams", _streams),
    ("trainer", _trainer),
)
