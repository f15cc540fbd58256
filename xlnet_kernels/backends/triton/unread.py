"""Copies of keys, values and rel_key in which unread rows that hold NaN or infinity are zeros.

A row is unread if no pair uses it: a key of padding, an empty column of a dense mask, a row of rel_key for distances
that no visible pair has. Tiles multiply such rows by zeros, and zero times NaN is NaN. Forward copies the values,
backward the keys and rel_key; every other product with an unread row is masked afterwards. launch.py makes copies only
where a call can leave rows unread, so the main kernels need no test. A finite row is copied unchanged; only for other
rows there is a search for a pair that uses the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arguments import Mask, RankMask, head_at, load_position, load_row, matrix_at, of_rows
from .mask import load_row_mask
from .operands import SomeRows, columns, key_mask, key_pointers, load_keys, load_rel_key


@triton.jit
def _sees(rows, position, key, mask, size):
    """Mask of the keys (ROWS, COLUMNS) seen by each row, for keys at any positions: mask.py's `visible` without a tile.

    `mask.rank.key_rank` is as given, (B, M + K).
    """
    own = (position + size.mem_len)[:, None]
    rel_row = key - own + size.max_distance
    exists = rows.inside[:, None] & (key >= 0) & (key < size.keys)
    seen = exists & (rel_row >= 0) & (rel_row < size.rel_len)
    if mask.rank.key_rank is not None:
        rank, floor, sees_own = load_row_mask(mask, rows, size)
        key_rank = tl.load((mask.rank.key_rank + rows.head.b * size.keys) + key, mask=exists, other=0)
        in_rank = key_rank < rank[:, None]
        if mask.rank.query_floor is not None:
            in_rank = in_rank & (key_rank >= floor[:, None])
        seen = seen & (in_rank | (sees_own[:, None] & (key == own)))
    if mask.dense.data is not None:
        dense = mask.dense
        base = dense.data + (rows.head.b * dense.stride_b + rows.head.h * dense.stride_h)
        offset = rows.row[:, None].to(tl.int64) * dense.stride_l + key.to(tl.int64) * dense.stride_k
        seen = seen & (tl.load(base + offset, mask=seen, other=0) != 0)
    return seen


@triton.jit
def _are_read(head, index, positions, mask, size, META, REL_KEY: tl.constexpr):
    """Whether any query row of a head sees the keys `index` (BLOCK_N,), or with REL_KEY reads these rows of rel_key."""
    found = tl.zeros((META.BLOCK_N,), tl.int32)
    for first in range(0, size.length, META.BLOCK_M):
        n = first + tl.arange(0, META.BLOCK_M)
        inside = n < size.length
        row = n
        position = n
        if positions.row is not None:
            row = load_row(positions, of_rows(head, size) + n, inside, size.length)
            position = load_position(positions, of_rows(head, size) + n, inside, size)
        key = index[None, :] + tl.zeros((META.BLOCK_M, 1), tl.int32)
        if REL_KEY:
            key += position[:, None] + (size.mem_len - size.max_distance)
        seen = _sees(SomeRows(head, first, row, inside), position, key, mask, size)
        found |= tl.max(seen.to(tl.int32), 0)
    return found != 0


@triton.jit
def _are_finite(chunks):
    """Whether all numbers of each row (BLOCK_N,) are finite, in chunks (BLOCK_N, BLOCK_D)."""
    largest = tl.zeros((chunks[0].shape[0],), tl.int32)
    for c in tl.static_range(len(chunks)):
        finite = tl.abs(chunks[c].to(tl.float32)) < float("inf")
        largest = tl.maximum(largest, tl.max(tl.where(finite, 0, 1), 1))
    return largest == 0


@triton.jit
def copy_keys(copies, number, mask, positions, size, META):
    """Copy keys: program `number` of heads and tiles of BLOCK_N keys, memory first."""
    tiles = tl.cdiv(size.keys, META.BLOCK_N)
    head = head_at(number // tiles, size)
    j0 = number % tiles * META.BLOCK_N
    chunks = ()
    for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
        chunks = chunks + (load_keys(copies.memory.given, copies.keys.given, head, j0, c, size, META),)
    kept = _are_finite(chunks)
    if tl.min(kept.to(tl.int32), 0) == 0:
        kept = kept | _are_read(head, j0 + tl.arange(0, META.BLOCK_N), positions, mask, size, META, False)
    current = matrix_at(copies.keys.copy, head)
    stride = copies.keys.copy.stride_l
    for c in tl.static_range(len(chunks)):
        if copies.memory.copy.data is None:
            pointer = key_pointers(None, 0, current, stride, j0, c, size, META)
        else:
            memory = matrix_at(copies.memory.copy, head)
            pointer = key_pointers(memory, copies.memory.copy.stride_l, current, stride, j0, c, size, META)
        tl.store(pointer, tl.where(kept[:, None], chunks[c], 0.0), mask=key_mask(j0, c, size, META))


@triton.jit
def copy_rel_key(copy, number, batch, groups, mask, positions, size, META):
    """Copy rel_key: program `number` of groups of heads that share it and tiles of BLOCK_N of its rows."""
    tiles = tl.cdiv(size.rel_len, META.BLOCK_N)
    group = number // tiles
    head = head_at(group, size)
    start = number % tiles * META.BLOCK_N
    row = start + tl.arange(0, META.BLOCK_N)
    chunks = ()
    for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
        chunks = chunks + (load_rel_key(copy.given, head, start, c, size, META),)
    kept = _are_finite(chunks)
    if tl.min(kept.to(tl.int32), 0) == 0:
        for index in range(group, batch * size.heads, groups):
            kept = kept | _are_read(head_at(index, size), row, positions, mask, size, META, True)
    for c in tl.static_range(len(chunks)):
        d = columns(c, META)
        pointer = matrix_at(copy.copy, head) + (row[:, None] * copy.copy.stride_l + d[None, :])
        exists = (row < size.rel_len)[:, None] & (d < META.HEAD_DIM)[None, :]
        tl.store(pointer, tl.where(kept[:, None], chunks[c], 0.0), mask=exists)


@triton.jit
def copy_rows(copies, number, key_programs, batch, groups, mask, key_rank, positions, size, META):
    """Copy rows: program `number` of those that copy, `key_programs` for keys or values, the rest for rel_key."""
    # Ranks as given, because other programs of this launch pad those of `mask`
    rank = RankMask(mask.rank.query_rank, key_rank, None, None, mask.rank.query_floor, mask.rank.sees_self)
    given = Mask(rank, mask.dense)
    if copies.keys.given.data is not None:
        if number < key_programs:
            copy_keys(copies, number, given, positions, size, META)
    if copies.rel_key.given.data is not None:
        if number >= key_programs:
            copy_rel_key(copies.rel_key, number - key_programs, batch, groups, given, positions, size, META)
