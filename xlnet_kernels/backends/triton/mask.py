"""Visibility of pairs: ranks, floors, own keys, dense masks and the range of rel_key; and tiles without tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import load_or, load_position, of_rows, padded

LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)
BOUND = tl.constexpr(32)  # keys, or rows, that share a least and a largest rank and segment


class RowMask(NamedTuple):
    """Mask of a tile's rows."""

    rank: Any  # (BLOCK_M,)
    floor: Any  # (BLOCK_M,)
    own: Any  # (BLOCK_M,) whether a row sees its own key regardless of ranks
    lowest_rank: Any
    highest_floor: Any


class Span(NamedTuple):
    """Range [begin, end) of keys or rows."""

    begin: Any
    end: Any


@triton.jit
def load_row_mask(mask, tile, size):
    """(rank, floor, own) of a tile's rows; rows out of range are fully masked."""
    start = of_rows(tile.head, size)
    rank = load_or(mask.rank.query_rank, start, tile.row, tile.inside, LOWEST)
    floor = load_or(mask.rank.query_floor, start, tile.row, tile.inside, HIGHEST)
    return rank, floor, load_or(mask.rank.sees_self, start, tile.row, tile.inside, 0) != 0


@triton.jit
def reach_of(own, size):
    """Range of the keys for whose distance rel_key has a row, for a query whose own key is `own`."""
    begin = own - size.max_distance
    return begin, begin + size.rel_len


@triton.jit
def _two_of(bounds, at, COUNT: tl.constexpr):
    """Load numbers `at` and at + 1 of int32 bounds at once; of BOUND elements or fewer, number `at` twice."""
    if COUNT <= BOUND:
        one = tl.load(bounds + at)
        return one, one
    else:
        two = tl.load((bounds + at).to(tl.pointer_type(tl.int64)))
        return two.to(tl.int32), (two >> 32).to(tl.int32)


