"""Claim: context on both sides helps over left-to-right, in small tasks (Yang et al. 2019, sections 1 and 3).

Models of the same text, tokens and parameters, pre-trained by each objective, are fine-tuned by examples/finetune.py:

- classification: the tutorial's, the topic of a paragraph. One prediction, at the end of the text;
- tagging: the mark of punctuation after each word. Marks and capitals are removed, and the evidence lies on both sides
  of the word. Paragraphs of the same tables, in pieces of 40 words.

A model pre-trained from left to right is fine-tuned from left to right; others see both sides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

import finetune
from parts import sample
from parts import tuning as fine_tuning
from parts.baseline import baselines
from parts.table import Row

from .workshop import OBJECTIVES, Workshop

MARKS = {",": "comma", ".": "stop", ";": "stop", ":": "colon"}
PIECE = 40
NONE = "none"
TASKS = ("classification", "tagging")


def measure(workshop: Workshop) -> Iterator[dict]:
    """A row for each task, objective and seed, and one for each baseline."""
    for task in TASKS:
        files = write_tables(workshop.folder / task, task)
        for number, seed in enumerate(workshop.options.seeds):
            for objective in OBJECTIVES:
                tuning = prepare(workshop, task, files, objective, seed)
                row = {"section": "context", "task": task}
                if number == 0 and objective == OBJECTIVES[0]:
                    for name, found in _baselines(tuning, task).items():
                        yield row | {"implementation": name, "rows": len(tuning.testing)} | _rounded(found)
                found, _, _ = fine_tuning.train(tuning, Console(quiet=True))
                yield row | {"implementation": objective, "seed": seed} | _rounded(found)


def prepare(workshop: Workshop, task: str, files: tuple[Path, Path], objective: str, seed: int) -> fine_tuning.Tuning:
    """Rows and model. Evaluated only after the last step, to avoid choices by the testing rows."""
    options = workshop.options
    settings = {"checkpoint": workshop.pretrained(objective, seed)[0], "data": files[0], "validation": files[1]}
    settings |= {"task": task, "seed": seed, "steps": options.tuning_steps, "eval-every": options.tuning_steps}
    settings |= {"seq-len": options.tuning_length, "device": "cpu", "backend": options.backend}
    settings |= {"output": workshop.folder / "tuned"}
    settings |= {"save-every": options.tuning_steps}  # none saved
    chosen = finetune.make_parser().parse_args([f"--{name}={x}" for name, x in settings.items()])
    return fine_tuning.prepare(chosen, None, *finetune.read_rows(chosen))


def write_tables(folder: Path, task: str) -> tuple[Path, Path]:
    """Training and testing rows as JSON lines."""
    folder.mkdir(exist_ok=True)
    paths = folder / "train.jsonl", folder / "test.jsonl"
    for path, rows in zip(paths, sample.topics(), strict=True):
        if task == "tagging":
            rows = [piece for row in rows for piece in tagged(row["text"])]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return paths


def tagged(text: str) -> list[Row]:
    """Words without marks and capitals, and the mark after each.

    >>> tagged("As is. A, b")
    [{'text': ['as', 'is', 'a', 'b'], 'label': ['none', 'stop', 'comma', 'none']}]
    """
    found = []
    for word in text.lower().split():
        mark = MARKS.get(word[-1], NONE)
        word = word if mark == NONE else word[:-1]
        if word:
            found.append((word, mark))
    pieces = [found[at : at + PIECE] for at in range(0, len(found), PIECE)]
    return [dict(zip(("text", "label"), map(list, zip(*piece, strict=True)), strict=True)) for piece in pieces]


def _baselines(tuning: fine_tuning.Tuning, task: str) -> dict[str, dict[str, float]]:
    """Metrics of the baselines; in tagging, no word has a mark."""
    if task == "classification":
        return baselines(tuning.task, tuning.training, tuning.testing)
    return {"majority": tuning.task.measure([[NONE] * len(row["label"]) for row in tuning.testing], tuning.testing)}


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {name: round(found[name], 4) for name in ("accuracy", "f1")}
