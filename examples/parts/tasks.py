"""What a row of a table becomes for each task: the model's inputs, its labels, and what is made of its outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import xlnet_kernels as xk
from parts import scores
from parts.table import Row

IGNORED = -100
ANSWER = 30  # tokens of the longest answer that is looked for


@dataclass(frozen=True)
class Columns:
    """Which column is what; `pair` may be missing."""

    text: str = "text"
    pair: str | None = None
    label: str = "label"


class Task:
    """A task, as the classes below fill it in.

    Attributes:
        model: the class of the model. metric: the one that early stopping watches, higher is better.
        labels: the names of the classes, where there are some.
    """

    model: type[Any]
    metric: str
    labels: Sequence[str] = ()

    def __init__(self, tokenizer: PreTrainedTokenizerFast, columns: Columns, length: int) -> None:
        self.tokenizer, self.columns, self.length = tokenizer, columns, length

    def read_labels(self, rows: Sequence[Row]) -> None:
        """Learns the classes of the training rows."""

    def config(self) -> dict[str, Any]:
        """Entries of the model's config.json."""
        if not self.labels:
            return {}
        names = {str(i): name for i, name in enumerate(self.labels)}
        return {"id2label": names, "label2id": {name: i for i, name in enumerate(self.labels)}}

    def example(self, row: Row) -> dict[str, Any]:
        """Lists of equal length under the names of the tokenizer, and labels."""
        raise NotImplementedError

    def batch(self, examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Keyword arguments of the model: tokens padded on the left, and `label`."""
        inputs = self.tokenizer.pad([_tokens(example) for example in examples], return_tensors="pt")
        return {**inputs, **self.label([example["label"] for example in examples], inputs["input_ids"].shape[1])}

    def label(self, labels: Sequence[Any], length: int) -> dict[str, Tensor]:
        return {"labels": torch.tensor(labels)}

    def predict(self, output: Any, examples: Sequence[dict[str, Any]]) -> list[Any]:
        """What the model says of each example."""
        raise NotImplementedError

    def measure(self, predictions: Sequence[Any], rows: Sequence[Row]) -> dict[str, float]:
        """Metrics of predictions of `rows`."""
        raise NotImplementedError

    def encode(self, text: str, pair: str | None = None, **options: Any) -> dict[str, list[int]]:
        return dict(self.tokenizer(text, pair, truncation=True, max_length=self.length, **options))

    def texts(self, row: Row) -> tuple[str, str | None]:
        """The text and the second one, or None."""
        return str(row[self.columns.text]), str(row[self.columns.pair]) if self.columns.pair else None


class Classification(Task):
    """One class for a text, or for a pair of texts."""

    model, metric = xk.XLNetForSequenceClassification, "accuracy"

    def read_labels(self, rows: Sequence[Row]) -> None:
        self.labels = sorted({str(row[self.columns.label]) for row in rows}, key=_numbers_first)
        if len(self.labels) < 2:
            raise ValueError(f"--data: column {self.columns.label!r} has {len(self.labels)} class, two are needed")

    def example(self, row: Row) -> dict[str, Any]:
        return self.encode(*self.texts(row)) | {"label": _index(self.labels, str(row[self.columns.label]))}

    def predict(self, output: Any, examples: Sequence[dict[str, Any]]) -> list[str]:
        return [self.labels[i] for i in output.logits.argmax(-1).tolist()]

    def measure(self, predictions: Sequence[str], rows: Sequence[Row]) -> dict[str, float]:
        return scores.of_classes(predictions, [str(row[self.columns.label]) for row in rows])


class Regression(Task):
    """A number for a text, or for a pair of texts."""

    model, metric = xk.XLNetForSequenceClassification, "pearson"

    def read_labels(self, rows: Sequence[Row]) -> None:
        values = np.array([self._value(row) for row in rows])
        self.mean, self.spread = float(values.mean()), float(values.std()) or 1.0

    def config(self) -> dict[str, Any]:
        # The model learns numbers of size one; its config says how to get back.
        return {"num_labels": 1, "problem_type": "regression", "label_mean": self.mean, "label_spread": self.spread}

    def example(self, row: Row) -> dict[str, Any]:
        return self.encode(*self.texts(row)) | {"label": (self._value(row) - self.mean) / self.spread}

    def predict(self, output: Any, examples: Sequence[dict[str, Any]]) -> list[float]:
        return (output.logits[:, 0].double() * self.spread + self.mean).tolist()

    def measure(self, predictions: Sequence[float], rows: Sequence[Row]) -> dict[str, float]:
        return scores.of_numbers(predictions, [self._value(row) for row in rows])

    def _value(self, row: Row) -> float:
        try:
            return float(row[self.columns.label])
        except (TypeError, ValueError):
            raise ValueError(f"--data: column {self.columns.label!r} must hold numbers, got {row!r}") from None


class Choice(Task):
    """The right one of several continuations: `pair` holds a list of them, `label` the index of the right one."""

    model, metric = xk.XLNetForMultipleChoice, "accuracy"

    def example(self, row: Row) -> dict[str, Any]:
        choices = [self.encode(str(row[self.columns.text]), str(choice)) for choice in self._choices(row)]
        return {"choices": choices, "label": int(row[self.columns.label])}

    def batch(self, examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        count = {len(example["choices"]) for example in examples}
        if len(count) > 1:
            raise ValueError(f"--data: all rows must have as many choices, got {sorted(count)}")
        rows = [choice for example in examples for choice in example["choices"]]
        inputs = self.tokenizer.pad(rows, return_tensors="pt")
        shape = (len(examples), count.pop(), -1)
        labels = torch.tensor([example["label"] for example in examples])
        return {name: x.view(shape) for name, x in inputs.items()} | {"labels": labels}

    def predict(self, output: Any, examples: Sequence[dict[str, Any]]) -> list[int]:
        return output.logits.argmax(-1).tolist()

    def measure(self, predictions: Sequence[int], rows: Sequence[Row]) -> dict[str, float]:
        return scores.of_classes(predictions, [int(row[self.columns.label]) for row in rows])

    def _choices(self, row: Row) -> list[Any]:
        return _list(row, self.columns.pair or "choices")


class Tagging(Task):
    """One class for each word: `text` and `label` hold lists of equal length, or words with spaces between."""

    model, metric = xk.XLNetForTokenClassification, "f1"

    def read_labels(self, rows: Sequence[Row]) -> None:
        self.labels = sorted({tag for row in rows for tag in self._tags(row)})

    def example(self, row: Row) -> dict[str, Any]:
        words, tags = _list(row, self.columns.text), self._tags(row)
        if len(words) != len(tags):
            raise ValueError(f"--data: {len(words)} words and {len(tags)} tags in {row!r}")
        text, starts = " ".join(words), np.cumsum([0, *(len(word) + 1 for word in words[:-1])]).tolist()
        encoded = self.encode(text, return_offsets_mapping=True)
        # A word's label is at its first token.
        place, label, first = {start: i for i, start in enumerate(starts)}, [], [IGNORED] * len(words)
        for at, (begin, end) in enumerate(encoded.pop("offset_mapping")):
            while begin < end and text[begin] == " ":
                begin += 1
            word = place.pop(begin, None) if begin < end else None
            label.append(IGNORED if word is None else _index(self.labels, tags[word]))
            if word is not None:
                first[word] = at
        return encoded | {"label": label, "first": first}

    def label(self, labels: Sequence[Any], length: int) -> dict[str, Tensor]:
        return {"labels": torch.tensor([[IGNORED] * (length - len(label)) + label for label in labels])}

    def predict(self, output: Any, examples: Sequence[dict[str, Any]]) -> list[list[str]]:
        found, length = output.logits.argmax(-1).tolist(), output.logits.shape[1]
        offsets = [length - len(example["label"]) for example in examples]
        rows = zip(found, offsets, examples, strict=True)
        # A word behind the last token that fits has no prediction.
        return [[self.labels[tags[i + o]] if i >= 0 else "" for i in example["first"]] for tags, o, example in rows]

    def measure(self, predictions: Sequence[list[str]], rows: Sequence[Row]) -> dict[str, float]:
        return scores.of_tags(predictions, [self._tags(row) for row in rows])

    def _tags(self, row: Row) -> list[str]:
        return [str(tag) for tag in _list(row, self.columns.label)]


class Answer(Task):
    """The part of `text` (a context) that answers `pair` (a question): `label` is that part, as it stands there."""

    model, metric = xk.XLNetForQuestionAnsweringSimple, "f1"

    def example(self, row: Row) -> dict[str, Any]:
        context, answer = str(row[self.columns.text]), str(row[self.columns.label])
        question = str(row[self.columns.pair or "question"])
        begin = context.find(answer)
        if begin < 0 or not answer:
            raise ValueError(f"--data: the answer {answer!r} is not in its context")
        encoded = self.encode(context, question, return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")
        # Only the context is of token type 0; its SEP has no place in the text.
        spans = [
            (i, a, b) for i, (a, b) in enumerate(offsets) if encoded["token_type_ids"][i] == 0 and a < b <= len(context)
        ]
        inside = [i for i, a, b in spans if a < begin + len(answer) and b > begin]
        label = (inside[0], inside[-1]) if inside else (IGNORED, IGNORED)  # cut off
        return encoded | {"label": label, "spans": spans, "context": context}

    def label(self, labels: Sequence[Any], length: int) -> dict[str, Tensor]:
        return {}

    def batch(self, examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        inputs = super().batch(examples)
        length = inputs["input_ids"].shape[1]
        offsets = [length - len(example["input_ids"]) for example in examples]
        for name, side in (("start_positions", 0), ("end_positions", 1)):
            places = [example["label"][side] for example in examples]
            moved = [at + o if at >= 0 else length for at, o in zip(places, offsets, strict=True)]
            inputs[name] = torch.tensor(moved)
        return inputs

    def predict(self, output: Any, examples: Sequence[dict[str, Any]]) -> list[str]:
        found: list[str] = []
        length = output.start_logits.shape[1]
        for start, end, example in zip(output.start_logits, output.end_logits, examples, strict=True):
            offset, spans = length - len(example["input_ids"]), example["spans"]
            places = torch.tensor([i for i, _, _ in spans]) + offset
            sums = start[places][:, None] + end[places]
            allowed = torch.ones_like(sums, dtype=torch.bool).triu() & ~torch.ones_like(sums, dtype=torch.bool).triu(
                ANSWER
            )
            first, last = divmod(int(sums.masked_fill(~allowed, -torch.inf).argmax()), len(spans))
            found.append(example["context"][spans[first][1] : spans[last][2]].strip())
        return found

    def measure(self, predictions: Sequence[str], rows: Sequence[Row]) -> dict[str, float]:
        return scores.of_answers(predictions, [str(row[self.columns.label]) for row in rows])


TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "regression": Regression,
    "choice": Choice,
    "tagging": Tagging,
    "answer": Answer,
}


def _tokens(example: dict[str, Any]) -> dict[str, list[int]]:
    return {name: example[name] for name in ("input_ids", "token_type_ids", "attention_mask")}


def _list(row: Row, name: str) -> list[Any]:
    """A list, or its JSON, or words with spaces between (as CSV has them)."""
    value = row[name]
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip().startswith("[") else value.split()
    return list(value)


def _index(labels: Sequence[str], label: str) -> int:
    try:
        return labels.index(label)
    except ValueError:
        raise ValueError(f"--data: label {label!r} is none of the training rows': {', '.join(labels)}") from None


def _numbers_first(label: str) -> tuple[int, float, str]:
    try:
        return 0, float(label), label
    except ValueError:
        return 1, 0.0, label
