"""Draws the band of position scores and how each backend shifts it: `python docs/assets/shift.py` writes the SVGs."""

from __future__ import annotations

from pathlib import Path

from drawing import ACCENT, WIDTH, Drawing, write

ROWS, COUNT = 4, 8  # of query, of keys
WINDOW = ROWS + COUNT - 1


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


def label_rows(drawing: Drawing, x: float, y: float) -> None:
    for row in range(ROWS):
        drawing.text(x - 0.3, y + row + 0.5, f"row {row}", "end", "small")


def draw_band(drawing: Drawing, x: float, y: float) -> None:
    drawing.text(x, y - 0.6, "the band: rows times a window of rel_key")
    label_rows(drawing, x, y)
    drawing.cells(x, y, ROWS, WINDOW, band_key)


def draw_cpu() -> Drawing:
    """One piece of memory, read in two ways."""
    drawing = Drawing("CPU: the band and the scores are the same memory", 12.5, WIDTH / 35)
    draw_band(drawing, 2.5, 1.3)
    drawing.text(15.2, 3.3, "the same\nmemory,\nrows one\ncloser", "middle")
    drawing.arrow((17.2, 3.3), (19.2, 3.3))
    drawing.text(22, 0.7, "the scores: keys in columns")
    label_rows(drawing, 22, 1.3)
    drawing.cells(22, 1.3, ROWS, COUNT, lambda row, column: column)

    drawing.text(1, 7.1, f"as it lies in memory: rows are {WINDOW} apart; the scores start at {ROWS - 1}, then every "
                 f"{WINDOW - 1}")  # fmt: skip
    cells = [(row, column) for row in range(ROWS) for column in range(WINDOW)][:33]
    drawing.cells(1, 7.7, 1, len(cells), lambda _, place: band_key(*cells[place]))
    for row in range(3):
        start = 1 + row * WINDOW
        drawing.line([(start + 0.1, 9.2), (start + WINDOW - 0.1, 9.2)])
        drawing.text(start + WINDOW / 2, 9.8, f"band, row {row}", "middle", "small")
        start = 1 + ROWS - 1 + row * (WINDOW - 1)
        drawing.line([(start + 0.1, 10.8), (start + COUNT - 0.1, 10.8)], ACCENT)
        drawing.text(start + COUNT / 2, 11.4, f"scores, row {row}", "middle", "small")
    return drawing


def draw_triton() -> Drawing:
    """Two blocks, the columns picked from them, three steps of exchanges."""
    drawing = Drawing("Triton: two blocks, picked, rotated in three steps", 13, WIDTH / 47)
    drawing.text(3, 0.7, "the band: two blocks of BLOCK_N rows of rel_key")
    label_rows(drawing, 3, 1.4)
    drawing.cells(3, 1.4, ROWS, 2 * COUNT, band_key)
    drawing.line([(3 + COUNT, 1.1), (3 + COUNT, 5.7)])
    drawing.arrow((20, 3.4), (22, 3.4))
    drawing.text(22.6, 3.4, "each column from the block in which its row has it:\nthe keys are all there, "
                 "rotated by the row's own shift,\n3 2 1 0")  # fmt: skip
    titles = ("picked", "bit 0 exchanged", "bit 1", "bit 2: in place")
    for step, (tile, title) in enumerate(zip(butterfly(), titles, strict=True)):
        x = 1 + 12.2 * step
        drawing.text(x, 7.5, title)
        drawing.cells(x, 8.2, ROWS, COUNT, lambda row, column, tile=tile: tile[row][column])
        if step:
            drawing.arrow((x - 3.6, 10.2), (x - 0.7, 10.2))
    return drawing


def draw_cuda() -> Drawing:
    """One row of an accumulator: four lanes with two columns each, and the source of each lane's scores."""
    shift = 3
    drawing = Drawing("CUDA: four lanes hold eight columns of a row", 14, WIDTH / 35)
    draw_band(drawing, 2.5, 1.3)
    drawing.text(14.5, 3.3, "here row 0, which is shifted by 3, the others likewise:\neight columns of a row lie in "
                 "four lanes, a quad,\ntwo in each")  # fmt: skip
    x, top, low = 18, 8, 12
    drawing.text(x, top - 1.4, "band, two tiles of eight columns")
    for column in range(16):
        drawing.text(x + column + 0.5, top - 0.5, f"{column % 8}", "middle", "small")
    drawing.cells(x, top, 1, 16, lambda _, column: band_key(0, column))
    drawing.cells(x + shift, low, 1, COUNT, lambda _, column: column)
    drawing.text(x + shift - 0.4, low + 0.5, "scores", "end", "small")
    for lane in range(4):
        for start, y in ((x, top + 1.2), (x + 8, top + 1.2), (x + shift, low + 1.2)):
            left = start + 2 * lane
            drawing.line([(left + 0.15, y), (left + 1.85, y)])
            drawing.text(left + 1, y + 0.5, f"lane {lane}", "middle", "small")
    for column in range(COUNT):
        centre = x + shift + column + 0.5
        drawing.arrow((centre, top + 2.3), (centre, low - 0.1))
    drawing.text(1, 9.5, "Each lane asks one lane for its left\nscore and one for its right one: two\nshuffles for any "
                 "shift. The score that a\nlane offers follows from the shift alone.")  # fmt: skip
    return drawing


DRAWINGS = {"cpu": draw_cpu, "triton": draw_triton, "cuda": draw_cuda}


if __name__ == "__main__":
    write(DRAWINGS, Path(__file__).parent)
