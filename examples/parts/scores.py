"""Metrics, mostly scikit-learn's."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

Metrics = dict[str, float]


def of_classes(found: Sequence[Any], wanted: Sequence[Any]) -> Metrics:
    """Accuracy, the mean of all classes' F1, and Matthews' correlation."""
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    return {
        "accuracy": float(accuracy_score(wanted, found)),
        "f1": float(f1_score(wanted, found, average="macro")),
        "matthews": float(matthews_corrcoef(wanted, found)),
    }


def of_numbers(found: Sequence[float], wanted: Sequence[float]) -> Metrics:
    """Root of the mean squared error, and both correlations (0 where one side is constant)."""
    from scipy.stats import pearsonr, spearmanr

    error = float(np.sqrt(np.mean((np.array(found) - np.array(wanted)) ** 2)))
    constant = np.ptp(found) == 0 or np.ptp(wanted) == 0
    pearson, spearman = (0.0 if constant else float(kind(found, wanted)[0]) for kind in (pearsonr, spearmanr))
    return {"pearson": pearson, "spearman": spearman, "rmse": error}


def of_tags(found: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> Metrics:
    """Accuracy of words, and F1 of spans for the BIO scheme, else the mean of all tags' F1."""
    pairs = [pair for one, other in zip(found, wanted, strict=True) for pair in zip(one, other, strict=True)]
    accuracy = sum(one == other for one, other in pairs) / max(1, len(pairs))
    if not all(tag == "O" or re.match(r"[BI]-", tag) for _, tag in pairs):
        from sklearn.metrics import f1_score

        labels = sorted({tag for _, tag in pairs})
        first, second = [one for one, _ in pairs], [other for _, other in pairs]
        return {"f1": float(f1_score(second, first, average="macro", labels=labels)), "accuracy": accuracy}
    one, other = ({(i, *s) for i, tags in enumerate(rows) for s in bio_spans(tags)} for rows in (found, wanted))
    return {"f1": 2 * len(one & other) / max(1, len(one) + len(other)), "accuracy": accuracy}


def bio_spans(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """Begin, end and kind of each span; an I without a span begins a new one.

    >>> bio_spans(["B-a", "I-a", "O", "I-b", "B-b"])
    [(0, 2, 'a'), (3, 4, 'b'), (4, 5, 'b')]
    """
    spans: list[tuple[int, int, str]] = []
    for at, tag in enumerate(tags):
        kind = tag[2:]
        if tag.startswith("I-") and spans and spans[-1][1:] == (at, kind):
            spans[-1] = (spans[-1][0], at + 1, kind)
        elif tag[:2] in ("B-", "I-"):
            spans.append((at, at + 1, kind))
    return spans


def of_answers(found: Sequence[str], wanted: Sequence[str]) -> Metrics:
    """SQuAD's exact match and F1 of words (Rajpurkar et al. 2016)."""
    pairs = [(_words(one), _words(other)) for one, other in zip(found, wanted, strict=True)]
    exact = sum(one == other for one, other in pairs)
    return {"f1": sum(map(_overlap, pairs)) / len(pairs), "exact": exact / len(pairs)}


def _words(text: str) -> list[str]:
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def _overlap(pair: tuple[list[str], list[str]]) -> float:
    one, other = pair
    if not one or not other:
        return float(one == other)
    return 2 * sum((Counter(one) & Counter(other)).values()) / (len(one) + len(other))
