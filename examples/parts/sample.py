"""Text and labelled rows from the manual that comes with Python."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator

from parts.table import Row

LONGEST = 8


def texts() -> dict[str, str]:
    """The manual's topics by name, for training: without the testing paragraphs of `topics`."""
    tested = {_plain(paragraph) for _, paragraphs, testing in _parts() if testing for paragraph in paragraphs}
    return {
        name: "\n\n".join(paragraph for paragraph in text.split("\n\n") if _plain(paragraph) not in tested)
        for name, text in sorted(pydoc_data.topics.topics.items())
    }


def topics() -> tuple[list[Row], list[Row]]:
    """Rows for training and testing: parts of the longest topics, white space collapsed, labelled with the topic."""
    tables: tuple[list[Row], list[Row]] = ([], [])
    for name, paragraphs, testing in _parts():
        tables[testing].append({"text": _plain(" ".join(paragraphs)), "label": name})
    return tables


def _parts(size: int = 240) -> Iterator[tuple[str, list[str], bool]]:
    """Topic, paragraphs of at least `size` letters together, and whether they are for testing: one part in five.

    Topics share paragraphs; each counts for the first topic that has it.
    """
    found, seen = pydoc_data.topics.topics, set()
    for name in sorted(found, key=lambda name: (-len(found[name]), name))[:LONGEST]:
        part: list[str] = []
        number = 0
        for paragraph in found[name].split("\n\n"):
            if _plain(paragraph) in seen:
                continue
            seen.add(_plain(paragraph))
            part.append(paragraph)
            if sum(map(len, part)) >= size:
                yield name, part, number % 5 == 4
                part, number = [], number + 1
        if part:
            yield name, part, False


def _plain(text: str) -> str:
    return " ".join(text.split())
