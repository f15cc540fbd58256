"""The relative shift, in registers.

A tile of rows whose last position is `last` needs, at its keys j0 .. j0+BN-1, row origin + j0 + shift[i] + c of
rel_key, where shift[i] = last - position[i]. Products with whole blocks of BN rows of rel_key make a band; every row
takes its BN columns from two neighbouring blocks: picked by `near`, put in place by `rotate`. Where the positions of a
tile are close (consecutive rows, or rows sorted by position), blocks are carried from one tile of keys to the next, so
that each is multiplied once: the ring.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunks import load_block, row_chunk


@triton.jit
def _swap(x, BIT: tl.constexpr):
    """(BM, BN / 8, 8) with those columns exchanged whose indices differ in bit BIT."""
    pairs = tl.reshape(x.to(tl.int32, bitcast=True), (x.shape[0], x.shape[1] * 8 >> (BIT + 1), 2, 1 << BIT))
    pairs = tl.sum(pairs, 2, keep_dims=True) - pairs  # (a + b) - a = b modulo 2^32; the compiler sees that too
    return tl.reshape(pairs, x.shape).to(tl.float32, bitcast=True)


@triton.jit
def _roll(x, BIT: tl.constexpr):
    """out[i, c] = x[i, (c + 2^BIT) % (8 GROUPS)] for x (BM, GROUPS, 8); other names for registers, where groups are."""
    GROUPS: tl.constexpr = x.shape[1]
    group = tl.arange(0, GROUPS)[None, :, None]
    for k in tl.static_range(8):
        if (1 << k) < GROUPS * 8 and k >= BIT:
            # adding carries into bit k where all bits from BIT to k - 1 are set
            x = tl.where((group | ~((1 << k - 3) - (1 << BIT - 3))) == -1, _swap(x, k), x)
    return x


@triton.jit
def rotate(x, shift):
    """out[i, c] = x[i, (c + shift[i]) % BN] for float32 x (BM, BN).

    Two halves. Within groups of 8 columns a butterfly: step k puts bit k of the column right, by exchanging columns
    that differ in just that bit wherever adding `shift` to the bits below carries into it. Then whole groups, by the
    bits of what is left. Groups live in registers; of the bits within a group one does too and two are lanes of a
    tensor-core fragment: no shared memory and no barrier, two warp shuffles and log2(BN) selections an element.
    Conditions have the shape (BM, 1, 8): four in a thread for each step, however many groups there are.
    """
    BM: tl.constexpr = x.shape[0]
    BN: tl.constexpr = x.shape[1]
    x = tl.reshape(x, (BM, BN // 8, 8))
    column = tl.arange(0, 8)[None, None, :]
    shift = shift[:, None, None]
    for k in tl.static_range(3):
        carried = (column & ((1 << k) - 1)) + shift
        x = tl.where((carried & (1 << k)) != 0, _swap(x, k), x)
    left = column + shift
    for k in tl.static_range(3, 8):
        if (1 << k) < BN:
            x = tl.where((left & (1 << k)) != 0, _roll(x, k), x)
    return tl.reshape(x, (BM, BN))


@triton.jit
def shift_in(first, middle, new, shift, BM: tl.constexpr, BN: tl.constexpr):
    """Position scores (BM, BN) of one tile of keys, and the blocks `first` and `middle` of the next.

    `new` is the product with the furthest block. Rows of the upper half of a tile with BM = 2 BN are one block further.
    """
    if BM > BN:
        second = tl.where((shift >= BN)[:, None], new, middle)
    else:
        second = new
    near = tl.arange(0, BN)[None, :] >= (shift % BN)[:, None]
    return rotate(tl.where(near, first, second), shift), second, new


@triton.jit
def shift_out(grad, first, middle, shift, BM: tl.constexpr, BN: tl.constexpr):
    """The transposed map: adds dS (BM, BN) to the band; returns the block that is complete, and the open ones."""
    grad = rotate(grad, -shift)
    near = tl.arange(0, BN)[None, :] >= (shift % BN)[:, None]
    if BM > BN:
        far = (shift >= BN)[:, None]
        complete = first + tl.where(near & (far == 0), grad, 0.0)
        first = middle + tl.where(near == far, grad, 0.0)
        middle = tl.where(far & (near == 0), grad, 0.0)
    else:
        complete = first + tl.where(near, grad, 0.0)
        first = tl.where(near, 0.0, grad)
        middle = first
    return complete, first, middle


@triton.jit
def rel_product(
    position_query, rel_key, rel_key_p, start, rel_rows, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
    BC: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The product (BM, BN) of a tile of rows with rows start .. start+BN-1 of rel_key: one block of the band."""
    product = tl.zeros((BM, BN), tl.float32)
    if KEEP:
        for c in tl.static_range((D + BC - 1) // BC):
            tile_r = load_block(rel_key, rel_key_p, start, rel_rows, c, BN, D, BC)
            tile_q = row_chunk(position_query, c, D, BC, KEEP)
            product = tl.dot(tile_q, tl.trans(tile_r), acc=product, input_precision=PRECISION)
    else:
        for c in range((D + BC - 1) // BC):
            tile_r = load_block(rel_key, rel_key_p, start, rel_rows, c, BN, D, BC)
            tile_q = row_chunk(position_query, c, D, BC, False)
            product = tl.dot(tile_q, tl.trans(tile_r), acc=product, input_precision=PRECISION)
    return product


@triton.jit
def open_ring(
    position_query, rel_key, rel_key_p, start, rel_rows, shift, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
    BC: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The blocks `first` and `middle` before the first tile of keys."""
    first = rel_product(position_query, rel_key, rel_key_p, start, rel_rows, BM, BN, D, BC, KEEP, PRECISION)
    middle = first
    if BM > BN:
        start += BN
        middle = rel_product(position_query, rel_key, rel_key_p, start, rel_rows, BM, BN, D, BC, KEEP, PRECISION)
        first = tl.where((shift >= BN)[:, None], middle, first)
    return first, middle


@triton.jit
def block_of(shift, BN: tl.constexpr):
    """Which block each column of an unrotated tile (BM, BN) comes from, for positions too far apart for the ring."""
    near = tl.arange(0, BN)[None, :] >= (shift % BN)[:, None]
    return (shift // BN)[:, None] + tl.where(near, 0, 1)


@triton.jit
def shift_blocks(
    position_query, rel_key, rel_key_p, start, rel_rows, shift, spread, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, BC: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Position scores (BM, BN) of one tile without a ring: every block that one of the rows needs.

    `spread` is the distance between the tile's first and last position; NARROW promises that it is below max(BM, BN).
    """
    if NARROW:
        first, middle = open_ring(
            position_query, rel_key, rel_key_p, start, rel_rows, shift, BM, BN, D, BC, KEEP, PRECISION
        )
        start += tl.maximum(BM, BN)
        new = rel_product(position_query, rel_key, rel_key_p, start, rel_rows, BM, BN, D, BC, KEEP, PRECISION)
        score, _, _ = shift_in(first, middle, new, shift, BM, BN)
    else:
        block = block_of(shift, BN)
        score = tl.zeros((BM, BN), tl.float32)
        for index in range(0, spread // BN + 2):
            at = start + index * BN
            new = rel_product(position_query, rel_key, rel_key_p, at, rel_rows, BM, BN, D, BC, KEEP, PRECISION)
            score = tl.where(block == index, new, score)
        score = rotate(score, shift)
    return score
