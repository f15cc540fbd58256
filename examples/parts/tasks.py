"""Tasks: conversion of a table's rows to the model's inputs and labels, and of its outputs to predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import xlnet_kernels as xk
from parts import labels, scores
from parts.labels import Columns
from parts.table import Row

IGNORED = -100
ANSWER = 30  # tokens of the longest answer searched for


class Task:
    """Base class of tasks.

    Attributes:
        model: the class of the model. metric: the name of the metric for early stopping, higher is better.
        labels: the names of the classes, if any.
    """

    model: type[Any]
    metric: str
    labels: Sequence[str] = ()

    def __init__(self, tokenizer: PreTrainedTokenizerFast, columns: Columns, length: int) -> None:
        self.tokenizer, self.columns, self.length = tokenizer, columns, length

    def read_labels(self, rows: Sequence[Row]) -> None:
        """Collect the classes of the training rows."""

    def config(self) -> dict[str, Any]:
        """Entries of the model's config.json."""
        if not self.labels:
            return {}
        names = {str(i): name for i, name in enumerate(self.labels)}
        return {"id2label": names, "label2id": {name: i for i, name in enumerate(self.labels)}}

    def example(self, row: Row) -> dict[str, Any]:
        """The tokenizer's lists of equal length by name, and labels."""
        raise NotImplementedError

    def batch(self, examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Keyword arguments of the model: tokens padded on the left, and `label`."""
        inputs = self.tokenizer.pad([_tokens(example) for example in examples], return_tensors="pt")
        return {**inputs, **self.label([example["label"] for example in examples], inputs["input_ids"].shape[1])}

    def label(self, given: Sequence[Any], length: int) -> dict[str, Tensor]:
        return {"labels": torch.tensor(given)}

    def predict(self, output: Any, examples: Sequence[dict[str, Any]]) -> list[Any]:
        """The model's prediction for each example."""
        raise NotImplementedError

    def measure(self, predictions: Sequence[Any], rows: Sequence[Row]) -> dict[str, float]:
        """Metrics of predictions of `rows`."""
        raise NotImplementedError

    def encode(self, text: str, pair: str | None = None, **options: Any) -> dict[str, list[int]]:
        return dict(self.tokenizer(text, pair, truncation=True, max_length=self.length, **options))

    def texts(self, row: Row) -> tuple[str, str | None]:
        """The text, and the second text or None."""
        return str(row[self.columns.text]), str(row[self.columns.pair]) if self.columns.pair else None


class Classification(Task):
    """Task of one class for a text, or for a pair of texts."""

    model, metric = xk.XLNetForSequenceClassification, "accuracy"

    def read_labels(self, rows: Sequence[Row]) -> None:
        self.labels = labels.class_names(labels.class_of(row, self.columns) for row in rows)

    def example(self, row: Row) -> dict[str, Any]:
        return self.encode(*self.texts(row)) | {
            "label": labels.index_of(self.labels, labels.class_of(row, self.columns))
        }

    def predict(self, output: Any, examples: Sequence[dict[str, Any]]) -> list[str]:
        return [self.labels[i] for i in output.logits.argmax(-1).tolist()]

    def measure(self, predictions: Sequence[str], rows: Sequence[Row]) -> dict[str, float]:
        return scores.of_classes(predictions, [labels.class_of(row, self.columns) for row in rows])


class Regression(Task):
    """Task of a number for a text, or for a pair of texts."""

    model, metric = xk.XLNetForSequenceClassification, "pearson"

    def read_labels(self, rows: Sequence[Row]) -> None:
        values = np.array([labels.number_of(row, self.columns) for row in rows])
        self.mean, self.spread = float(values.mean()), float(values.std()) or 1.0

    def config(self) -> dict[str, Any]:
        # The model learns normalised numbers; its config has the inverse transformation.
        return {"num_labels": 1, "problem_type": "regression", "label_mean": self.mean, "label_spread": self.spread}

    def example(self, row: Row) -> dict[str, Any]:
        return self.encode(*self.texts(row)) | {
            "label": (labels.number_of(row, self.columns) - self.mean) / self.spread
        }

    def predict(self, output: Any, examples: Sequence[dict[str, Any]]) -> list[float]:
        return (output.logits[:, 0].double() * self.spread + self.mean).tolist()

    def measure(self, predictions: Sequence[float], rows: Sequence[Row]) -> dict[str, float]:
        return scores.of_numbers(predictions, [labels.number_of(row, self.columns) for row in rows])


class Choice(Task):
    """Task of the right choice among continuations: `pair` is a list of these, `label` the index of the right one."""

    model, metric = xk.XLNetForMultipleChoice, "accuracy"

    def example(self, row: Row) -> dict[str, Any]:
        choices = [
            self.encode(str(row[self.columns.text]), str(choice)) for choice in labels.choices_of(row, self.columns)
        ]
        return {"choices": choices, "label": labels.choice_of(row, self.columns)}

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
        return scores.of_classes(predictions, [labels.choice_of(row, self.columns) for row in rows])


class Tagging(Task):
    """Task of one class for each word: `text` and `label` are lists of equal length, or words separated by spaces."""

    model, metric = xk.XLNetForTokenClassification, "f1"

    def read_labels(self, rows: Sequence[Row]) -> None:
        self.labels = labels.class_names(tag for row in rows for tag in labels.tags_of(row, self.columns))

    def example(self, row: Row) -> dict[str, Any]:
        words, tags = labels.words_of(row, self.columns), labels.tags_of(row, self.columns)
        text, starts = " ".join(words), np.cumsum([0, *(len(word) + 1 for word in words[:-1])]).tolist()
        encoded = self.encode(text, return_offsets_mapping=True)
        # A word's label is at its first token.
        place, label, first = {start: i for i, start in enumerate(starts)}, [], [IGNORED] * len(words)
        for at, (begin, end) in enumerate(encoded.pop("offset_mapping")):
            while begin < end and text[begin] == " ":
                begin += 1
            word = place.pop(begin, None) if begin < end else None
            label.append(IGNORED if word is None else labels.index_of(self.labels, tags[word]))
            if word is not None:
                first[word] = at
        return encoded | {"label": label, "first": first}

    def label(self, given: Sequence[Any], length: int) -> dict[str, Tensor]:
        return {"labels": torch.tensor([[IGNORED] * (length - len(label)) + label for label in given])}

    def predict(self, output: Any, examples: Sequence[dict[str, Any]]) -> list[list[str]]:
        found, length = output.logits.argmax(-1).tolist(), output.logits.shape[1]
        offsets = [length - len(example["label"]) for example in examples]
        rows = zip(found, offsets, examples, strict=True)
        # A word beyond the last token that fits has no prediction.
        return [[self.labels[tags[i + o]] if i >= 0 else "" for i in example["first"]] for tags, o, example in rows]

    def measure(self, predictions: Sequence[list[str]], rows: Sequence[Row]) -> dict[str, float]:
        return scores.of_tags(predictions, [labels.tags_of(row, self.columns) for row in rows])


class Answer(Task):
    """Task of an answer in `text` (a context) to `pair` (a question): `label` is that part of the text, verbatim."""

    model, metric = xk.XLNetForQuestionAnsweringSimple, "f1"

    def example(self, row: Row) -> dict[str, Any]:
        context, answer = str(row[self.columns.text]), labels.answer_of(row, self.columns)
        question = str(row[self.columns.pair or "question"])
        begin = context.find(answer)
        encoded = self.encode(context, question, return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")
        # Only the context has token type 0; its SEP has no place in the text.
        spans = [
            (i, a, b) for i, (a, b) in enumerate(offsets) if encoded["token_type_ids"][i] == 0 and a < b <= len(context)
        ]
        inside = [i for i, a, b in spans if a < begin + len(answer) and b > begin]
        label = (inside[0], inside[-1]) if inside else (IGNORED, IGNORED)  # cut off
        return encoded | {"label": label, "spans": spans, "context": context}

    def label(self, given: Sequence[Any], length: int) -> dict[str, Tensor]:
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
        return scores.of_answers(predictions, [labels.answer_of(row, self.columns) for row in rows])


TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "regression": Regression,
    "choice": Choice,
    "tagging": Tagging,
    "answer": Answer,
}


def _tokens(example: dict[str, Any]) -> dict[str, list[int]]:
    return {name: example[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
