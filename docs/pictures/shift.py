"""Draws the band of position scores and how each backend shifts it: `python docs/pictures/shift.py` writes the SVGs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

INK = "#7a7a7a"  # readable on white and on dark pages
KEYS = ["#b5432a", "#a8640f", "#857413", "#4a8228", "#1f8266", "#2878b5", "#5a5fc4", "#9a4fb0"]  # one for each key
ROWS, COUNT = 4, 8  # of query, of keys
WINDOW = ROWS + COUNT - 1
Cell = Callable[[int, int], "int | None"]  # the key whose score stands in (row, column), None for none's


def band_key(row: int, column: int) -> int | None:
    """The band: row i, whose position is i, has key j in column ROWS - 1 - i + j."""
    key = column - (ROWS - 1 - row)
    return key if 0 <= key < COUNT else None


def butterfly() -> list[list[list[int]]]:
    """Triton's tile (row, column) -> key: as picked from two blocks, and after each step of the rotation."""
    shifts = [ROWS - 1 - row for row in range(ROWS)]
    tiles = [[[(column - shift) % COUNT for column in range(COUNT)] for shift in shifts]]
    for bit in (1, 2, 4):
        before = tiles[-1]
        tiles.append(
            [
                [line[column ^ bit if ((column & (bit - 1)) + shift) & bit else column] for column in range(COUNT)]
                for line, shift in zip(before, shifts, strict=True)
            ]
        )
    return tiles


def draw_cells(axes: Axes, x: float, y: float, rows: int, columns: int, cell: Cell, text: Cell | None = None) -> None:
    """A grid whose upper left corner is (x, y), rows downwards; each cell in its key's colour."""
    for row in range(rows):
        for column in range(columns):
            key = cell(row, column)
            left, low = x + column, y - row - 1
            colour = "none" if key is None else KEYS[key]
            axes.add_patch(Rectangle((left, low), 1, 1, facecolor=colour, edgecolor=INK, linewidth=0.7))
            label = key if text is None else text(row, column)
            if label is not None:
                axes.text(left + 0.5, low + 0.47, str(label), ha="center", va="center", color="white", fontsize=9)


def label_rows(axes: Axes, x: float, y: float, rows: int) -> None:
    for row in range(rows):
        axes.text(x - 0.3, y - row - 0.5, f"row {row}", ha="right", va="center", fontsize=9)


def note(axes: Axes, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, ha="left", va="bottom", fontsize=10)


