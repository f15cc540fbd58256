"""Segment term of the score: (q + bias) . embed[same or different]."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import load_or, of_padded_rows, of_rows, padded
from .mask import BOUND, range_of
from .operands import add_bias, columns, load_query, rows_of_tile


class RowSegments(NamedTuple):
    """Segments of a tile's rows."""

    ids: Any  # (BLOCK_M,) int32
    same: Any  # (BLOCK_M,) float32: the term of a key in the same segment, which cancels in softmax
    different: Any  # (BLOCK_M,) float32: the further term of a key in another segment


@triton.jit
def load_embedding(segments, head, kind: tl.constexpr, c: tl.constexpr, size, META):
    """Chunk c (BLOCK_D,) of the embedding of "same segment" (kind 0) or "different" (1) in float32."""
    d = columns(c, META)
    row = segments.embed + (kind * size.heads + head.h) * META.HEAD_DIM
    return tl.load(row + d, mask=d < META.HEAD_DIM, other=0.0).to(tl.float32)


@triton.jit
def store_row_segments(rows, segments, tile, size, META):
    """Store the two possible terms of a tile's rows."""
    if segments.embed is not None:
        same = tl.zeros((META.BLOCK_M,), tl.float32)
        different = tl.zeros((META.BLOCK_M,), tl.float32)
        for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
            biased = add_bias(load_query(rows, tile, c, META), segments.bias, tile, c, META).to(tl.float32)
            same += tl.sum(biased * load_embedding(segments, tile.head, 0, c, size, META)[None, :], 1)
            different += tl.sum(biased * load_embedding(segments, tile.head, 1, c, size, META)[None, :], 1)
        at = of_padded_rows(tile.head, size) + tile.start + tl.arange(0, META.BLOCK_M)
        tl.store(rows.same + at, same)
        tl.store(rows.different + at, different - same)


@triton.jit
def load_row_segments(rows, segments, tile, size, META):
    """Load a tile's ids and its two possible terms."""
    ids = load_or(segments.query_ids, of_rows(tile.head, size), tile.row, tile.inside, 0)
    same = tl.zeros((META.BLOCK_M,), tl.float32)
    different = same
    if segments.embed is not None:
        at = of_padded_rows(tile.head, size) + tile.start + rows_of_tile(META)
        same = tl.load(rows.same + at)
        different = tl.load(rows.different + at)
    return RowSegments(ids, same, different)


@triton.jit
def id_range(segments, head, j0, size, META):
    """The least and the largest id among the keys of a tile."""
    start = head.b * (padded(size.keys) // BOUND)
    return range_of(segments.least, segments.largest, start, j0, META.BLOCK_N)


@triton.jit
def is_same_segment(ids, segments, head, j0, size, META):
    """Mask of the pairs of a tile (BLOCK_M, BLOCK_N) in one segment."""
    key_ids = tl.load((segments.key_ids + (head.b * padded(size.keys) + j0)) + tl.arange(0, META.BLOCK_N))
    return ids[:, None] == key_ids[None, :]


@triton.jit
def add_segments(score, terms, segments, head, id_least, id_largest, j0, size, META):
    """Scores (BLOCK_M, BLOCK_N) plus the segment term less `same`, in two parts.

    The ids of the tile's keys are from id_least to id_largest. If they are equal, the term is the second part
    (BLOCK_M,), constant in a row.
    """
    term = tl.zeros((META.BLOCK_M,), tl.float32)
    if segments.key_ids is not None:
        one = id_least == id_largest
        term = tl.where(one & (terms.ids != id_least), terms.different, 0.0)
        if not one:
            same = is_same_segment(terms.ids, segments, head, j0, size, META)
            score += tl.where(same, 0.0, terms.different[:, None])
    return score, term


@triton.jit
def add_dS_different(total, dS, ids, segments, head, id_least, id_largest, j0, size, META):
    """The sum of `total` (BLOCK_M,) and rowsum(dS) over a tile's keys of other segments."""
    if segments.key_ids is not None:
        if id_least == id_largest:
            total += tl.where(ids == id_least, 0.0, tl.sum(dS, 1))
        else:
            total += tl.sum(tl.where(is_same_segment(ids, segments, head, j0, size, META), 0.0, dS), 1)
    return total
