"""Reading and checking the label column of a table for each task, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parts.table import Row, cut, some


@dataclass(frozen=True)
class Columns:
    """Names of the columns; `pair` may be missing."""

    text: str = "text"
    pair: str | None = None
    label: str = "label"


def check(task: str, training: Sequence[Row], testing: Sequence[Row], columns: Columns) -> None:
    """Refuse rows that the task cannot read, and columns with unsuitable contents.

    Raises:
        ValueError: a row or column is invalid; the text names the column and the need.
    """
    for row in (*training, *testing):
        READERS[task](row, columns)
        if task != "tagging" and isinstance(row[columns.text], (list, dict)):
            raise _wrong(columns.text, "text", row[columns.text])
    if task in ("classification", "tagging"):
        given, others = (_all_labels(task, rows, columns) for rows in (training, testing))
        classes = class_names(given)
        check_classes(classes, len(given), columns.label)
        for label in others:
            index_of(classes, label)


def _all_labels(task: str, rows: Sequence[Row], columns: Columns) -> list[str]:
    if task == "classification":
        return [class_of(row, columns) for row in rows]
    return [tag for row in rows for tag in tags_of(row, columns)]


def class_names(labels: Iterable[str]) -> list[str]:
    """The different class names, numbers first."""
    return sorted(set(labels), key=_numbers_first)


def check_classes(classes: Sequence[str], count: int, column: str) -> None:
    """Raise ValueError if there are too few or too many classes among `count` labels."""
    if len(classes) < 2:
        raise ValueError(f"--data: column {column!r} has {len(classes)} class, two are needed")
    if len(classes) > max(20, count // 2):
        numbers = all(_numbers_first(label)[0] == 0 for label in classes)
        hint = "--task regression learns numbers" if numbers else "--label-column names the column of the classes"
        raise ValueError(
            f"--data: column {column!r} has {len(classes):,} different labels among {count:,}, too many for "
            f"classes ({some(classes, 3)}): {hint}"
        )


def index_of(classes: Sequence[str], label: str) -> int:
    """The class's number; ValueError if the training rows lack the class."""
    try:
        return classes.index(label)
    except ValueError:
        raise ValueError(f"--data: label {cut(label)!r} is none of the training rows': {some(classes)}") from None


def class_of(row: Row, columns: Columns) -> str:
    """The name of the row's class."""
    value = row[columns.label]
    if isinstance(value, (list, dict)):
        raise _wrong(columns.label, "one label in each row", value)
    label = str(value)
    if not label.strip() or value != value:  # NaN stands for an empty field
        raise ValueError(f"--data: column {columns.label!r} is empty in a row: {show(row)}")
    return label


def number_of(row: Row, columns: Columns) -> float:
    """The number in the row's label."""
    try:
        value = float(row[columns.label])
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"--data: column {columns.label!r} must hold numbers, got {show(row)}")
    return value


def choice_of(row: Row, columns: Columns) -> int:
    """The index of the right choice in `choices_of`."""
    count, value = len(choices_of(row, columns)), row[columns.label]
    try:
        index = int(value)
    except (TypeError, ValueError, OverflowError):
        index = -1
    if not 0 <= index < count or float(value) != index:
        raise _wrong(columns.label, f"the index of the right one of {count} choices", value)
    return index


def choices_of(row: Row, columns: Columns) -> list[Any]:
    """The continuations to choose from."""
    return _list(row, columns.pair or "choices")


def words_of(row: Row, columns: Columns) -> list[str]:
    """The words to tag."""
    return [str(word) for word in _list(row, columns.text)]


def tags_of(row: Row, columns: Columns) -> list[str]:
    """A class for each word."""
    words, tags = words_of(row, columns), [str(tag) for tag in _list(row, columns.label)]
    if len(words) != len(tags):
        raise ValueError(f"--data: {len(words)} words and {len(tags)} tags in {show(row)}")
    if not all(tag.strip() for tag in tags):
        raise ValueError(f"--data: column {columns.label!r} has an empty tag in {show(row)}")
    return tags


def answer_of(row: Row, columns: Columns) -> str:
    """The answer, a part of the text."""
    answer = str(row[columns.label])
    if not answer.strip() or answer not in str(row[columns.text]):
        raise ValueError(f"--data: the answer {cut(answer)!r} is not in its context, in {show(row)}")
    return answer


READERS: Mapping[str, Callable[[Row, Columns], Any]] = {
    "classification": class_of,
    "regression": number_of,
    "choice": choice_of,
    "tagging": tags_of,
    "answer": answer_of,
}


def show(row: Row) -> str:
    """A row for a message."""
    return "{" + some([f"{name!r}: {cut(repr(value))}" for name, value in row.items()], 4) + "}"


def _wrong(column: str, needed: str, value: object) -> ValueError:
    return ValueError(f"--data: column {column!r} must hold {needed}, got {cut(repr(value))}")


def _list(row: Row, name: str) -> list[Any]:
    """The list in a field: a list, its JSON, or words separated by spaces (in CSV)."""
    value = row[name]
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.lstrip().startswith("[") else value.split()
        except (ValueError, RecursionError):
            value = value.split()  # words, the first beginning with a bracket
    if not isinstance(value, (list, tuple)) or not value:
        raise _wrong(name, "a list, or words with spaces between", row[name])
    return list(value)


def _numbers_first(label: str) -> tuple[int, float, str]:
    try:
        number = float(label)
    except ValueError:
        number = math.nan
    # Because NaN has no order.
    return (1, 0.0, label) if math.isnan(number) else (0, number, label)
