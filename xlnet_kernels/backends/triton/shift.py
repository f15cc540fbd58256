"""Positions of a tile's rows, and the relative shift in registers.

A tile of rows whose last position is `last` needs, at its keys j0 .. j0 + BLOCK_N - 1, row
origin + j0 + shift[i] + c of rel_key, where shift[i] = last - position[i]. Products with whole blocks of BLOCK_N rows
of rel_key make a band. Every row takes its BLOCK_N columns from two neighbouring blocks: selected by `near`, put in
place by `rotate`. Where the positions of a tile are close (consecutive rows, or rows sorted by position), blocks are
carried from one tile of keys to the next. So each is multiplied only once: the ring.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import load_position, load_row, of_rows
from .operands import load_rel_key, row_chunk, rows_of_tile
from .shift_ptx import join_fragment, shift_back_folded, shift_blocks_in_ptx, shift_folded, split_fragment


class RowTile(NamedTuple):
    """Rows of a tile."""

    head: Any
    start: Any  # the first row, in the order of their positions
    row: Any  # (BLOCK_M,) index in the call
    position: Any  # (BLOCK_M,) in the segment
    inside: Any  # (BLOCK_M,) whether it exists
    first: Any  # the first position
    last: Any  # the last position
    shift: Any  # (BLOCK_M,) last - position, of columns
    origin: Any  # the tile's first row of rel_key at key 0


@triton.jit
def load_tile(positions, head, tile, size, META):
    """Load rows tile * BLOCK_M .. of a head, in the order of their positions."""
    n = tile * META.BLOCK_M + rows_of_tile(META)
    inside = n < size.length
    end = tl.minimum(tile * META.BLOCK_M + META.BLOCK_M, size.length) - 1
    if positions.position is None:
        row = n
        position = n
        first = tile * META.BLOCK_M
        last = end
        if META.FOLDED:  # as if the last tile were whole
            last = first + META.BLOCK_M - 1
    else:
        start = of_rows(head, size)
        row = load_row(positions, start + n, inside, size.length)
        position = load_position(positions, start + n, inside, size)
        first = load_position(positions, start + tile * META.BLOCK_M, True, size)
        last = load_position(positions, start + end, True, size)
    shift = tl.where(inside, last - position, 0)
    origin = size.max_distance - size.mem_len - last
    return RowTile(head, tile * META.BLOCK_M, row, position, inside, first, last, shift, origin)


@triton.jit
def is_narrow(positions, tile, META):
    """Whether a tile's positions are close enough for the ring."""
    if positions.position is None:
        return True
    else:
        return tile.last - tile.first < tl.maximum(META.BLOCK_M, META.BLOCK_N)


@triton.jit
def are_narrow(positions, head, span, size, META):
    """Whether `is_narrow` holds for every tile in a span of rows."""
    if positions.position is None:
        return True
    else:
        CHUNK: tl.constexpr = 64
        start = of_rows(head, size)
        widest = 0
        for chunk in range(span.begin, span.end, CHUNK * META.BLOCK_M):
            n = chunk + tl.arange(0, CHUNK) * META.BLOCK_M
            first = load_position(positions, start + n, n < span.end, size)
            last = load_position(positions, start + tl.minimum(n + META.BLOCK_M, size.length) - 1, n < span.end, size)
            widest = tl.maximum(widest, tl.max(last - first, 0))
        return widest < tl.maximum(META.BLOCK_M, META.BLOCK_N)


@triton.jit
def _swap(x, BIT: tl.constexpr):
    """Exchange of the columns of (BLOCK_M, BLOCK_N / 8, 8) whose indices differ in bit BIT."""
    pairs = tl.reshape(x.to(tl.int32, bitcast=True), (x.shape[0], x.shape[1] * 8 >> (BIT + 1), 2, 1 << BIT))
    pairs = tl.sum(pairs, 2, keep_dims=True) - pairs  # (a + b) - a = b modulo 2^32; the compiler simplifies it
    return tl.reshape(pairs, x.shape).to(tl.float32, bitcast=True)


