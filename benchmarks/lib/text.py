"""Permutation-LM batches of real English: the manual that comes with Python (pydoc_data.topics), one token per byte.

The recipe is XLNet's (Yang et al. 2019, sections 2.3 to 2.5): two segments `[A, SEP, B, SEP, CLS]`, one factorisation
order per sequence, and about a sixth of the tokens predicted, in spans.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from xlnet_kernels import RankMask
from xlnet_kernels.masks import LOWEST

SEP, CLS, VOCABULARY = 256, 257, 258  # bytes are 0 .. 255
PREDICTED = 6  # one token in so many is predicted
LONGEST_SPAN = 5
CONTEXT = 6  # alpha / beta: a span of n targets sits in n * 6 tokens of context
SHORTEST = 16  # below this there is no room for two segments and their marks


@dataclass(frozen=True)
class Batch:
    """B sequences of L tokens after M tokens of memory; N = L // 6 targets in each."""

    tokens: Tensor  # (B, L)
    memory_tokens: Tensor  # (B, M), what stands before A in the text
    segment_ids: Tensor  # (B, L): A 0, B 1, CLS 2
    order: Tensor  # (B, L), the step at which the factorisation reaches each position
    targets: Tensor  # (B, L) bool, True where a token is predicted

    @property
    def special(self) -> Tensor:
        """(B, L) bool, True at SEP and CLS."""
        return self.tokens >= SEP

    @property
    def target_positions(self) -> Tensor:
        """(B, N), in ascending order."""
        return self.targets.nonzero()[:, 1].view(self.targets.shape[0], -1)

    def mask(self) -> RankMask:
        """What the query stream sees; `.for_stream("content")` for the content stream.

        The original's rule: plain context is seen by all (rev = -1); targets and special tokens have their place in
        the order; a target does not see its own step (self_rev = rev), every other token does (self_rev = rev + 1).
        """
        context = ~self.targets & ~self.special
        rev = self.order.masked_fill(context, -1)
        self_rev = torch.where(self.targets, rev, rev + 1)
        memory = torch.full_like(self.memory_tokens, LOWEST)
        return RankMask(self_rev, torch.cat([memory, rev], 1))


def build_batch(batch: int, length: int, mem_len: int = 0, seed: int = 0) -> Batch:
    """`batch` sequences of `length` tokens, each after `mem_len` tokens of memory; the same for the same seed.

    Raises:
        ValueError: too short for two segments, or longer than the text.
    """
    text = english()
    if length < SHORTEST:
        raise ValueError(f"a sequence needs at least {SHORTEST} tokens for two segments, got {length}")
    if mem_len + length > len(text):
        raise ValueError(f"the text has {len(text)} tokens, {mem_len + length} were asked for")
    rng = random.Random(seed)
    sequences = [_sequence(text, length, mem_len, rng) for _ in range(batch)]
    fields = [torch.tensor(rows) for rows in zip(*sequences, strict=True)]
    return Batch(fields[0], fields[1].long().view(batch, mem_len), *fields[2:])


@cache
def english() -> bytes:
    """About 460 kB of English prose."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _sequence(text: bytes, length: int, mem_len: int, rng: random.Random) -> tuple[list, ...]:
    body = length - 3
    first = rng.randint(body // 4, body - body // 4)
    begin = rng.randint(mem_len, len(text) - body)
    follows = rng.random() < 0.5  # half of the time B continues A, otherwise it comes from elsewhere
    begin_b = begin + first if follows else rng.randint(0, len(text) - body)
    segment_a, segment_b = text[begin : begin + first], text[begin_b : begin_b + body - first]
    tokens = [*segment_a, SEP, *segment_b, SEP, CLS]
    segment_ids = [0] * (first + 1) + [1] * (body - first + 1) + [2]
    order = rng.sample(range(length), length)
    targets = span_targets([token >= SEP for token in tokens], length // PREDICTED, rng)
    return tokens, list(text[begin - mem_len : begin]), segment_ids, order, targets


def span_targets(special: list[bool], count: int, rng: random.Random) -> list[bool]:
    """`count` targets, never special: spans of n = 1..5 with p(n) ~ 1/n, topped up with single tokens."""
    sizes = range(1, LONGEST_SPAN + 1)
    targets = [False] * len(special)
    missing, position = count, 0
    while missing:
        size = min(rng.choices(sizes, [1 / n for n in sizes])[0], missing)
        before = rng.randrange(size * CONTEXT)
        begin = position + before
        if begin + size > len(special):
            break
        for place in range(begin, begin + size):
            if not special[place]:
                targets[place] = True
                missing -= 1
        position = begin + size + size * CONTEXT - before
    free = [place for place, taken in enumerate(targets) if not taken and not special[place]]
    for place in rng.sample(free, missing):
        targets[place] = True
    return targets
