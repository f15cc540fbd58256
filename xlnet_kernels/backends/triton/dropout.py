"""Dropout of probabilities: the mask of xlnet_kernels/dropout.py, which depends on pairs, not on tiles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept(dropout, tile, j0, META):
    """Mask of kept probabilities of a tile (BLOCK_M, BLOCK_N) at keys j0 .. j0 + BLOCK_N - 1."""
    BLOCK_N: tl.constexpr = META.BLOCK_N
    seed = tl.load(dropout.state)
    offset = tl.load(dropout.state + 1)
    low = (offset & 0xFFFFFFFF).to(tl.uint32)
    first_head = (offset >> 32 & 0xFFFFF).to(tl.int32)
    other_heads = (offset >> 52 & 0xFFF).to(tl.int32)
    head = tile.head.index + tile.head.b.to(tl.int32) * other_heads + first_head
    CALLS: tl.constexpr = 4 if BLOCK_N < 64 else BLOCK_N // 16
    group = j0 // 64 + tl.arange(0, CALLS)[None, :] // 4
    first = group * 4 + tl.arange(0, CALLS)[None, :] % 4 + tl.zeros((META.BLOCK_M, 1), tl.int32)
    zeros = tl.zeros_like(first)
    w0, w1, w2, w3 = tl.philox(
        seed, first, zeros + tile.row[:, None], zeros + head,
        (zeros.to(tl.uint32) + low).to(tl.int32, bitcast=True),
    )  # fmt: skip
    # the threshold below which a byte drops: 256 p, rounded up where the phase is large enough
    phase = seed.to(tl.uint32) + head.to(tl.uint32) * 0xC2B2AE35 + tile.row.to(tl.uint32)[:, None] * 0x85EBCA6B
    phase += group.to(tl.uint32) * 0x9E3779B9
    p = dropout.threshold.to(tl.uint32, bitcast=True)
    least = (p >> 24) + (((p & 0xFFFFFF) + (phase >> 8)) >> 24)  # (BLOCK_M, CALLS)
    carry = (256 - least) * 0x10001  # added to two bytes at a time: bit 8 is set where the byte is not less
    kept = tl.zeros_like(w0)
    for word in tl.static_range(4):
        drawn = w0 if word == 0 else w1 if word == 1 else w2 if word == 2 else w3
        even = (drawn & 0xFF00FF) + carry
        odd = (drawn >> 8 & 0xFF00FF) + carry
        kept |= ((even >> 8 & 0x10001) | (odd >> 7 & 0x20002)) << (4 * word)
    kept |= kept >> 14  # bit 2 n + parity: column 8 n + 2 call + parity of the group
    GROUPS: tl.constexpr = CALLS // 4
    EIGHTS: tl.constexpr = BLOCK_N // 8 // GROUPS
    bit = 2 * tl.arange(0, EIGHTS)[:, None] + tl.arange(0, 2)[None, :]
    if BLOCK_N < 64:  # the group's second half
        bit += j0 % 64 // 4
    kept = tl.reshape(kept, (META.BLOCK_M, GROUPS, 1, 4, 1)) >> tl.reshape(bit, (1, 1, EIGHTS, 1, 2)).to(tl.uint32)
    return tl.reshape((kept & 1) != 0, (META.BLOCK_M, BLOCK_N))
