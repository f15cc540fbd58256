"""Operands of a tile's products: heads in chunks of BLOCK_D columns.

Widths are rounded up to whole chunks. An accumulator is a tuple of chunks, so that the compiler distributes warps over
rows for every width. With KEEP the operands reused in each step of a loop stay in registers or shared memory. Without,
they are loaded again, chunk by chunk, because wide heads do not fit in registers. In float32 without tensor cores every
thread would hold whole rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import matrix_at, of_padded_rows
from .compiler import materialise, opaque

# Addresses are a scalar base plus offsets that are constant over tiles: cheaper than a vector of addresses.


class RowOperand(NamedTuple):
    """Preprocessed rows of a tile."""

    kept: Any  # its chunks (BLOCK_M, BLOCK_D), or empty: loaded again in each step
    data: Any  # the first of the tile's rows
    head: Any


class KeyOperand(NamedTuple):
    """Keys or values of a tile, memory and then segment."""

    kept: Any  # its chunks (BLOCK_N, BLOCK_D), or empty
    current: Any
    memory: Any
    head: Any
    j0: Any


class SomeRows(NamedTuple):
    """Rows by position, including the last tile's padding: the first fields of shift.py's RowTile."""

    head: Any
    start: Any  # the first
    row: Any  # (BLOCK_M,) index in the call
    inside: Any  # (BLOCK_M,) whether it exists and, in backward, sees a key


@triton.jit
def rows_of_tile(META):
    """Index in a tile of each of its rows (BLOCK_M,).

    FOLDED: rows n and n + BLOCK_M / 2, whose positions differ by BLOCK_N, are n % 8 and n % 8 + 8 of a fragment's 16.
    """
    row = tl.arange(0, META.BLOCK_M)
    if META.FOLDED:
        row = row // 16 * 8 + row % 8 + row // 8 % 2 * (META.BLOCK_M // 2)
    return row


@triton.jit
def columns(c, META):
    """Columns (BLOCK_D,) of chunk c."""
    # Cast, because the interpreter needs tensors on the left.
    return tl.cast(c * META.BLOCK_D, tl.int32) + tl.arange(0, META.BLOCK_D)


@triton.jit
def load_rows(base, row, stride, inside, c, META):
    """Chunk c (rows, BLOCK_D) of a matrix (rows, D); zeros where not `inside` and beyond D."""
    d = columns(c, META)
    mask = inside[:, None]
    if META.HEAD_DIM % META.BLOCK_D != 0:
        mask = mask & (d < META.HEAD_DIM)[None, :]
    return tl.load(base + (row[:, None] * stride + d[None, :]), mask=mask, other=0.0)


@triton.jit
def load_rel_key(rel_key, head, start, c, size, META):
    """Chunk c (BLOCK_N, BLOCK_D) of rows start .. start + BLOCK_N - 1 of rel_key; zeros for those it does not have."""
    row = start + tl.arange(0, META.BLOCK_N)
    inside = row < size.rel_len
    # Masked, because rows beyond the last would read before the first row, at huge indices.
    if META.BOUNDED_BEHIND or META.FOLDED:
        inside = row.to(tl.uint32, bitcast=True) < size.rel_len.to(tl.uint32, bitcast=True)
    # Masked, because rows needed only by rows beyond the last may hold anything, NaN too.
    if META.FOLDED:
        inside = inside & (row >= size.max_distance - size.mem_len - size.length + 1)
    return load_rows(matrix_at(rel_key, head), row, rel_key.stride_l, inside, c, META)


@triton.jit
def key_pointers(memory, memory_stride, current, stride, j0, c, size, META):
    """Pointers (BLOCK_N, BLOCK_D) to keys or values from j0 on, memory and then the current segment."""
    key = j0 + tl.arange(0, META.BLOCK_N)
    d = columns(c, META)
    pointer = current + ((key - size.mem_len)[:, None] * stride + d[None, :])
    if memory is not None:
        old = memory + (key[:, None] * memory_stride + d[None, :])
        pointer = tl.where((key < size.mem_len)[:, None], old, pointer)
    return pointer


@triton.jit
def key_mask(j0, c, size, META):
    """Mask of existing `key_pointers`."""
    mask = (tl.arange(0, META.BLOCK_N) < size.keys - j0)[:, None]
    if META.HEAD_DIM % META.BLOCK_D != 0:
        mask = mask & (columns(c, META) < META.HEAD_DIM)[None, :]
    return mask


@triton.jit
def load_keys(memory, current, head, j0, c, size, META):
    """Chunk c (BLOCK_N, BLOCK_D) of keys or values from j0 on; zeros beyond the last."""
    base = matrix_at(current, head)
    if memory.data is None:
        pointer = key_pointers(None, 0, base, current.stride_l, j0, c, size, META)
    else:
        old = matrix_at(memory, head)
        pointer = key_pointers(old, memory.stride_l, base, current.stride_l, j0, c, size, META)
    return tl.load(pointer, mask=key_mask(j0, c, size, META), other=0.0)


@triton.jit
def store_keys(memory, current, head, j0, chunks, scale, size, META):
    """Store all chunks times `scale` into contiguous (B, M, H, D) and (B, K, H, D): the transpose of `load_keys`."""
    # int64, because the stride of this layout may be larger than that of the inputs.
    stride = tl.cast(size.heads * META.HEAD_DIM, tl.int64)
    if memory is not None:
        memory += head.b * size.mem_len * size.heads * META.HEAD_DIM + head.h * META.HEAD_DIM
    current += head.b * (size.keys - size.mem_len) * size.heads * META.HEAD_DIM + head.h * META.HEAD_DIM
    for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
        pointer = key_pointers(memory, stride, current, stride, j0, c, size, META)
        tl.store(pointer, (chunks[c] * scale).to(current.dtype.element_ty), mask=key_mask(j0, c, size, META))


@triton.jit
def load_query(rows, tile, c, META):
    """Chunk c (BLOCK_M, BLOCK_D) of a tile's query rows; zeros outside of it."""
    return load_rows(matrix_at(rows.query, tile.head), tile.row, rows.query.stride_l, tile.inside, c, META)


