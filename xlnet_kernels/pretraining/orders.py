"""Span targets and factorisation orders of one sequence.

A sequence has one or two parts, given as their sizes: the text that becomes memory and the pair of segments after it
(or the whole sequence as one part). Each part has its own targets and its own order. A part sees all earlier parts and
no later part (Yang et al. 2019, section 2.5, and the training data of the published models).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from ..masks import HIGHEST

Array = np.ndarray


def sample_spans(
    rng: np.random.Generator,
    length: int,
    *,
    alpha: int = 6,
    beta: int = 1,
    max_gram: int = 5,
    starts: Array | None = None,
) -> Array:
    """Begin and end (S, 2) of disjoint n-grams in order, n from 1 to `max_gram` with p(n) ~ 1/n.

    An n-gram lies at a random place among n * alpha / beta other tokens, so that about beta / (alpha + beta) of all
    tokens are covered. With `starts` (length,) bool it moves to the next token that begins a word.

    >>> spans = sample_spans(np.random.default_rng(0), 512)
    >>> bool((spans[1:, 0] >= spans[:-1, 1]).all()), int(spans[-1, 1]) <= 512
    (True, True)
    """
    below = _chances_below(max_gram)
    draws = rng.random((length // (1 + alpha // beta) + 1, 2)).tolist()
    following = range(length)
    if starts is not None:
        at_or_past = np.where(starts, np.arange(length), length)
        following = np.minimum.accumulate(at_or_past[::-1])[::-1].tolist()
    spans, cursor = [], 0
    for size, place in draws:
        gram = 1 + bisect(below, size)
        context = gram * alpha // beta
        left = int(place * context)
        if cursor + left >= length:
            break
        begin = following[cursor + left]
        if begin + gram > length:
            break
        spans.append((begin, begin + gram))
        cursor = begin + gram + context - left
    return np.array(spans, np.int64).reshape(-1, 2)


@lru_cache
def _chances_below(max_gram: int) -> list[float]:
    """Probability of an n-gram of at most n for n = 1 .. max_gram - 1, p(n) ~ 1/n."""
    chance = 1 / np.arange(1, max_gram + 1)
    return np.cumsum(chance / chance.sum())[:-1].tolist()


def span_targets(rng: np.random.Generator, candidates: Array, num_predict: int, **spans) -> Array:
    """Targets (L,) bool, True for exactly `num_predict` of the candidates: whole spans first, then single tokens.

    Args:
        candidates: (L,) bool, False where a token must not be a target (SEP, CLS, padding).
        num_predict: number of targets.
        spans: alpha, beta, max_gram and starts of `sample_spans`. Where its spans hold more than `num_predict` tokens,
            some are dropped at random, so that all places in the sequence are predicted equally often.

    Raises:
        ValueError: there are fewer candidates than targets.
    """
    if not 0 <= num_predict <= np.count_nonzero(candidates):
        raise ValueError(
            f"num_predict must be at most the number of tokens that may be targets, "
            f"{np.count_nonzero(candidates)} of {len(candidates)}, got {num_predict}"
        )
    found = sample_spans(rng, len(candidates), **spans)
    positions = [position for begin, end in rng.permutation(found).tolist() for position in range(begin, end)]
    covered = np.array(positions, np.int64)
    targets = np.zeros(len(candidates), bool)
    targets[covered[candidates[covered]][:num_predict]] = True
    missing = num_predict - np.count_nonzero(targets)
    if missing:
        targets[rng.permutation(np.flatnonzero(candidates & ~targets))[:missing]] = True
    return targets


def share_targets(num_predict: int, candidates: Array, parts: Sequence[int]) -> list[int]:
    """Number of targets of each part: its share of `num_predict` by size, rounded up, plus the excess of other parts.

    >>> share_targets(85, np.ones(512, bool), (256, 256))
    [43, 42]
    """
    room = [int(np.count_nonzero(part)) for part in split_parts(candidates, parts)]
    shares, left = [], num_predict
    for index, size in enumerate(parts):
        share = -(-left * size // sum(parts[index:]))
        share = min(max(share, left - sum(room[index + 1 :])), room[index])
        shares.append(share)
        left -= share
    return shares


def block_order(rng: np.random.Generator, length: int, perm_size: int) -> Array:
    """Step (L,) at which each position is reached: blocks of `perm_size` from left to right, with one random order.

    The last block may be shorter; it has the order of its positions.

    >>> block_order(np.random.default_rng(0), 6, 3).tolist()
    [2, 0, 1, 5, 3, 4]
    """
    steps = rng.permutation(perm_size)
    blocks, rest = divmod(length, perm_size)
    whole = (np.arange(blocks)[:, None] * perm_size + steps).ravel()
    return np.concatenate([whole, blocks * perm_size + steps[:rest].argsort().argsort()])


def permutation_ranks(
    order: Array, targets: Array, functional: Array, parts: Sequence[int], padding: Array | None = None
) -> tuple[Array, Array]:
    """query_rank and key_rank (L,) of the RankMask for the query stream of a permutation LM.

    In each part, context tokens (neither target nor functional) are visible to all and see only context. A target or
    functional token is visible to later targets and functional tokens in the order, and sees earlier ones; a functional
    token also sees itself. Later parts see all of a part, earlier parts none of it.

    Args:
        order: (L,) integers, the step of each position, counted from 0 in each part.
        targets: (L,) bool.
        functional: (L,) bool, SEP and CLS: never targets, but placed in the order like them.
        parts: sizes of the parts, which add up to L.
        padding: (L,) bool or None, True where a token is hidden from all rows.

    >>> targets = np.array([False, True, True])  # the second sees the last, which is reached first
    >>> query_rank, key_rank = permutation_ranks(np.array([0, 2, 1]), targets, np.zeros(3, bool), parts=(3,))
    >>> (key_rank < query_rank[:, None]).astype(int).tolist()
    [[1, 0, 0], [1, 0, 1], [1, 0, 0]]
    """
    plain = ~(targets | functional)
    rev = np.where(plain, -1, order)
    query_rank = np.where(targets & ~functional, rev, rev + 1)
    # A part of n positions uses key ranks -1 .. n - 1 and query ranks 0 .. n; the next part's begin above them.
    base = np.repeat(np.cumsum([0, *(size + 1 for size in parts[:-1])]), parts)
    key_rank = rev + base
    if padding is not None:
        key_rank = np.where(padding, HIGHEST, key_rank)
    return (query_rank + base).astype(np.int32), key_rank.astype(np.int32)


def split_parts(values: Array, parts: Sequence[int]) -> list[Array]:
    """`values` (L,) cut into parts."""
    ends = list(accumulate(parts))
    return [values[end - size : end] for size, end in zip(parts, ends, strict=True)]
