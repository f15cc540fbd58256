"""Time and memory over length as a picture: `python benchmarks/plot.py RESULTS.json [PICTURE.png]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from report import DIRECTION_NAMES

INK = "#7a7a7a"  # text and axes: readable on white and on GitHub's dark page alike, as are the colours below
OWN = {"xlnet_kernels cpu": "#d9480f", "xlnet_kernels cuda": "#d9480f", "xlnet_kernels triton": "#e8890c"}
PEERS = {
    "transformers eager": ("#3b82c4", "-"),
    "transformers compiled": ("#3b82c4", "--"),
    "SDPA + bias": ("#2f9e6e", "-"),
    "SDPA + bias compiled": ("#2f9e6e", "--"),
    "FlexAttention": ("#a463c9", "-"),
    "plain SDPA, no positions": (INK, ":"),
}


def plot(results: dict, path: Path) -> None:
    """Writes the picture of a run's "core" section: one column per direction, time above, peak memory below.

    Raises:
        ValueError: nothing was timed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in results["rows"] if row["section"] == "core" and "median_ms" in row]
    if not rows:
        raise ValueError("there is nothing to plot: no implementation has times")
    directions = [name for name in DIRECTION_NAMES if any(row["direction"] == name for row in rows)]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    style = {"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK}
    with plt.rc_context(style | {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        size = (5.2 * len(directions), 7)
        figure, grid = plt.subplots(2, len(directions), figsize=size, squeeze=False, sharex=True, sharey="row")
        for column, direction in enumerate(directions):
            for (key, unit), axes in zip((("median_ms", 1), ("peak_bytes", 1e6)), grid[:, column], strict=True):
                for name in names:
                    points = [row for row in rows if row["implementation"] == name and row["direction"] == direction]
                    points = sorted((row["length"], row[key] / unit) for row in points if row.get(key))
                    if points:
                        axes.plot(*zip(*points, strict=True), label=name, **_line(name))
                axes.set_yscale("log")
                axes.set_xscale("log", base=2)
                axes.set_xticks(lengths, [str(length) for length in lengths])
                axes.minorticks_off()
                axes.grid(True, color=INK, alpha=0.25, linewidth=0.6)
            grid[0][column].set_title(DIRECTION_NAMES[direction], color=INK)
        grid[0][0].set_ylabel("milliseconds per call")
        grid[1][0].set_ylabel("peak MB above inputs and outputs")
        for axes in grid[1]:
            axes.set_xlabel("length (tokens; batch x length constant)" if _constant_tokens(rows) else "length (tokens)")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, labelcolor=INK)
        figure.suptitle(_title(results), color=INK)
        figure.tight_layout(rect=(0, 0.11, 1, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, transparent=True)
        plt.close(figure)


def _line(name: str) -> dict:
    if name.startswith("xlnet_kernels") and name != "xlnet_kernels reference":
        return {"color": OWN.get(name, "#d9480f"), "linewidth": 3, "marker": "o", "zorder": 3}
    colour, dashes = PEERS.get(name, (INK, "-."))
    return {"color": colour, "linestyle": dashes, "linewidth": 1.5, "marker": "o", "markersize": 3.5}


def _constant_tokens(rows: list[dict]) -> bool:
    return len({row["length"] * row["batch"] for row in rows}) == 1


def _title(results: dict) -> str:
    facts, settings = results["environment"], results["settings"]
    where = facts.get("gpu") or f"{facts['cpu']}, {facts['threads']} threads"
    shape = f"{settings['heads']} heads of {settings['head_dim']}, {settings['dtype']}"
    return f"Transformer-XL attention, {shape}\n{where}, torch {facts['torch']}"


def main(arguments: list[str]) -> int:
    if not arguments or len(arguments) > 2:
        print(__doc__, file=sys.stderr)
        return 2
    source = Path(arguments[0])
    path = Path(arguments[1]) if len(arguments) > 1 else source.with_suffix(".png")
    try:
        plot(json.loads(source.read_text()), path)
    except (OSError, ValueError, KeyError) as error:
        print(f"{source}: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
