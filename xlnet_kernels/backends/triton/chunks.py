"""Heads in chunks of BC columns: what the products of a tile take their operands from.

Widths are rounded up to whole chunks. An accumulator is a tuple of chunks, so that the compiler lays its warps over
rows whatever the width. With KEEP the operands that a loop takes again in each step stay in registers or shared memory.
Without, they are loaded again, chunk by chunk: those of wide heads do not fit in registers, and in float32 without
tensor cores every thread would hold whole rows of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Addresses are a scalar base plus offsets that stay the same from tile to tile: cheaper than a vector of addresses.


@triton.jit
def load_rows(base, row, stride, inside, c, D: tl.constexpr, BC: tl.constexpr):
    """Columns c BC .. c BC + BC-1 (rows, BC) of a matrix (rows, D); zeros where not `inside` and beyond D."""
    d = c * BC + tl.arange(0, BC)
    mask = inside[:, None]
    if D % BC != 0:
        mask = mask & (d < D)[None, :]
    return tl.load(base + (row[:, None] * stride + d[None, :]), mask=mask, other=0.0)


@triton.jit
def load_block(base, stride, start, rows, c, BN: tl.constexpr, D: tl.constexpr, BC: tl.constexpr):
    """Chunk c of rows start .. start+BN-1 of a matrix (rows, D) as (BN, BC); zeros beyond it."""
    column = tl.arange(0, BN)
    return load_rows(base + tl.cast(start, tl.int64) * stride, column, stride, column < rows - start, c, D, BC)


@triton.jit
def key_pointers(memory, memory_stride, current, stride, j0, mem_len, c, BN: tl.constexpr, BC: tl.constexpr):
    """Pointers (BN, BC) to keys or values j0 .. j0+BN-1 of the memory and then the current segment."""
    column = tl.arange(0, BN)
    d = c * BC + tl.arange(0, BC)
    pointer = (current + tl.cast(j0 - mem_len, tl.int64) * stride) + (column[:, None] * stride + d[None, :])
    if memory is not None:
        old = (memory + tl.cast(j0, tl.int64) * memory_stride) + (column[:, None] * memory_stride + d[None, :])
        pointer = tl.where((column < mem_len - j0)[:, None], old, pointer)
    return pointer


@triton.jit
def key_mask(j0, keys, c, BN: tl.constexpr, D: tl.constexpr, BC: tl.constexpr):
    mask = (tl.arange(0, BN) < keys - j0)[:, None]
    if D % BC != 0:
        mask = mask & (c * BC + tl.arange(0, BC) < D)[None, :]
    return mask


@triton.jit
def load_keys(
    memory, memory_stride, current, stride, j0, mem_len, keys, c, BN: tl.constexpr, D: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """(BN, BC) keys or values from j0 on; zeros beyond the last."""
    pointer = key_pointers(memory, memory_stride, current, stride, j0, mem_len, c, BN, BC)
    return tl.load(pointer, mask=key_mask(j0, keys, c, BN, D, BC), other=0.0)


@triton.jit
def store_keys(
    memory, memory_stride, current, stride, j0, mem_len, keys, chunks, BN: tl.constexpr, D: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """The transposed map of `load_keys`, of all chunks."""
    for c in tl.static_range((D + BC - 1) // BC):
        pointer = key_pointers(memory, memory_stride, current, stride, j0, mem_len, c, BN, BC)
        tl.store(pointer, chunks[c].to(current.dtype.element_ty), mask=key_mask(j0, keys, c, BN, D, BC))


@triton.jit
def add_bias(rows, bias, h, c, D: tl.constexpr, BC: tl.constexpr):
    """Chunk c of rows (BM, BC) plus a head's row of `bias` (H, D), rounded as the reference rounds it."""
    if bias is None:
        return rows
    else:
        d = c * BC + tl.arange(0, BC)
        return (rows + tl.load(bias + h * D + d, mask=d < D, other=0.0)[None, :]).to(rows.dtype)


@triton.jit
def in_loop(x, j0):
    """`x` (keys are fewer than 2^30). The compiler does not see that it is the same for all j0, and so does not
    keep what is made of it in registers."""
    return x + (j0 >> 30)


