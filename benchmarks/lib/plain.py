"""Tables as plain text, for where rich is missing or the terminal too narrow for its tables."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field

# Columns that are left out first where the terminal is narrow; it is in the results file.
DISPENSABLE = ("quartiles", "peak MB", "published", "vs its compiled")
GAP = "  "


@dataclass
class Column:
    header: str
    justify: str
    cells: list[str] = field(default_factory=list)

    def widest(self) -> int:
        return max(map(len, (self.header, *self.cells)))

    def longest_word(self) -> int:
        """Below this a word or a number would be cut. Only text (what is on the left) is broken between words."""
        words = self.header.split()
        words += self.cells if self.justify == "right" else [word for cell in self.cells for word in cell.split()]
        return max(map(len, words))


class PlainTable:
    """The part of rich's Table that the reports use."""

    def __init__(self, title: str) -> None:
        self.title, self.columns, self.sections = title, [], set()

    def add_column(self, header: str, *, justify: str = "left", no_wrap: bool = False) -> None:
        self.columns.append(Column(header, justify))

    def add_row(self, *cells: str) -> None:
        for column, cell in zip(self.columns, cells, strict=True):
            column.cells.append(re.sub(r"\[/?[a-z ]*\]", "", cell))  # without rich's markup

    def add_section(self) -> None:
        self.sections.add(len(self.columns[0].cells))

    def text(self, width: int) -> str:
        """The table in lines of at most `width` where that can be without cutting a word or a number."""
        columns, left_out = self.columns, []
        for name in (None, *DISPENSABLE):
            if name is not None and any(column.header == name for column in columns):
                columns = [column for column in columns if column.header != name]
                left_out.append(name)
            widths = _fit(columns, width)
            if sum(widths) + len(GAP) * (len(widths) - 1) <= width:
                break
        found = [self.title, *_row([column.header for column in columns], columns, widths)]
        found.append(GAP.join("-" * size for size in widths))
        for index in range(len(columns[0].cells)):
            if index in self.sections and index:
                found.append("")
            found += _row([column.cells[index] for column in columns], columns, widths)
        if left_out:
            found.append(f"(too narrow for: {', '.join(left_out)})")
        return "\n".join(found) + "\n"


def _fit(columns: list[Column], width: int) -> list[int]:
    """Widths of the columns; the widest of those that can give way does, and so on."""
    widths = [column.widest() for column in columns]
    least = [column.longest_word() for column in columns]
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - width
    for _ in range(max(0, excess)):
        index = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        widths[index] -= widths[index] > least[index]
    return widths


def _row(cells: list[str], columns: list[Column], widths: list[int]) -> list[str]:
    """One row, in as many lines as its longest cell takes."""
    wrapped = [
        textwrap.wrap(cell, size, break_long_words=False, break_on_hyphens=False)
        for cell, size in zip(cells, widths, strict=True)
    ]
    found = []
    for line in range(max(1, *map(len, wrapped))):
        parts = [cell[line] if line < len(cell) else "" for cell in wrapped]
        placed = [
            part.rjust(size) if column.justify == "right" else part.ljust(size)
            for part, size, column in zip(parts, widths, columns, strict=True)
        ]
        found.append(GAP.join(placed).rstrip())
    return found
