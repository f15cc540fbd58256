"""Permutation-LM batches of real English: the manual that comes with Python (pydoc_data.topics), one token per byte.

The recipe is XLNet's (Yang et al. 2019, sections 2.3 to 2.5): two segments `[A, SEP, B, SEP, CLS]`, one factorisation
order per sequence, and about a sixth of the tokens predicted, in spans.
"""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from xlnet_kernels import RankMask
from xlnet_kernels.pretraining import permutation_ranks, span_targets, with_memory

SEP, CLS, VOCABULARY = 256, 257, 258  # bytes are 0 .. 255
PREDICTED = 6  # one token in so many is predicted
SHORTEST = 16  # below this there is no room for two segments and their marks


@dataclass(frozen=True)
class Batch:
    """B sequences of L tokens after M tokens of memory; N = L // 6 targets in each."""

    tokens: Tensor  # (B, L)
    memory_tokens: Tensor  # (B, M), what stands before A in the text
    segment_ids: Tensor  # (B, L): A 0, B 1, CLS 2
    target_positions: Tensor  # (B, N), ascending
    mask: RankMask  # what the query stream sees; `.for_stream("content")` for the content stream


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
    rng = np.random.default_rng(seed)
    sequences = [_sequence(text, length, mem_len, rng) for _ in range(batch)]
    tokens, memory, segment_ids, targets, query_rank, key_rank = (
        torch.from_numpy(np.stack(rows)) for rows in zip(*sequences, strict=True)
    )
    mask = with_memory(RankMask(query_rank, key_rank), mem_len, torch.full((batch,), mem_len))
    return Batch(tokens, memory, segment_ids, targets, mask)


@cache
def english() -> bytes:
    """About 460 kB of English prose."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _sequence(text: bytes, length: int, mem_len: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Tokens, memory, segment ids, target positions and both ranks of one sequence."""
    body = length - 3
    first = int(rng.integers(body // 4, body - body // 4 + 1))
    begin = int(rng.integers(mem_len, len(text) - body + 1))
    follows = rng.random() < 0.5  # half of the time B continues A, otherwise it comes from elsewhere
    begin_b = begin + first if follows else int(rng.integers(0, len(text) - body + 1))
    segment_a, segment_b = text[begin : begin + first], text[begin_b : begin_b + body - first]
    tokens = np.array([*segment_a, SEP, *segment_b, SEP, CLS])
    segment_ids = np.repeat([0, 1, 2], [first + 1, body - first + 1, 1])
    special = tokens >= SEP
    targets = span_targets(rng, ~special, length // PREDICTED)
    ranks = permutation_ranks(rng.permutation(length), targets, special, parts=(length,))
    memory = np.array([*text[begin - mem_len : begin]], dtype=np.int64)
    return tokens, memory, segment_ids, np.flatnonzero(targets), *ranks
