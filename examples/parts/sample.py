"""Text and labelled rows from Python's manual, which every Python has."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator

from parts.table import Row

LONGEST = 8


def texts() -> dict[str, str]:
    """The manual's topics by name, without the paragraphs that `topics` tests on: models are trained on these."""
    found = dict(pydoc_data.topics.topics)
    for name in _longest():
        found[name] = "\n\n".join(part for part, testing in _parts(name) if not testing)
    return dict(sorted(found.items()))


def topics() -> tuple[list[Row], list[Row]]:
    """Training and testing rows: parts of the longest topics, white space collapsed, labelled with the topic."""
    tables: tuple[list[Row], list[Row]] = ([], [])
    for name in _longest():
        for part, testing in _parts(name):
            tables[testing].append({"text": " ".join(part.split()), "label": name})
    return tables


def _longest() -> list[str]:
    found = pydoc_data.topics.topics
    return sorted(found, key=lambda name: (-len(found[name]), name))[:LONGEST]


def _parts(name: str, size: int = 240) -> Iterator[tuple[str, bool]]:
    """A topic in parts of whole paragraphs and at least `size` letters; whether a part is for testing: one in five."""
    part, number = "", 0
    for paragraph in pydoc_data.topics.topics[name].split("\n\n"):
        part = f"{part}\n\n{paragraph}" if part else paragraph
        if len(part) >= size:
            yield part, number % 5 == 4
            part, number = "", number + 1
    if part:
        yield part, False