def paragraph(axes: Axes, x: float, y: float, *lines: str) -> None:
    axes.text(x, y, "\n".join(lines), ha="left", va="center", fontsize=10)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Axes in which a cell is one unit and 0.28 inches."""
    figure = plt.figure(figsize=(0.28 * width, 0.28 * height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def draw_band(axes: Axes, x: float, y: float) -> None:
    note(axes, x, y + 0.3, "the band: rows times a window of rel_key")
    label_rows(axes, x, y, ROWS)
    draw_cells(axes, x, y, ROWS, WINDOW, band_key)


def draw_cpu() -> Figure:
    """One piece of memory, read in two ways."""
    figure, axes = canvas(37, 13.5)
    draw_band(axes, 3, 11.5)
    axes.text(15.6, 9.5, "the same\nmemory,\nrows one\ncloser", ha="center", va="center", fontsize=10)
    axes.add_patch(FancyArrowPatch((17.4, 9.5), (19.6, 9.5), arrowstyle="-|>", mutation_scale=12, color=INK))
    note(axes, 23, 11.8, "the scores: keys in columns")
    label_rows(axes, 23, 11.5, ROWS)
    draw_cells(axes, 23, 11.5, ROWS, COUNT, lambda row, column: column)

    note(axes, 3, 5.2, f"as it lies in memory (rows are {WINDOW} apart; the scores start at {ROWS - 1}, then every "
         f"{WINDOW - 1})")  # fmt: skip
    cells = [(row, column) for row in range(ROWS) for column in range(WINDOW)][:33]
    draw_cells(axes, 3, 4.8, 1, len(cells), lambda _, place: band_key(*cells[place]))
    for row in range(3):
        start = 3 + row * WINDOW
        axes.plot([start + 0.1, start + WINDOW - 0.1], [3.2, 3.2], color=INK, linewidth=2)
        axes.text(start + WINDOW / 2, 2.9, f"band, row {row}", ha="center", va="top", fontsize=9)
        start = 3 + ROWS - 1 + row * (WINDOW - 1)
        axes.plot([start + 0.1, start + COUNT - 0.1], [1.5, 1.5], color="#d9480f", linewidth=2)
        axes.text(start + COUNT / 2, 1.2, f"scores, row {row}", ha="center", va="top", fontsize=9)
    return figure


def draw_triton() -> Figure:
    """Two blocks, the columns picked from them, three steps of exchanges."""
    figure, axes = canvas(52, 13.5)
    note(axes, 3, 11.8, "the band: two blocks of BN rows of rel_key")
    label_rows(axes, 3, 11.5, ROWS)
    draw_cells(axes, 3, 11.5, ROWS, 2 * COUNT, band_key)
    axes.plot([3 + COUNT] * 2, [7.2, 11.8], color=INK, linewidth=2.5)
    axes.add_patch(FancyArrowPatch((20, 9.5), (22, 9.5), arrowstyle="-|>", mutation_scale=12, color=INK))
    paragraph(axes, 22.6, 9.5, "each column from the block", "in which its row has it: the keys",
              "are all there, rotated by the row's", "own shift, 3 2 1 0")  # fmt: skip
    titles = ("picked", "exchanged where bit 0 asks", "bit 1", "bit 2: in place")
    for step, (tile, title) in enumerate(zip(butterfly(), titles, strict=True)):
        x = 3 + 12.5 * step
        note(axes, x, 5.2, title)
        draw_cells(axes, x, 4.9, ROWS, COUNT, lambda row, column, tile=tile: tile[row][column])
        if step:
            arrow = FancyArrowPatch((x - 3.6, 2.9), (x - 0.9, 2.9), arrowstyle="-|>", mutation_scale=12, color=INK)
            axes.add_patch(arrow)
    return figure


def draw_cuda() -> Figure:
    """One row of an accumulator: four lanes with two columns each, and what each lane asks of which."""
    shift = 3
    figure, axes = canvas(35, 13.5)
    draw_band(axes, 3, 11.5)
    paragraph(axes, 15.2, 9.5, "here row 0, which is", "shifted by 3, the others", "likewise: eight columns of",
              "a row lie in four lanes, a", "quad, two in each")  # fmt: skip
    x, top, low = 18, 5.7, 2.0
    note(axes, x, top + 1.2, "band, two tiles of eight columns")
    for column in range(16):
        axes.text(x + column + 0.5, top + 0.15, f"{column % 8}", ha="center", va="bottom", fontsize=7)
    draw_cells(axes, x, top, 1, 16, lambda _, column: band_key(0, column))
    draw_cells(axes, x + shift, low, 1, COUNT, lambda _, column: column)
    axes.text(x + shift - 0.4, low - 0.5, "scores", ha="right", va="center", fontsize=9)
    for lane in range(4):
        for start, y in ((x, top - 1.25), (x + 8, top - 1.25), (x + shift, low - 1.25)):
            left = start + 2 * lane
            axes.plot([left + 0.15, left + 1.85], [y + 0.1] * 2, color=INK, linewidth=1.5)
            axes.text(left + 1, y, f"lane {lane}", ha="center", va="top", fontsize=7)
    for column in range(COUNT):
        centre = x + shift + column + 0.5
        arrow = FancyArrowPatch(
            (centre, top - 2.2), (centre, low + 0.05), arrowstyle="-|>", mutation_scale=8, color=INK
        )
        axes.add_patch(arrow)
    paragraph(axes, 3, 3.3, "Each lane asks one lane for its left", "score and one for its right one: two",
              "shuffles, whatever the shift. What a", "lane offers follows from the shift", "alone.")  # fmt: skip
    return figure


PICTURES = {"cpu": draw_cpu, "triton": draw_triton, "cuda": draw_cuda}


def main(folder: Path, kind: str = "svg") -> None:
    style = {"text.color": INK, "svg.fonttype": "none", "svg.hashsalt": "xlnet_kernels", "font.family": "sans-serif"}
    with plt.rc_context(style):
        for name, draw in PICTURES.items():
            figure = draw()
            metadata = {"Date": None} if kind == "svg" else None  # the same file from every run
            figure.savefig(folder / f"{name}.{kind}", transparent=True, metadata=metadata, dpi=110)
            plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