@triton.jit
def _pairs_from(x, lane):
    """out[i, g, c] = x[i, g, 2 lane[i, c] + c % 2] for x (BLOCK_M, GROUPS, 8) and lane (BLOCK_M, 1, 8).

    This takes one shuffle for each element where a thread has the pairs of columns of one quarter of each group, as in
    a fragment.

    The compiler would move all of x for a gather. To avoid that, each register of a fragment becomes a separate tensor,
    which has one possible layout. As a gather of tensors it is correct in every layout.
    """
    GROUPS: tl.constexpr = x.shape[1]
    parts = split_fragment(x)
    lanes = split_fragment(lane)
    found = ()
    for i in tl.static_range(GROUPS * 4):
        found = found + (tl.gather(parts[i], lanes[i // GROUPS], 1),)
    return join_fragment(found, GROUPS)


@triton.jit
def _roll(x, BIT: tl.constexpr):
    """out[i, c] = x[i, (c + 2^BIT) % (8 GROUPS)] for x (BLOCK_M, GROUPS, 8).

    Groups are in registers, which are only renamed.
    """
    GROUPS: tl.constexpr = x.shape[1]
    group = tl.arange(0, GROUPS)[None, :, None]
    for k in tl.static_range(8):
        if (1 << k) < GROUPS * 8 and k >= BIT:
            # adding carries into bit k where all bits from BIT to k - 1 are set
            x = tl.where((group | ~((1 << k - 3) - (1 << BIT - 3))) == -1, _swap(x, k), x)
    return x


@triton.jit
def rotate(x, shift, QUADS: tl.constexpr):
    """out[i, c] = x[i, (c + shift[i]) % BLOCK_N] for float32 x (BLOCK_M, BLOCK_N).

    Columns rotate within groups of 8, then whole groups by the remaining bits: log2(BLOCK_N / 8) selections for each
    element. Groups are in registers. Of the three bits within a group one is in registers, and two are lanes of a
    tensor-core fragment.

    With QUADS the tile is such a fragment (see tuning.py's `in_quads`): columns are exchanged in pairs, then pairs are
    taken from their lanes, by one selection and one shuffle. Otherwise it is a butterfly: step k corrects bit k of the
    column. It exchanges columns that differ in just that bit where adding `shift` to the lower bits carries into it.
    This takes three selections, and in a fragment two shuffles.

    There is no shared memory and no barrier. Conditions have the shape (BLOCK_M, 1, 8): four in a thread for each step,
    for any number of groups.
    """
    BLOCK_M: tl.constexpr = x.shape[0]
    BLOCK_N: tl.constexpr = x.shape[1]
    x = tl.reshape(x, (BLOCK_M, BLOCK_N // 8, 8))
    column = tl.arange(0, 8)[None, None, :]
    shift = shift[:, None, None]
    if QUADS:
        x = tl.where((shift & 1) != 0, _swap(x, 0), x)
        x = _pairs_from(x, (column + shift >> 1) & 3)
    else:
        for k in tl.static_range(3):
            carried = (column & ((1 << k) - 1)) + shift
            x = tl.where((carried & (1 << k)) != 0, _swap(x, k), x)
    left = column + shift
    for k in tl.static_range(3, 8):
        if (1 << k) < BLOCK_N:
            x = tl.where((left & (1 << k)) != 0, _roll(x, k), x)
    return tl.reshape(x, (BLOCK_M, BLOCK_N))


@triton.jit
def shift_in(first, middle, new, shift, META):
    """Position scores (BLOCK_M, BLOCK_N) of one tile of keys, and the blocks `first` and `middle` of the next.

    `new` is the product with the furthest block. Rows of the upper half of a tile with BLOCK_M = 2 BLOCK_N are one
    block further.
    """
    if META.FOLDED:
        score, first = shift_folded(first, middle, new)
        return score, first, new
    if META.BLOCK_M > META.BLOCK_N:
        second = tl.where((shift >= META.BLOCK_N)[:, None], new, middle)
    else:
        second = new
    if META.SHIFT_PTX:
        score = shift_blocks_in_ptx(first, second, shift % META.BLOCK_N)
    else:
        near = tl.arange(0, META.BLOCK_N)[None, :] >= (shift % META.BLOCK_N)[:, None]
        score = rotate(tl.where(near, first, second), shift, META.QUADS)
    return score, second, new


@triton.jit
def shift_out(dS, first, middle, shift, META):
    """Transpose of `shift_in`: add dS (BLOCK_M, BLOCK_N) to the band; returns the complete block and the open ones.

    FOLDED: `first` is open, and `middle` is dS as given, to be added with that of the next tile of keys.
    """
    if META.FOLDED:
        complete, first = shift_back_folded(dS, middle, first)
        return complete, first, dS
    dS = rotate(dS, -shift, META.QUADS)
    near = tl.arange(0, META.BLOCK_N)[None, :] >= (shift % META.BLOCK_N)[:, None]
    if META.BLOCK_M > META.BLOCK_N:
        far = (shift >= META.BLOCK_N)[:, None]
        complete = first + tl.where(near & (far == 0), dS, 0.0)
        first = middle + tl.where(near == far, dS, 0.0)
        middle = tl.where(far & (near == 0), dS, 0.0)
    else:
        complete = first + tl.where(near, dS, 0.0)
        first = tl.where(near, 0.0, dS)
        middle = first
    return complete, first, middle


@triton.jit
def rel_product(position_query, rel_key, start, step, size, META, KEEP: tl.constexpr):
    """One block (BLOCK_M, BLOCK_N) of the band: a tile of rows times rows start .. start + BLOCK_N - 1 of rel_key."""
    head = position_query.head
    product = tl.zeros((META.BLOCK_M, META.BLOCK_N), tl.float32)
    if KEEP:
        for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
            tile_r = load_rel_key(rel_key, head, start, c, size, META)  # (BLOCK_N, BLOCK_D)
            tile_q = row_chunk(position_query, c, step, META, KEEP)  # (BLOCK_M, BLOCK_D)
            product = tl.dot(tile_q, tl.trans(tile_r), acc=product, input_precision=META.PRECISION)
    else:
        for c in range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
            tile_r = load_rel_key(rel_key, head, start, c, size, META)
            tile_q = row_chunk(position_query, c, step, META, False)
            product = tl.dot(tile_q, tl.trans(tile_r), acc=product, input_precision=META.PRECISION)
    return product


@triton.jit
def open_ring(position_query, tile, rel_key, start, step, size, META, KEEP: tl.constexpr):
    """The blocks `first` and `middle` (BLOCK_M, BLOCK_N) before the first tile of keys."""
    first = rel_product(position_query, rel_key, start, step, size, META, KEEP)
    middle = first
    if META.BLOCK_M > META.BLOCK_N:
        middle = rel_product(position_query, rel_key, start + META.BLOCK_N, step, size, META, KEEP)
        if META.FOLDED:
            _, first = shift_folded(first, first, middle)
        else:
            first = tl.where((tile.shift >= META.BLOCK_N)[:, None], middle, first)
    return first, middle


@triton.jit
def block_of(shift, META):
    """Source block of each column of an unrotated tile (BLOCK_M, BLOCK_N), for positions too far apart for the ring."""
    near = tl.arange(0, META.BLOCK_N)[None, :] >= (shift % META.BLOCK_N)[:, None]
    return (shift // META.BLOCK_N)[:, None] + tl.where(near, 0, 1)


@triton.jit
def blocks_of(tile, META):
    """Number of blocks needed by the rows of a tile at one tile of keys."""
    return (tile.last - tile.first) // META.BLOCK_N + 2


@triton.jit
def shift_blocks(
    position_query, tile, rel_key, j0, step, size, META, KEEP: tl.constexpr, NARROW: tl.constexpr
):  # fmt: skip
    """Position scores (BLOCK_M, BLOCK_N) of one tile without a ring, from all blocks needed by its rows.

    NARROW: see `is_narrow`.
    """
    start = tile.origin + j0
    if NARROW:
        first, middle = open_ring(position_query, tile, rel_key, start, step, size, META, KEEP)
        start += tl.maximum(META.BLOCK_M, META.BLOCK_N)
        new = rel_product(position_query, rel_key, start, step, size, META, KEEP)
        score, _, _ = shift_in(first, middle, new, tile.shift, META)
    else:
        block = block_of(tile.shift, META)
        score = tl.zeros((META.BLOCK_M, META.BLOCK_N), tl.float32)
        for index in range(0, blocks_of(tile, META)):
            new = rel_product(position_query, rel_key, start + index * META.BLOCK_N, step, size, META, KEEP)
            score = tl.where(block == index, new, score)
        score = rotate(score, tile.shift, META.QUADS)
    return score
