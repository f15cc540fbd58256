"""A run as a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .claims import picture as claims
from .precision import delta_name
from .report import DIRECTIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASELINE = "plain SDPA"  # without positions
TITLES = {"forward": "forward", "backward": "forward and backward"}
INK = "#7a7a7a"  # text and axes: readable on white and on GitHub's dark page alike, as are the colours below
OWN = {
    "xlnet_kernels cpu": "#d9480f",
    "xlnet_kernels cuda": "#d9480f",
    "xlnet_kernels triton": "#e8890c",
    "xlnet_kernels torch": "#f2b35e",
    "memory, segments": "#d9480f",
    "memory, single tokens": "#e8890c",
}
PEERS = {
    "sliding window": ("#3b82c4", "-"),
    "transformers eager": ("#3b82c4", "-"),
    "transformers compiled": ("#3b82c4", "--"),
    "transformers sdpa": ("#2f9e6e", "-"),
    "SDPA + bias": ("#2f9e6e", "-"),
    "SDPA + bias compiled": ("#2f9e6e", "--"),
    "FlexAttention": ("#a463c9", "-"),
    "plain SDPA, no positions": (INK, ":"),
    "plain SDPA, no positions, flash": (INK, ":"),
    "plain SDPA, no positions, cuDNN": (INK, "-."),
    "plain SDPA, no positions, efficient": (INK, "--"),
}
BARS = {
    "xlnet_kernels": "#d9480f",
    "xlnet_kernels compiled": "#e8890c",
    "xlnet_kernels projected": "#f2b35e",
    "transformers eager": "#3b82c4",
    "transformers compiled": "#8fb8de",
}
TRAINING = {
    "float32": {"color": INK, "linewidth": 3},
    "float32, weights rounded once": {"color": INK, "linestyle": ":"},
    "autocast, delta from the rounded output": {"color": "#3b82c4", "linestyle": "--"},
    "autocast": {"color": "#d9480f"},
    "bfloat16 weights, delta from the rounded output": {"color": "#2f9e6e", "linestyle": "--"},
    "bfloat16 weights": {"color": "#e8890c"},
}


def plot(results: dict, path: Path) -> None:
    """Writes the picture of a run.

    Raises:
        ValueError: nothing was timed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    benchmark = results.get("benchmark", "attn")
    if benchmark not in PICTURES:
        raise ValueError(f"there is no picture for {benchmark}.py")
    draw, section, bottom = PICTURES[benchmark]
    rows = results["rows"]
    if section:
        rows = [row for row in rows if row["section"] == section and ("median_ms" in row or "losses" in row)]
    if not rows:
        raise ValueError("there is nothing to plot: no implementation has times")
    style = {"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK}
    with plt.rc_context(style | {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, first = draw(plt, rows)
        if bottom:
            handles, labels = first.get_legend_handles_labels()
            figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, labelcolor=INK)
        figure.suptitle(_title(results), color=INK)
        figure.tight_layout(rect=(0, bottom / figure.get_figheight(), 1, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, transparent=True)
        plt.close(figure)


def _over_length(plt: ModuleType, rows: list[dict]) -> tuple[Figure, Axes]:
    """One column per direction: time, peak memory and, where plain SDPA was measured, the share of its rate."""
    directions = [name for name in DIRECTIONS if any(row["direction"] == name for row in rows)]
    rows = [row | limit_share(row) for row in rows]
    panels = [("median_ms", 1, "milliseconds per call"), ("peak_bytes", 1e6, "peak MB above inputs\nand outputs")]
    if any("limit_share" in row for row in rows):
        panels.append(("limit_share", 0.01, "arithmetic per second,\nrelative to plain SDPA's"))
    size = (5.2 * len(directions), 1 + 3 * len(panels))
    figure, grid = plt.subplots(len(panels), len(directions), figsize=size, squeeze=False, sharex=True, sharey="row")
    for column, direction in enumerate(directions):
        here = [row for row in rows if row["direction"] == direction]
        for (key, unit, _), axes in zip(panels, grid[:, column], strict=True):
            for name in _names(rows):
                _draw_line(axes, [row for row in here if row["implementation"] == name], name, key, unit)
            _log_axes(axes, rows)
            if key == "limit_share":
                axes.set_yscale("linear")
                axes.yaxis.set_major_formatter("{x:g} %")
                axes.set_ylim(bottom=0)
                axes.axhline(100, color=INK, linestyle=":", linewidth=1.5)
        grid[0][column].set_title(TITLES[direction], color=INK)
    for axes, (_, _, label) in zip(grid[:, 0], panels, strict=True):
        axes.set_ylabel(label)
    for axes in grid[-1]:
        axes.set_xlabel(_length_label(rows))
    return figure, grid[0][0]


def summary(results: dict, path: Path) -> None:
    """Writes README's picture of a run of attn.py: time and peak memory of forward and backward, three lines each.

    Raises:
        ValueError: plain SDPA or transformers was not timed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in results["rows"] if row["section"] == "core" and "median_ms" in row]
    rows = [row for row in timed if row["direction"] == "backward"]
    own = next((row["implementation"] for row in rows if row["implementation"] in OWN), "")
    shown = {own: "xlnet_kernels", "transformers eager": "transformers", "plain SDPA, no positions": "plain attention"}
    if not shown.keys() <= {row["implementation"] for row in rows}:
        raise ValueError("there is nothing to plot: one of this package, transformers and plain SDPA has no times")
    rows = [row for row in rows if row["implementation"] in shown]
    style = {"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK}
    with plt.rc_context(style | {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, panels = plt.subplots(1, 2, figsize=(10, 4))
        for axes, key, unit, title in zip(
            panels,
            ("median_ms", "peak_bytes"),
            (1, 1e6),
            ("time, ms", "memory, MB above inputs and outputs"),
            strict=True,
        ):
            for name, label in shown.items():
                points = sorted((row for row in rows if row["implementation"] == name), key=lambda row: row["length"])
                _draw_line(axes, points, name, key, unit)
                place = points[-1]["length"], points[-1][key] / unit
                color = OWN.get(name) or PEERS[name][0]
                axes.annotate(label, place, (8, 0), textcoords="offset points", va="center", color=color)
            _log_axes(axes, rows)
            axes.set_xlim(right=4 * max(row["length"] for row in rows))  # room for the names
            axes.set_title(title, color=INK, loc="left")
            axes.set_xlabel(_length_label(rows))
        figure.suptitle(f"Forward and backward, {_title(results)}".replace("\n", ", "), color=INK, fontsize=10)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, transparent=True)
        plt.close(figure)


def limit_share(row: dict) -> dict[str, float]:
    """The arithmetic of attention with positions per second, relative to plain SDPA's per second without.

    The position term adds 1 product to plain attention's 2 forward, and 4 to its 7 forward and backward
    (docs/math.md). At 1 nothing but this arithmetic is paid for; products that are faster than plain SDPA's give more.
    """
    if "ratio_to_baseline" not in row or row["implementation"].startswith(BASELINE):
        return {}
    return {"limit_share": {"forward": 3 / 2, "backward": 11 / 7}[row["direction"]] / row["ratio_to_baseline"]}


def _tokens_per_second(plt: ModuleType, rows: list[dict]) -> tuple[Figure, Axes]:
    """Evaluation speed over attention length; the numbers at the points are factors over the sliding window."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name in _names(rows):
        points = [row for row in rows if row["implementation"] == name]
        _draw_line(axes, points, name, "tokens_per_s", 1)
        for row in points:
            if row.get("speedup", 1) != 1:
                place = (row["length"], row["tokens_per_s"])
                text = _two_digits(row["speedup"])
                axes.annotate(text, place, (0, 7), textcoords="offset points", ha="center", fontsize=8, color=INK)
    _log_axes(axes, rows)
    axes.set_title("numbers at the points: speed over that of a sliding window", color=INK, fontsize=9)
    axes.set_ylabel("tokens evaluated per second")
    axes.set_xlabel("attention length (tokens)")
    return figure, axes


def _bars(plt: ModuleType, rows: list[dict]) -> tuple[Figure, Axes]:
    """One group of bars per model and input: time above, peak memory below, one column per direction."""
    directions = [name for name in DIRECTIONS if any(row["direction"] == name for row in rows)]
    names, cases = _names(rows), {row["case"]: _case_name(row) for row in rows}
    width = 0.8 / len(names)
    size = (2 + 1.6 * len(cases) * len(directions), 7)
    figure, grid = plt.subplots(2, len(directions), figsize=size, squeeze=False, sharex=True)
    for column, direction in enumerate(directions):
        for (key, unit), axes in zip((("median_ms", 1), ("peak_bytes", 1e6)), grid[:, column], strict=True):
            for index, name in enumerate(names):
                found = {
                    row["case"]: row for row in rows if (row["implementation"], row["direction"]) == (name, direction)
                }
                places = [list(cases).index(case) + width * (index - (len(names) - 1) / 2) for case in found]
                heights = [(row.get(key) or 0) / unit for row in found.values()]
                axes.bar(places, heights, width, label=name, color=BARS.get(name, INK))
            axes.set_xticks(range(len(cases)), list(cases.values()))
            axes.grid(True, axis="y", color=INK, alpha=0.25, linewidth=0.6)
            axes.set_axisbelow(True)
        title = "forward (inference)" if direction == "forward" else "training step"
        grid[0][column].set_title(title, color=INK)
    grid[0][0].set_ylabel("milliseconds")
    grid[1][0].set_ylabel("peak MB above weights and inputs")
    return figure, grid[0][0]


def _training(plt: ModuleType, rows: list[dict]) -> tuple[Figure, Axes]:
    """Held-out losses of training runs, their distance from float32's, and errors of the position bias's gradient."""
    from matplotlib.ticker import LogLocator

    figure, (losses, differences, errors) = plt.subplots(1, 3, figsize=(14, 5))
    base = dict(rows[0]["held_out"])
    for row in rows:
        line = {"label": row["implementation"], **TRAINING.get(row["implementation"], {"color": INK})}
        losses.plot(*zip(*row["held_out"], strict=True), **line)
        differences.plot(base.keys(), [loss - base[step] for step, loss in row["held_out"]], **line)
        if row["errors"]:
            delta = delta_name(row["implementation"])
            found = [(probe["step"], statistics.fmean(probe["attention"][delta])) for probe in row["errors"]]
            errors.plot(*zip(*found, strict=True), marker="o", **line)
    errors.set_yscale("log")
    errors.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    errors.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    errors.minorticks_off()
    losses.set_title("held-out loss, nats per token", color=INK)
    differences.set_title("held-out loss minus float32's", color=INK)
    errors.set_title("relative error of the position bias's gradient,\nattention alone, mean of the layers", color=INK)
    for axes in (losses, differences, errors):
        axes.set_xlabel("step")
        axes.grid(True, color=INK, alpha=0.25, linewidth=0.6)
    return figure, losses


# per benchmark: how to draw, which section (None: all), and the inches that the legend takes (0: panels have their own)
PICTURES = {
    "attn": (_over_length, "core", 0.77),
    "model": (_bars, "model", 0.5),
    "recurrence": (_tokens_per_second, "recurrence", 0.32),
    "speech": (_over_length, "speech", 0.5),
    "precision": (_training, "training", 0.5),
    "objectives": (claims.draw, None, 0),
}


def _names(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["implementation"] for row in rows))


def _draw_line(axes: Axes, rows: list[dict], name: str, key: str, unit: float) -> None:
    points = sorted((row["length"], row[key] / unit) for row in rows if row.get(key))
    if points:
        axes.plot(*zip(*points, strict=True), label=name, **_line(name))


def _log_axes(axes: Axes, rows: list[dict]) -> None:
    lengths = sorted({row["length"] for row in rows})
    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    audio = {row["length"]: row["case"].partition(":")[0] for row in rows if row["section"] == "speech"}
    axes.set_xticks(lengths, [f"{length}\n{audio[length]}" if audio else str(length) for length in lengths])
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.minorticks_off()
    axes.grid(True, color=INK, alpha=0.25, linewidth=0.6)


def _line(name: str) -> dict:
    if name in OWN or (name.startswith("xlnet_kernels") and name != "xlnet_kernels reference"):
        return {"color": OWN.get(name, "#d9480f"), "linewidth": 3, "marker": "o", "zorder": 3}
    colour, dashes = PEERS.get(name, (INK, "-."))
    return {"color": colour, "linestyle": dashes, "linewidth": 1.5, "marker": "o", "markersize": 3.5}


def _length_label(rows: list[dict]) -> str:
    if rows[0]["section"] == "speech":
        return "length (frames, audio)"
    constant = len({row["length"] * row["batch"] for row in rows}) == 1
    return "length (tokens; batch x length constant)" if constant else "length (tokens)"


def _case_name(row: dict) -> str:
    """An input of model.py on lines of its own: what is computed, its size, its memory."""
    batch = f", batch {row['batch']}" if row["batch"] > 1 else ""
    memory = f"\n{row['mem_len']} of memory" if row["mem_len"] else ""
    return f"{row['case'].partition(', ')[0]}\n{row['length']} tokens{batch}{memory}"


def _two_digits(factor: float) -> str:
    return f"{float(f'{factor:.2g}'):g}x"


def _title(results: dict) -> str:
    facts, settings = results["environment"], results["settings"]
    where = facts.get("gpu") or f"{facts['cpu']}, {facts['threads']} thread{'s' * (facts['threads'] != 1)}"
    about = {
        "model": "Whole XLNet, {layers} layers, {d_model} wide, {heads} heads, {dtype}",
        "recurrence": "Transformer-XL evaluation, {layers} layers, {d_model} wide, {heads} heads, {dtype}",
        "precision": "XLNet trained, {objective}, {layers} layers, {d_model} wide, {seq_len} tokens, memory {mem_len}",
        "objectives": "Objectives, streams and memory, {layers} layers, {d_model} wide, {vocab} ids",
        "speech": "Attention of Parakeet, {d_model} wide, {heads} heads, {dtype}",
    }.get(results.get("benchmark"), "Transformer-XL attention, {heads} heads of {head_dim}, {dtype}")
    return f"{about.format(**settings)}\n{where}, torch {facts['torch']}"
