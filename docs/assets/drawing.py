"""A small writer of SVG, shared by shift.py and call.py: same input, same file, without a library."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

WIDTH = 800  # of every drawing; letters are at least 12 high, so that they are readable at this width
INK = "#7a7a7a"  # readable on white and on dark pages
ACCENT = "#d9480f"
# One for each key of a grid and each kind of box; white letters are readable on them.
COLOURS = ["#b5432a", "#a8640f", "#857413", "#4a8228", "#1f8266", "#2878b5", "#5a5fc4", "#9a4fb0"]
LINE = 16  # from a line of text to the next
Cell = Callable[[int, int], "int | None"]  # the key whose score stands in (row, column), None for none's


class Drawing:
    """Shapes and texts, with y downwards; `unit` pixels are one unit of the coordinates."""

    def __init__(self, title: str, height: float, unit: float = 1):
        self.title, self.height, self.unit = title, height, unit
        self._shapes: list[str] = []

    def _length(self, value: float) -> str:
        return f"{round(value * self.unit, 1):g}"

    def _point(self, x: float, y: float) -> str:
        return f"{self._length(x)} {self._length(y)}"

    def text(self, x: float, y: float, lines: str, place: str = "start", style: str = "") -> None:
        """Lines around the height y, from x on or around x (place="middle") or up to it ("end")."""
        parts = lines.split("\n")
        names = " ".join(filter(None, (place, style)))
        for number, part in enumerate(parts):
            low = round(y * self.unit + (number - (len(parts) - 1) / 2) * LINE + 4.5, 1)
            self._shapes.append(f'<text x="{self._length(x)}" y="{low:g}" class="{names}">{escape(part)}</text>')

    def box(self, x: float, y: float, width: float, height: float, lines: str, colour: int) -> None:
        """A filled box whose first line is bold."""
        self._shapes.append(
            f'<rect x="{self._length(x)}" y="{self._length(y)}" width="{self._length(width)}" '
            f'height="{self._length(height)}" rx="4" fill="{COLOURS[colour]}"/>'
        )
        count = lines.count("\n") + 1
        for number, line in enumerate(lines.split("\n")):
            middle = y + height / 2 + (number - (count - 1) / 2) * LINE / self.unit
            self.text(x + width / 2, middle, line, "middle", "light" if number else "light bold")

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """A dashed frame around other shapes."""
        path = f"M{self._point(x, y)}h{self._length(width)}v{self._length(height)}h{self._length(-width)}z"
        self._shapes.append(f'<path d="{path}" class="line" stroke-dasharray="5 4"/>')

    def line(self, points: Iterable[tuple[float, float]], colour: str = INK) -> None:
        path = "L".join(self._point(*point) for point in points)
        self._shapes.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through the points with a head at the last one."""
        path = "L".join(self._point(*point) for point in points)
        self._shapes.append(f'<path d="M{path}" class="line" marker-end="url(#head)"/>')

    def cells(self, x: float, y: float, rows: int, columns: int, cell: Cell) -> None:
        """A grid whose upper left corner is (x, y); each cell in its key's colour, with its key's number."""
        places = [(cell(row, column), x + column, y + row) for row in range(rows) for column in range(columns)]
        square = f"h{self._length(1)}v{self._length(1)}h{self._length(-1)}z"
        for key in sorted({key for key, *_ in places if key is not None}):
            path = "".join(f"M{self._point(left, top)}{square}" for found, left, top in places if found == key)
            self._shapes.append(f'<path d="{path}" fill="{COLOURS[key]}"/>')
        lines = [f"M{self._point(x, y + row)}h{self._length(columns)}" for row in range(rows + 1)]
        lines += [f"M{self._point(x + column, y)}v{self._length(rows)}" for column in range(columns + 1)]
        self._shapes.append(f'<path d="{"".join(lines)}" class="line"/>')
        for key, left, top in places:
            if key is not None:
                self.text(left + 0.5, top + 0.5, str(key), "middle", "light")

    def source(self) -> str:
        """The content of the SVG file."""
        size = f"{WIDTH} {self.height * self.unit:g}"
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{WIDTH}" role="img">',
            f"<title>{escape(self.title)}</title>",
            "<style>",
            f"text{{font:13px sans-serif;fill:{INK}}}.middle{{text-anchor:middle}}.end{{text-anchor:end}}",
            f".light{{fill:#fff}}.small{{font-size:12px}}.bold{{font-weight:bold}}.line{{fill:none;stroke:{INK}}}",
            "</style>",
            '<marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
            f'<path d="M0 0L9 4L0 8z" fill="{INK}"/></marker>',
        ]
        return "\n".join([*head, *self._shapes, "</svg>", ""])


def write(drawings: dict[str, Callable[[], Drawing]], folder: Path) -> None:
    """Write an SVG of each drawing into the folder."""
    for name, draw in drawings.items():
        (folder / f"{name}.svg").write_text(draw().source(), encoding="utf-8")
