"""Atomic additions of products to float32 sums in global memory."""

from __future__ import annotations

import triton
import triton.language as tl

from .operands import columns


@triton.jit
def add_atomically(sums, chunk, c, META):
    """Add chunk c (BLOCK_N, BLOCK_D) of a product to a matrix (rows, D).

    In the register layout of wgmma, an instruction adds the eight columns of a group, in every second eight rows. It
    adds as many groups at once as there are warps side by side. A thread has two neighbouring elements, four threads
    fill a sector, and no data passes through shared memory.
    """
    D: tl.constexpr = META.HEAD_DIM
    if META.SHIFT_PTX:
        ROWS: tl.constexpr = META.BLOCK_N // 2
        WARPS: tl.constexpr = META.BLOCK_M // META.BLOCK_N  # side by side; a warp has 16 rows, here and in a tile
        GROUPS: tl.constexpr = META.BLOCK_D // (8 * WARPS)  # of eight columns, of a warp
        parts = tl.permute(tl.reshape(chunk, (ROWS // 8, 2, 8, WARPS, GROUPS, 8)), (4, 1, 3, 0, 2, 5))
        parts = tl.reshape(parts, (GROUPS * 2, WARPS, ROWS, 8))
        warp = tl.arange(0, WARPS)[None, :, None, None]
        row = tl.arange(0, ROWS)[None, None, :, None]
        column = c * META.BLOCK_D + warp * (META.BLOCK_D // WARPS) + tl.arange(0, 8)[None, None, None, :]
        at = sums + ((row // 8 * 16 + row % 8) * D + column)
        # Registers of a thread differ by constants, which the instructions have room for because they are added last.
        part = tl.arange(0, GROUPS * 2)[:, None, None, None]
        at += part % 2 * 8 * D + part // 2 * 8
        mask = None
        if D % META.BLOCK_D != 0:
            mask = column + part // 2 * 8 < D
        # Two, because with more at once the columns of a group would go to threads that do not have them.
        tl.atomic_add(tl.max_contiguous(at, (1, 1, 1, 2)), parts, mask=mask, sem="relaxed")
    else:
        d = columns(c, META)
        mask = None
        if META.HEAD_DIM % META.BLOCK_D != 0:
            mask = (d < D)[None, :]
        tl.atomic_add(sums + (tl.arange(0, chunk.shape[0])[:, None] * D + d[None, :]), chunk, mask=mask, sem="relaxed")
