"""Claim: targets depend on each other under permutation and not under masking (Yang et al. 2019, section 2.6).

For "New York is a city" BERT computes log p(New | is a city) + log p(York | is a city), and XLNet log p(New | is a
city) + log p(York | New, is a city). So for neighbouring words A B of the held-out text:

    gain = log p(A, B | rest) - log p(A | rest) - log p(B | rest)

in nats, by the pointwise mutual information of A and B as neighbours, log(n(A B) N / (n(A) n(B))), counted in the
training text. Both orders of the joint one give all four terms: the factorisation A, B has log p(A | rest) and
log p(B | A, rest), and B, A has log p(B | rest).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from lib.claims import EDGES
from parts.inference import OBJECTIVES as CLASSES
from parts.inference import Reader
from parts.tokenizer import TextTokenizer
from xlnet_kernels.pretraining import TokenFile, joint_log_prob

from .workshop import OBJECTIVES, Workshop

LONGEST = 6  # tokens of a word
SHOWN = 6  # pairs named in a row
TOGETHER = 32  # sequences in a call


class Word(NamedTuple):
    text: str
    begin: int
    end: int


class Pair(NamedTuple):
    """Neighbouring words in the held-out text, and their mutual information in the training text."""

    first: Word
    second: Word
    information: float

    @property
    def bin(self) -> int:
        return sum(self.information >= edge for edge in EDGES)

    @property
    def text(self) -> str:
        return f"{self.first.text} {self.second.text}"


def measure(workshop: Workshop) -> Iterator[dict]:
    """A row for each objective and seed."""
    options = workshop.options
    run = workshop.new_run("permutation", 0)
    found = find_pairs(run.training.text, run.validation.text, workshop.tokenizer, options)
    ids = torch.from_numpy(run.validation.text.read(0, len(run.validation.text)))
    for seed in options.seeds:
        for objective in OBJECTIVES:
            reader, facts = workshop.reader(objective, seed), workshop.pretrained(objective, seed)[1]
            terms = {pair: _terms(reader, ids, pairs, options) for pair, pairs in _alike(found).items()}
            scores = {pair: score for group in terms.values() for pair, score in group.items()}
            yield _row(objective, scores) | {"seed": seed} | facts


def find_pairs(training: TokenFile, held_out: TokenFile, tokenizer: TextTokenizer, options) -> list[Pair]:
    """Neighbours in the held-out text that occur at least `least` times as neighbours in the training text.

    From each bin `occurrences` are kept, spread over the text.
    """
    known = words(training.read(0, len(training)), tokenizer)
    single = Counter(word.text for word in known)
    double = Counter((one.text, other.text) for one, other in neighbours(known))
    total = sum(single.values())
    by_bin: dict[int, list[Pair]] = defaultdict(list)
    for one, other in neighbours(words(held_out.read(0, len(held_out)), tokenizer)):
        count = double[one.text, other.text]
        if count >= options.least:
            information = math.log(count * total / (single[one.text] * single[other.text]))
            pair = Pair(one, other, information)
            by_bin[pair.bin].append(pair)
    kept = []
    for _, pairs in sorted(by_bin.items()):
        places = np.linspace(0, len(pairs) - 1, min(len(pairs), options.occurrences)).round().astype(int)
        kept += [pairs[place] for place in places]
    return kept


def words(ids: np.ndarray, tokenizer: TextTokenizer) -> list[Word]:
    """Words of letters, each of whole tokens, with the space in the first token."""
    starts = tokenizer.vocabulary.word_starts
    assert starts is not None, "a tokenizer with marks for words"
    names = np.array(tokenizer.fast.convert_ids_to_tokens(range(tokenizer.vocabulary.size)), dtype=object)
    begins = np.flatnonzero(starts[ids])
    found = []
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(ids)], strict=True):
        if end - begin <= LONGEST and (text := "".join(names[ids[begin:end]])[1:]).isascii() and text.isalpha():
            found.append(Word(text, begin, end))
    return found


def neighbours(found: list[Word]) -> Iterator[tuple[Word, Word]]:
    return ((one, other) for one, other in zip(found, found[1:], strict=False) if one.end == other.begin)


def _alike(pairs: list[Pair]) -> dict[tuple[int, int], list[Pair]]:
    """Pairs with as many tokens in each word."""
    groups: dict[tuple[int, int], list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.first.end - pair.first.begin, pair.second.end - pair.second.begin].append(pair)
    return groups


@torch.no_grad()
def _terms(reader: Reader, text: torch.Tensor, pairs: list[Pair], options) -> dict[Pair, dict[str, float]]:
    """Terms of each pair: log p(A, B) in either order, and the sum of log p(A) and log p(B), given the rest."""
    objective, found = CLASSES[reader.objective](), {}
    size = pairs[0].first.end - pairs[0].first.begin
    for at in range(0, len(pairs), TOGETHER):
        group = pairs[at : at + TOGETHER]
        begins = [_begin(pair, len(text), options.seq_len) for pair in group]
        ids = torch.stack([text[begin : begin + options.seq_len] for begin in begins])
        forward = torch.stack(
            [torch.arange(p.first.begin, p.second.end) - begin for p, begin in zip(group, begins, strict=True)]
        )
        backward = torch.cat([forward[:, size:], forward[:, :size]], 1)
        one, other = (
            joint_log_prob(reader.model, objective, reader.tokenizer.vocabulary, ids, targets)[0].double()
            for targets in (forward, backward)
        )
        alone = one[:, :size].sum(1) + other[:, : forward.shape[1] - size].sum(1)
        for pair, *values in zip(group, one.sum(1).tolist(), other.sum(1).tolist(), alone.tolist(), strict=True):
            found[pair] = dict(zip(("joint", "other_order", "independent"), values, strict=True))
    return found


def _begin(pair: Pair, total: int, length: int) -> int:
    """Begin of a sequence with the pair in its middle, as far as the text allows."""
    middle = (pair.first.begin + pair.second.end) // 2
    return max(0, min(middle - length // 2, total - length))


def _row(objective: str, scores: dict[Pair, dict[str, float]]) -> dict:
    """Means for each bin. A left-to-right model has no p(B | rest) without A, so neither gain nor a second order."""
    bins = []
    for index in range(len(EDGES) + 1):
        here = {pair: score for pair, score in scores.items() if pair.bin == index}
        if not here:
            continue
        mean = {name: round(float(np.mean([s[name] for s in here.values()])), 4) for name in ("joint", "independent")}
        gains = [score["joint"] - score["independent"] for score in here.values()]
        entry = {"bin": index, "pairs": len(here), "joint": mean["joint"]}
        if objective != "autoregressive":
            entry |= {"independent": mean["independent"], "gain": float(np.mean(gains))}
            entry["largest_gain"] = max(map(abs, gains))
            entry["order_matters"] = max(abs(s["joint"] - s["other_order"]) for s in here.values())
        bins.append(entry)
    row = {"section": "pairs", "implementation": objective, "bins": bins}
    if objective != "autoregressive":
        row["examples"] = _examples(scores)
    return row


def _examples(scores: dict[Pair, dict[str, float]]) -> list[dict]:
    """The pairs of the highest mutual information, regardless of gain."""
    by_text: dict[str, list[Pair]] = defaultdict(list)
    for pair in scores:
        by_text[pair.text].append(pair)
    first = sorted(by_text.items(), key=lambda item: (-item[1][0].information, item[0]))[:SHOWN]
    return [
        {
            "pair": text,
            "information": round(pairs[0].information, 2),
            "gain": round(float(np.mean([scores[p]["joint"] - scores[p]["independent"] for p in pairs])), 3),
        }
        for text, pairs in first
    ]
