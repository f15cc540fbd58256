"""Rows of CSV, of JSON lines, or of a folder saved by `datasets`."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
LONGEST = 2**31 - 1  # limit of a CSV field; the largest C long on every system
MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def read_table(path: Path, columns: Sequence[str], option: str = "--data") -> list[Row]:
    """The rows of a .csv, .tsv, .jsonl or .json (lines) file, or of a folder of `datasets.Dataset.save_to_disk`.

    Text is UTF-8, or UTF-16 with its mark.

    Args:
        columns: names that every row must have.
        option: the beginning of errors.

    Raises:
        ValueError: the file does not exist, is of another kind or damaged, or a column is missing.
    """
    try:
        rows = _read(path)
        for number, row in enumerate(rows, 1):
            for name in columns:
                if name not in row:
                    raise ValueError(f"row {number} of {path} has no column {name!r}, it has {some(list(row))}")
                if row[name] is None:
                    raise ValueError(f"row {number} of {path} has nothing in column {name!r}")
        if not rows:
            raise ValueError(f"{path} has no rows")
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
    return rows


def split(rows: list[Row], held_out: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Split off a random share of the rows.

    Raises:
        ValueError: one side is empty.
    """
    import numpy as np

    order = np.random.default_rng(seed).permutation(len(rows))
    count = round(len(rows) * held_out)
    if not 0 < count < len(rows):
        raise ValueError(f"--held-out {held_out} leaves nothing on one side of {len(rows)} rows")
    return [rows[i] for i in order[count:]], [rows[i] for i in order[:count]]


def some(names: Sequence[object], most: int = 8) -> str:
    """The first names, each cut, and the number of further names."""
    shown = ", ".join(cut(str(name)) for name in names[:most])
    return shown + (f" and {len(names) - most:,} more" if len(names) > most else "")


def cut(text: str, most: int = 60) -> str:
    """The text, cut to its beginning if long, for messages."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def _read(path: Path) -> list[Row]:
    if path.is_dir():
        return _read_datasets(path)
    if not path.is_file():
        raise ValueError(f"there is no file or folder {path}")
    if path.suffix in (".csv", ".tsv"):
        return list(_read_csv(path, "\t" if path.suffix == ".tsv" else ","))
    if path.suffix in (".jsonl", ".json"):
        return list(_read_json_lines(path))
    raise ValueError(f"{path} must be .csv, .tsv, .jsonl or a folder of `datasets`")


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    encoding = next((name for mark, name in MARKS.items() if content.startswith(mark)), "utf-8")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        hint = "save it as UTF-8, or convert it: iconv -f LATIN1 -t UTF-8"
        raise ValueError(f"{path} is not {encoding.upper()} in line {line} ({error.reason}): {hint}") from None
    if "\0" in text:
        raise ValueError(f"{path} holds NUL characters, so it is no text in UTF-8: save it as UTF-8")
    return text


def _read_csv(path: Path, separator: str) -> Iterator[Row]:
    csv.field_size_limit(LONGEST)
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), delimiter=separator, strict=True)
    try:
        names = next(reader, [])
        _check_header(path, names, separator)
        for number, fields in enumerate(filter(None, reader), 1):
            if len(fields) != len(names):
                raise ValueError(
                    f"row {number} of {path} has {len(fields)} fields, its header {len(names)}: a field that holds "
                    f"{SEPARATORS[separator]} stands in quotes"
                )
            yield dict(zip(names, fields, strict=True))
    except csv.Error as error:
        hint = "a field in quotes ends with one, and a quote within it is written twice"
        raise ValueError(f"line {reader.line_num} of {path} is no CSV: {error}; {hint}") from None


def _check_header(path: Path, names: list[str], separator: str) -> None:
    header = separator.join(names)
    other = max((x for x in SEPARATORS if x != separator), key=header.count)
    if header.count(other) > header.count(separator):
        raise ValueError(
            f"{path} has {SEPARATORS[other]} between its columns: save it with commas as .csv, or with tabs as .tsv"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path} has several columns of the name {twice[0]!r}")


def _read_json_lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_read_text(path).split("\n"), 1):  # JSON may hold other line separators
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            row = row if isinstance(row, dict) else f"{type(row).__name__} {cut(line.strip())}"
        except (ValueError, RecursionError) as error:
            row = f"no JSON ({error})"
        if not isinstance(row, dict):
            raise ValueError(f"{path} is no JSON lines: each line must hold one object, line {number} is {row}")
        yield row


def _read_datasets(path: Path) -> list[Row]:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"the folder {path} needs datasets: pip install '.[examples]'") from None
    try:
        found = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{path} is no folder that `datasets` saved: {error}") from None
    if isinstance(found, datasets.DatasetDict):
        raise ValueError(f"{path} holds {', '.join(found)}: name one, as in --data {path / next(iter(found))}")
    return [dict(row) for row in found]
