"""Tables in Markdown."""

from __future__ import annotations


def table(headers: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    return "\n".join(f"| {' | '.join(line)} |" for line in [headers, ["---"] * len(headers), *lines])
