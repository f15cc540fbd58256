"""Labelled rows from Python's manual, which every Python has: which of its longest topics a passage is from."""

from __future__ import annotations

import pydoc_data.topics
import re

from parts.table import Row

TOPICS = 8


def passages(size: int = 240) -> dict[str, list[str]]:
    """Passages of about `size` letters by topic, cut between words, white space collapsed."""
    longest = sorted(pydoc_data.topics.topics.items(), key=lambda item: -len(item[1]))[:TOPICS]
    found = {}
    for name, text in longest:
        words, rows = re.sub(r"\s+", " ", text).split(" "), [""]
        for word in words:
            if len(rows[-1]) >= size:
                rows.append("")
            rows[-1] = f"{rows[-1]} {word}".strip()
        found[name] = rows[:-1]
    return found


def topics() -> tuple[list[Row], list[Row]]:
    """Training and testing rows with the columns text and label: every fifth block of eight passages is for testing."""
    training: list[Row] = []
    testing: list[Row] = []
    for name, rows in passages().items():
        for number, text in enumerate(rows):
            (testing if number // 8 % 5 == 4 else training).append({"text": text, "label": name})
    return training, testing
