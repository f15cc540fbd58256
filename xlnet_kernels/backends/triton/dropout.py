"""Dropout of probabilities: the mask that xlnet_kernels/dropout.py defines, by pair and not by tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept(dropout, tile, j0, META):
    """Which probabilities of a tile (BLOCK_M, BLOCK_N) at keys j0 .. j0 + BLOCK_N - 1 are kept."""
    BLOCK_N: tl.constexpr = META.BLOCK_N
    seed = tl.load(dropout.state)
    offset = tl.load(dropout.state + 1)
    low = (offset & 0xFFFFFFFF).to(tl.uint32)
    first_head = (offset >> 32 & 0xFFFFF).to(tl.int32)
    other_heads = (offset >> 52 & 0xFFF).to(tl.int32)
    head = tile.head.index + tile.head.b.to(tl.int32) * other_heads + first_head
    WORDS: tl.constexpr = 16 if BLOCK_N < 64 else BLOCK_N // 4
    first = j0 // 64 * 16 + tl.arange(0, WORDS)[None, :] + tl.zeros((META.BLOCK_M, 1), tl.int32)
    zeros = tl.zeros_like(first)
    w0, w1, w2, w3 = tl.philox(
        seed, first, zeros + tile.row[:, None], zeros + head,
        (zeros.to(tl.uint32) + low).to(tl.int32, bitcast=True),
    )  # fmt: skip
    if BLOCK_N == 32:  # two words of the four
        upper = (j0 % 64) != 0
        pair = tl.join(tl.where(upper, w2, w0), tl.where(upper, w3, w1))
        words = tl.reshape(tl.permute(pair, (0, 2, 1)), (META.BLOCK_M, BLOCK_N))
    else:
        four = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (BLOCK_M, WORDS, 2, 2), words in order
        four = tl.reshape(four, (META.BLOCK_M, WORDS // 16, 16, 4))
        words = tl.reshape(tl.permute(four, (0, 1, 3, 2)), (META.BLOCK_M, BLOCK_N))
    return words >= dropout.threshold.to(tl.uint32, bitcast=True)
