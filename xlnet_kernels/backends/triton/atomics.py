"""Atomic additions of products to float32 sums in global memory."""

from __future__ import annotations

import triton
import triton.language as tl

from .operands import columns
from .shift_ptx import split


@triton.constexpr_function
def _place(number, count):
    """Index of the slice, of `count`, at a place after all steps of `split`."""
    bits = count.bit_length() - 1
    return sum((number >> k & 1) << bits - 1 - k for k in range(bits))


@triton.jit
def add_atomically(sums, chunk, c, META):
    """Add chunk c (BLOCK_N, BLOCK_D) of a product to a matrix (rows, D).

    In the register layout of wgmma, an addition covers the eight columns of a group, in every second eight rows. It
    covers as many groups at once as there are warps side by side. A thread has two neighbouring elements, four threads
    fill a sector, and no data passes through shared memory.
    """
    D: tl.constexpr = META.HEAD_DIM
    if META.SHIFT_PTX:
        ROWS: tl.constexpr = META.BLOCK_N // 2
        WARPS: tl.constexpr = META.BLOCK_M // META.BLOCK_N  # side by side; a warp has 16 rows, here and in a tile
        COUNT: tl.constexpr = META.BLOCK_D // (4 * WARPS)
        parts = tl.permute(tl.reshape(chunk, (ROWS // 8, 2, 8, WARPS, COUNT // 2, 8)), (3, 0, 2, 5, 4, 1))
        parts = split(tl.reshape(parts, (WARPS * ROWS, 8, COUNT)), COUNT)
        row = tl.arange(0, ROWS)[None, :, None]
        column = tl.arange(0, WARPS)[:, None, None] * (META.BLOCK_D // WARPS) + tl.arange(0, 8)[None, None, :]
        column += c * META.BLOCK_D
        sums += (row // 8 * 16 + row % 8) * D + column
        for i in tl.static_range(COUNT):
            place = _place(i, COUNT)
            mask = None
            if D % META.BLOCK_D != 0:
                mask = column + place // 2 * 8 < D
            at = sums + (place % 2 * 8 * D + place // 2 * 8)
            tl.atomic_add(at, tl.reshape(parts[i], (WARPS, ROWS, 8)), mask=mask, sem="relaxed")
    else:
        d = columns(c, META)
        mask = None
        if META.HEAD_DIM % META.BLOCK_D != 0:
            mask = (d < D)[None, :]
        tl.atomic_add(sums + (tl.arange(0, chunk.shape[0])[:, None] * D + d[None, :]), chunk, mask=mask, sem="relaxed")