@triton.jit
def add_bias(chunk, bias, tile, c, META):
    """Chunk c of a tile's rows (BLOCK_M, BLOCK_D) plus a head's row of `bias` (H, D), zeros outside of the tile.

    Rounded as in the reference.
    """
    if bias is None:
        return chunk
    else:
        d = columns(c, META)
        values = tl.load((bias + tile.head.h * META.HEAD_DIM) + d, mask=d < META.HEAD_DIM, other=0.0)  # (BLOCK_D,)
        return tl.where(tile.inside[:, None], (chunk + values[None, :]).to(chunk.dtype), 0.0)


@triton.jit
def zeros(ROWS: tl.constexpr, META):
    """The chunks (ROWS, BLOCK_D) of zeros (ROWS, D)."""
    chunks = ()
    for _ in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
        chunks = chunks + (tl.zeros((ROWS, META.BLOCK_D), tl.float32),)
    return chunks


@triton.jit
def scaled(chunks, factor):
    """Chunks (ROWS, BLOCK_D), each row times its factor (ROWS,)."""
    found = ()
    for c in tl.static_range(len(chunks)):
        found = found + (chunks[c] * factor[:, None],)
    return found


@triton.jit
def _load_row_chunk(data, c, step, META):
    """Chunk c (BLOCK_M, BLOCK_D) of preprocessed rows."""
    d = columns(c, META)
    row = opaque(rows_of_tile(META), step)
    pointer = data + (row[:, None] * META.HEAD_DIM + d[None, :])
    if META.HEAD_DIM % META.BLOCK_D != 0:
        return tl.load(pointer, mask=(d < META.HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(pointer)


@triton.jit
def row_operand(preprocessed, tile, size, META, KEEP: tl.constexpr, IN_REGISTERS: tl.constexpr = False):
    """RowOperand of a tile's preprocessed rows.

    KEEP: chunks are loaded once, into registers with IN_REGISTERS, else into shared memory.
    """
    data = preprocessed + (of_padded_rows(tile.head, size) + tile.start) * META.HEAD_DIM
    chunks = ()
    if KEEP:
        for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
            chunk = _load_row_chunk(data, c, 0, META)
            if IN_REGISTERS:
                chunk = materialise(chunk)
            chunks = chunks + (chunk,)
    return RowOperand(chunks, data, tile.head)


@triton.jit
def row_chunk(rows, c, step, META, KEEP: tl.constexpr):
    """Chunk c (BLOCK_M, BLOCK_D) of a RowOperand."""
    if KEEP:
        return rows.kept[c]
    else:
        return _load_row_chunk(rows.data, c, step, META)


@triton.jit
def keep_keys(memory, current, head, j0, size, META, KEEP: tl.constexpr):
    """Kept chunks of a KeyOperand."""
    chunks = ()
    if KEEP:
        for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
            chunks = chunks + (load_keys(memory, current, head, j0, c, size, META),)
    return chunks


@triton.jit
def key_chunk(keys, c, step, size, META, KEEP: tl.constexpr):
    """Chunk c (BLOCK_N, BLOCK_D) of a KeyOperand."""
    if KEEP:
        return keys.kept[c]
    else:
        return load_keys(keys.memory, keys.current, keys.head, opaque(keys.j0, step), c, size, META)


@triton.jit
def add_product(score, rows, keys, row_step, key_step, size, META, KEEP_ROWS: tl.constexpr, KEEP_KEYS: tl.constexpr):
    """The sum of score (BLOCK_M, BLOCK_N) and the product of rows and keys (or values)."""
    if KEEP_ROWS:
        for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
            tile_k = tl.trans(key_chunk(keys, c, key_step, size, META, KEEP_KEYS))  # (BLOCK_D, BLOCK_N)
            tile_q = row_chunk(rows, c, row_step, META, KEEP_ROWS)  # (BLOCK_M, BLOCK_D)
            score = tl.dot(tile_q, tile_k, acc=score, input_precision=META.PRECISION)
    else:
        for c in range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
            tile_k = tl.trans(key_chunk(keys, c, key_step, size, META, False))
            tile_q = row_chunk(rows, c, row_step, META, False)
            score = tl.dot(tile_q, tile_k, acc=score, input_precision=META.PRECISION)
    return score