@triton.jit
def range_of(least, largest, start, first, COUNT: tl.constexpr):
    """The least and the largest value among `first` .. first + COUNT - 1, from bounds that begin at `start`.

    Zeros without bounds.
    """
    if least is None:
        return 0, 0
    else:
        at = start + first // BOUND
        low, low_too = _two_of(least, at, COUNT)
        high, high_too = _two_of(largest, at, COUNT)
        low = tl.minimum(low, low_too)
        high = tl.maximum(high, high_too)
        for i in tl.static_range(2, COUNT // BOUND, 2):
            low_too, low_last = _two_of(least, at + i, COUNT)
            high_too, high_last = _two_of(largest, at + i, COUNT)
            low = tl.minimum(low, tl.minimum(low_too, low_last))
            high = tl.maximum(high, tl.maximum(high_too, high_last))
        return low, high


@triton.jit
def rank_range(mask, head, j0, size, META):
    """The least and the largest rank among the keys of a tile."""
    start = head.b * (padded(size.keys) // BOUND)
    return range_of(mask.rank.least, mask.rank.largest, start, j0, META.BLOCK_N)


@triton.jit
def row_bounds(backward, head, n0, size, META):
    """The least rank and the largest floor among rows n0 .. n0 + BLOCK_M - 1, in the order of their positions."""
    start = head.b * (padded(size.length) // BOUND)
    lowest_rank, _ = range_of(backward.rank_least, backward.rank_least, start, n0, META.BLOCK_M)
    _, highest_floor = range_of(backward.floor_largest, backward.floor_largest, start, n0, META.BLOCK_M)
    return lowest_rank, highest_floor


@triton.jit
def load_key_rank(mask, head, j0, size, META):
    """(BLOCK_N,) ranks of a tile's keys."""
    return tl.load((mask.rank.key_rank + (head.b * padded(size.keys) + j0)) + tl.arange(0, META.BLOCK_N))


@triton.jit
def visibility(tile, row_mask, mask, rank_least, rank_largest, j0, size, META):
    """(every, near) of a tile whose keys have ranks from rank_least to rank_largest.

    every: whether all rows see all keys. near: whether some keys may be rows' own keys or have no row in rel_key.
    """
    if mask.dense.data is not None:
        every = False
    else:
        if mask.rank.key_rank is None:
            every = j0 + META.BLOCK_N <= size.keys
        else:  # nonexistent keys have the highest rank, nonexistent rows the lowest
            every = rank_largest < row_mask.lowest_rank
            if mask.rank.query_floor is not None:
                every = every & (rank_least >= row_mask.highest_floor)
    near = False
    if mask.rank.sees_self is not None:
        near = (j0 + META.BLOCK_N > tile.first + size.mem_len) & (j0 <= tile.last + size.mem_len)
    if META.BOUNDED_BEHIND:
        behind = j0 < reach_of(tile.last + size.mem_len, size)[0]
        near = near | behind
        if mask.dense.data is None:
            every = every & (behind == 0)
    if META.BOUNDED_AHEAD:
        ahead = j0 + META.BLOCK_N > reach_of(tile.first + size.mem_len, size)[1]
        near = near | ahead
        if mask.dense.data is None:
            every = every & (ahead == 0)
    return every, near


@triton.jit
def visible(tile, row_mask, mask, j0, size, META, NEAR: tl.constexpr):
    """Mask of visible pairs of a tile (BLOCK_M, BLOCK_N); NEAR: see `visibility`."""
    column = tl.arange(0, META.BLOCK_N)
    own_column = tile.position + (size.mem_len - j0)
    if mask.rank.key_rank is not None:  # nonexistent rows and keys have ranks that hide them
        key_rank = load_key_rank(mask, tile.head, j0, size, META)[None, :]
        seen = key_rank < row_mask.rank[:, None]
        if mask.rank.query_floor is not None:
            seen = seen & (key_rank >= row_mask.floor[:, None])
        if NEAR and mask.rank.sees_self is not None:
            seen = seen | (column[None, :] == tl.where(row_mask.own, own_column, -1)[:, None])
    else:
        seen = tile.inside[:, None] & (column < size.keys - j0)[None, :]
    begin, end = reach_of(own_column, size)
    if NEAR and META.BOUNDED_BEHIND:
        seen = seen & (column[None, :] >= begin[:, None])
    if NEAR and META.BOUNDED_AHEAD:
        seen = seen & (column[None, :] < end[:, None])
    if mask.dense.data is not None:
        dense = mask.dense
        base = dense.data + (tile.head.b * dense.stride_b + tile.head.h * dense.stride_h)
        offset = tile.row[:, None].to(tl.int64) * dense.stride_l + column[None, :] * dense.stride_k
        seen = seen & (tl.load((base + tl.cast(j0, tl.int64) * dense.stride_k) + offset, mask=seen, other=0) != 0)
    return seen


@triton.jit
def hide(score, tile, row_mask, mask, every, near, j0, size, META):
    """Scores (BLOCK_M, BLOCK_N), set to minus infinity where a row does not see a key."""
    if not every:
        if near:
            score = tl.where(visible(tile, row_mask, mask, j0, size, META, True), score, -float("inf"))
        else:
            score = tl.where(visible(tile, row_mask, mask, j0, size, META, False), score, -float("inf"))
    return score


@triton.jit
def sees_any_key(tile, row_mask, mask, span, size, META):
    """Whether each row (BLOCK_M,) of a tile sees a key."""
    found = tl.zeros((META.BLOCK_M,), tl.int32)
    for j0 in range(span.begin, span.end, META.BLOCK_N):
        found |= tl.max(visible(tile, row_mask, mask, j0, size, META, True).to(tl.int32), 1)
    return found != 0


@triton.jit
def span_of_keys(tile, row_mask, mask, size, META):
    """Range of keys that contains all visible keys of the tile's rows; `begin` is a multiple of BLOCK_N."""
    low = 0
    high = size.keys
    if META.BOUNDED_BEHIND:
        low = tl.maximum(reach_of(tile.first + size.mem_len, size)[0], 0)
    if META.BOUNDED_AHEAD:
        high = tl.minimum(reach_of(tile.last + size.mem_len, size)[1], size.keys)
    begin = low
    end = high
    if mask.rank.key_rank is not None:
        CHUNK: tl.constexpr = 128
        highest = tl.max(row_mask.rank, 0)
        lowest_floor = tl.min(row_mask.floor, 0)
        begin = size.keys
        end = 0
        start = tile.head.b * (padded(size.keys) // BOUND)
        for chunk in range(low // BOUND, tl.cdiv(high, BOUND), CHUNK):
            bound = chunk + tl.arange(0, CHUNK)
            exists = bound < padded(size.keys) // BOUND
            some = tl.load((mask.rank.least + start) + bound, mask=exists, other=HIGHEST) < highest
            if mask.rank.query_floor is not None:
                some &= tl.load((mask.rank.largest + start) + bound, mask=exists, other=LOWEST) >= lowest_floor
            begin = tl.minimum(begin, tl.min(tl.where(some, bound * BOUND, size.keys), 0))
            end = tl.maximum(end, tl.max(tl.where(some, (bound + 1) * BOUND, 0), 0))
        if mask.rank.sees_self is not None:
            begin = tl.minimum(begin, tile.first + size.mem_len)
            end = tl.maximum(end, tile.last + size.mem_len + 1)
        begin = tl.maximum(begin, low)
        end = tl.minimum(end, high)
    # An empty span lies at 0, because the ring finds rows of rel_key there.
    some = begin < end
    return Span(tl.where(some, begin // META.BLOCK_N * META.BLOCK_N, 0), tl.where(some, end, 0))


@triton.jit
def span_of_rows(positions, mask, backward, head, j0, size, META):
    """Range of rows, in the order of their positions, that contains all rows that see a key of the tile at j0."""
    begin = 0
    end = size.length
    if mask.rank.query_rank is not None or META.BOUNDED_BEHIND or META.BOUNDED_AHEAD:
        CHUNK: tl.constexpr = 128
        begin = size.length
        end = 0
        key_least, key_largest = rank_range(mask, head, j0, size, META)
        start = head.b * (padded(size.length) // BOUND)
        for chunk in range(0, tl.cdiv(size.length, BOUND), CHUNK):
            bound = chunk + tl.arange(0, CHUNK)
            first = bound * BOUND  # of the rows of a bound, and below of their positions
            some = first < size.length
            last = tl.minimum(first + BOUND, size.length) - 1
            if positions.position is not None:
                start_of_rows = of_rows(head, size)
                first = load_position(positions, start_of_rows + first, some, size)
                last = load_position(positions, start_of_rows + last, some, size)
            first += size.mem_len
            last += size.mem_len
            if mask.rank.query_rank is not None:
                ranked = tl.load((backward.rank_largest + start) + bound, mask=some, other=LOWEST) > key_least
                if mask.rank.query_floor is not None:
                    floor = tl.load((backward.floor_least + start) + bound, mask=some, other=HIGHEST)
                    ranked = ranked & (floor <= key_largest)
                if mask.rank.sees_self is not None:
                    ranked = ranked | ((last >= j0) & (first < j0 + META.BLOCK_N))
                some = some & ranked
            if META.BOUNDED_BEHIND:
                some = some & (reach_of(first, size)[0] < j0 + META.BLOCK_N)
            if META.BOUNDED_AHEAD:
                some = some & (reach_of(last, size)[1] > j0)
            begin = tl.minimum(begin, tl.min(tl.where(some, bound * BOUND, size.length), 0))
            end = tl.maximum(end, tl.max(tl.where(some, (bound + 1) * BOUND, 0), 0))
        end = tl.minimum(end, size.length)
    return Span(begin // META.BLOCK_M * META.BLOCK_M, end)