@triton.jit
def zeros(ROWS: tl.constexpr, D: tl.constexpr, BC: tl.constexpr):
    """The chunks (ROWS, BC) of zeros (ROWS, D)."""
    chunks = ()
    for _ in tl.static_range((D + BC - 1) // BC):
        chunks = chunks + (tl.zeros((ROWS, BC), tl.float32),)
    return chunks


@triton.jit
def keep_rows(base, row, stride, inside, bias, h, D: tl.constexpr, BC: tl.constexpr, KEEP: tl.constexpr):
    """Rows plus bias as an operand of products: its chunks, or with KEEP false only where to load them from."""
    chunks = ()
    if KEEP:
        for c in tl.static_range((D + BC - 1) // BC):
            chunks = chunks + (add_bias(load_rows(base, row, stride, inside, c, D, BC), bias, h, c, D, BC),)
    if bias is None:  # a function cannot return None among others in Triton 3.6
        return chunks, base, row, stride, inside
    else:
        return chunks, base, row, stride, inside, bias, h


@triton.jit
def row_chunk(rows, c, D: tl.constexpr, BC: tl.constexpr, KEEP: tl.constexpr):
    if KEEP:
        return rows[0][c]
    else:
        tile = load_rows(rows[1], rows[2], rows[3], rows[4], c, D, BC)
        if len(rows) > 5:
            tile = add_bias(tile, rows[5], rows[6], c, D, BC)
        return tile


@triton.jit
def in_loop_rows(rows, j0, KEEP: tl.constexpr):
    """The compiler would load what is the same in each step once, before the loop, and spill it."""
    if KEEP:
        return rows
    elif len(rows) > 5:
        return rows[0], rows[1], in_loop(rows[2], j0), rows[3], rows[4], rows[5], in_loop(rows[6], j0)
    else:
        return rows[0], rows[1], in_loop(rows[2], j0), rows[3], rows[4]


@triton.jit
def keep_keys(
    memory, memory_stride, current, stride, j0, mem_len, keys, BN: tl.constexpr, D: tl.constexpr, BC: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Keys or values as an operand of products: its chunks, or with KEEP false only where to load them from."""
    chunks = ()
    if KEEP:
        for c in tl.static_range((D + BC - 1) // BC):
            chunks = chunks + (load_keys(memory, memory_stride, current, stride, j0, mem_len, keys, c, BN, D, BC),)
    if memory is None:
        return chunks, current, stride, j0, mem_len, keys
    else:
        return chunks, current, stride, j0, mem_len, keys, memory, memory_stride


@triton.jit
def key_chunk(of, c, BN: tl.constexpr, D: tl.constexpr, BC: tl.constexpr, KEEP: tl.constexpr):
    if KEEP:
        return of[0][c]
    elif len(of) > 6:
        return load_keys(of[6], of[7], of[1], of[2], of[3], of[4], of[5], c, BN, D, BC)
    else:
        return load_keys(None, 0, of[1], of[2], of[3], of[4], of[5], c, BN, D, BC)


@triton.jit
def in_loop_keys(of, n0, KEEP: tl.constexpr):
    """`in_loop_rows` of keys."""
    if KEEP:
        return of
    elif len(of) > 6:
        return of[0], of[1], of[2], in_loop(of[3], n0), of[4], of[5], of[6], of[7]
    else:
        return of[0], of[1], of[2], in_loop(of[3], n0), of[4], of[5]


@triton.jit
def add_product(
    score, rows, of, BN: tl.constexpr, D: tl.constexpr, BC: tl.constexpr, KEEP_ROWS: tl.constexpr,
    KEEP_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """score (BM, BN) plus the product of rows and keys (or values)."""
    if KEEP_ROWS:
        for c in tl.static_range((D + BC - 1) // BC):
            tile = tl.trans(key_chunk(of, c, BN, D, BC, KEEP_KEYS))
            score = tl.dot(row_chunk(rows, c, D, BC, KEEP_ROWS), tile, acc=score, input_precision=PRECISION)
    else:
        for c in range((D + BC - 1) // BC):
            tile = tl.trans(key_chunk(of, c, BN, D, BC, False))
            score = tl.dot(row_chunk(rows, c, D, BC, False), tile, acc=score, input_precision=PRECISION)
    return score
