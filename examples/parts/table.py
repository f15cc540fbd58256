"""Rows of CSV, of JSON lines, or of a folder that `datasets` saved."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def read_table(path: Path, columns: Sequence[str]) -> list[Row]:
    """The rows of a .csv, .tsv, .jsonl or .json (lines) file, or of a folder of `datasets.Dataset.save_to_disk`.

    Raises:
        ValueError: there is no such file, it is of another kind, or a column is missing.
    """
    if path.is_dir():
        rows = _read_datasets(path)
    elif not path.is_file():
        raise ValueError(f"--data: there is no file or folder {path}")
    elif path.suffix in (".csv", ".tsv"):
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    elif path.suffix in (".jsonl", ".json"):
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except ValueError as error:
            raise ValueError(f"--data: {path} is no JSON lines: {error}") from None
    else:
        raise ValueError(f"--data: {path} must be .csv, .tsv, .jsonl or a folder of `datasets`")
    for number, row in enumerate(rows, 1):
        missing = [name for name in columns if row.get(name) is None]
        if missing:
            raise ValueError(
                f"--data: row {number} of {path} has no column {missing[0]!r}, it has {', '.join(map(str, row))}"
            )
    if not rows:
        raise ValueError(f"--data: {path} has no rows")
    return rows


def split(rows: list[Row], held_out: float, seed: int) -> tuple[list[Row], list[Row]]:
    """A random share of the rows is held out.

    Raises:
        ValueError: one side is empty.
    """
    order = np.random.default_rng(seed).permutation(len(rows))
    count = round(len(rows) * held_out)
    if not 0 < count < len(rows):
        raise ValueError(f"--held-out {held_out} leaves nothing on one side of {len(rows)} rows")
    return [rows[i] for i in order[count:]], [rows[i] for i in order[:count]]


def _read_datasets(path: Path) -> list[Row]:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"--data: the folder {path} needs datasets: pip install '.[examples]'") from None
    try:
        found = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"--data: {path} is no folder that `datasets` saved: {error}") from None
    if isinstance(found, datasets.DatasetDict):
        raise ValueError(f"--data: {path} holds {', '.join(found)}: name one, as in --data {path / next(iter(found))}")
    return [dict(row) for row in found]
