"""Rows kernel of backward: gradients of query, rel_key and parameters, by a loop over keys for each tile of rows.

With ONE_PASS it also makes the sums over rows for the gradients of key and value.


The probabilities are recomputed from row_max and row_sum. With dP = dO V^T and delta = rowsum(dO * O) - dlse,
dS = P * (dP - delta) * scale; gradients are products of dS with the factors of the scores. O is the unrounded output,
because a rounding error would be common to a row of dS and add up in sums over rows.

The sum over rows of dQ, less its segment term, is the sum of both biases' gradients. postprocess.py subtracts that of
content_bias, so the gradient of position_bias includes a share of the other's rounding error. TF32 products have far
larger errors, so with them the position term has separate sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arguments import SIZES, Dropout, Mask, Sizes, head_at, of_head_rows, of_key_sums, program
from .atomics import add_atomically
from .compiler import opaque
from .mask import RowMask, load_row_mask, rank_range, span_of_keys, visibility
from .operands import (
    KeyOperand,
    SomeRows,
    add_bias,
    add_product,
    columns,
    keep_keys,
    key_chunk,
    load_query,
    load_rel_key,
    row_chunk,
    row_operand,
    zeros,
)
from .ordered_accumulation import END, OrderedAccumulation, pass_on, rel_sums, take_ticket, wait
from .segments import add_dS_different, add_segments, id_range, load_embedding, load_row_segments
from .shift import (
    block_of,
    blocks_of,
    is_narrow,
    load_tile,
    open_ring,
    rel_product,
    rotate,
    shift_blocks,
    shift_in,
    shift_out,
)
from .softmax import LOG2_E, load_statistics, softmax_backward


@triton.jit
def _add_rel_chunk(grad_rel, start, end, band, position_query, c, step, META, MASKED: tl.constexpr):
    """Add band^T (q + position_bias) to chunk c of rows start .. start + BLOCK_N - 1 of grad_rel.

    MASKED: only to rows from 0 to `end`.
    """
    tile_q = row_chunk(position_query, c, step, META, META.KEEP)  # (BLOCK_M, BLOCK_D)
    chunk = tl.dot(tl.trans(band), tile_q, input_precision=META.PRECISION)  # (BLOCK_N, BLOCK_D)
    sums = grad_rel.data + start * META.HEAD_DIM
    if MASKED:
        column = tl.arange(0, META.BLOCK_N)
        d = columns(c, META)
        mask = (column < end - start)[:, None] & (d < META.HEAD_DIM)[None, :]
        if META.BOUNDED_BEHIND:
            mask = mask & (column >= -start)[:, None]
        tl.atomic_add(sums + (column[:, None] * META.HEAD_DIM + d[None, :]), chunk, mask=mask, sem="relaxed")
    else:
        add_atomically(sums, chunk, c, META)


@triton.jit
def _add_band(grad_rel, grad_query, rel_key, start, end, band, position_query, step, size, META, MASKED: tl.constexpr):
    """Add one complete block of the band of dS (BLOCK_M, BLOCK_N) to grad_rel and to grad_query, which is returned.

    See _main_loop.
    """
    band = band.to(rel_key.data.dtype.element_ty)
    wait(grad_rel, start + META.BLOCK_N, META)
    if META.NEEDS_REL:
        if META.KEEP:
            for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
                _add_rel_chunk(grad_rel, start, end, band, position_query, c, step, META, MASKED)
        else:
            for c in range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
                _add_rel_chunk(grad_rel, start, end, band, position_query, c, step, META, MASKED)
    CHUNKS: tl.constexpr = (META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D
    sums = ()
    for c in tl.static_range(CHUNKS):
        tile_r = load_rel_key(rel_key, position_query.head, start, c, size, META)  # (BLOCK_N, BLOCK_D)
        sums = sums + (tl.dot(band, tile_r, acc=grad_query[c], input_precision=META.PRECISION),)
    if META.PRECISION == "tf32":
        column_sum = tl.sum(band, 0)  # (BLOCK_N,)
        for c in tl.static_range(CHUNKS):
            tile_r = load_rel_key(rel_key, position_query.head, start, c, size, META)
            sums = sums + (grad_query[CHUNKS + c] + tl.sum(column_sum[:, None] * tile_r, 0),)
    return sums


@triton.jit
def _add_far_blocks(grad_rel, acc, rel_key, start, dS, tile, position_query, size, META, MASKED: tl.constexpr):
    """Add dS of a tile with positions too far apart for the ring, block by block of its band: see _add_band."""
    dS = rotate(dS, -tile.shift, META.QUADS)
    block = block_of(tile.shift, META)
    # Beyond these blocks dS is 0, and grad_rel may have ended.
    blocks = tl.cdiv(size.rel_len - start, META.BLOCK_N)
    before = 0
    if META.BOUNDED_BEHIND:
        before = tl.maximum(-start, 0) // META.BLOCK_N
    for index in range(before, tl.minimum(blocks, blocks_of(tile, META))):
        band = tl.where(block == index, dS, 0.0)
        at = start + index * META.BLOCK_N
        acc = _add_band(grad_rel, acc, rel_key, at, size.rel_len, band, position_query, index, size, META, MASKED)
    return acc


@triton.jit
def _add_open_blocks(
    grad_rel, acc, rel_key, first_dS, middle_dS, tile, span, position_query, size, META, MASKED: tl.constexpr
):  # fmt: skip
    """Add the blocks that the ring leaves open after the last tile of keys: see _add_band."""
    start = tile.origin + span.begin + tl.cdiv(span.end - span.begin, META.BLOCK_N) * META.BLOCK_N
    # Bounded, because without any tile the open blocks are zero, at arbitrary rows.
    if META.BOUNDED_BEHIND or META.BOUNDED_AHEAD:
        start = tl.where(span.begin < span.end, start, 0)
    end = size.rel_len
    if META.FOLDED:
        nothing = tl.zeros((META.BLOCK_M, META.BLOCK_N), tl.float32)
        # A loop, to compile the shift and the products once
        for step in tl.range(2, num_stages=1):
            band, first_dS, middle_dS = shift_out(nothing, first_dS, middle_dS, tile.shift, META)
            at = start + step * META.BLOCK_N
            acc = _add_band(grad_rel, acc, rel_key, at, end, band, position_query, step, size, META, MASKED)
    else:
        acc = _add_band(grad_rel, acc, rel_key, start, end, first_dS, position_query, 0, size, META, MASKED)
        if META.BLOCK_M > META.BLOCK_N:
            start += META.BLOCK_N
            acc = _add_band(grad_rel, acc, rel_key, start, end, middle_dS, position_query, 0, size, META, MASKED)
    return acc


@triton.jit
def _add_to_keys(key_sums, head, j0, dropped, dS, content_query, grad_rows, size, META):
    """Add dK / scale, dV and colsum(dS) / scale of one tile (BLOCK_M, BLOCK_N) atomically.

    From P after dropout, and dS rounded as for dQ. Padding adds zeros.
    """
    at = of_key_sums(head, size) + j0
    dropped = tl.trans(dropped.to(dS.dtype))  # (BLOCK_N, BLOCK_M)
    dS = tl.trans(dS)
    for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
        chunk = tl.dot(dropped, row_chunk(grad_rows, c, j0, META, META.KEEP), input_precision=META.PRECISION)
        add_atomically(key_sums.value + at * META.HEAD_DIM, chunk, c, META)
        chunk = tl.dot(dS, row_chunk(content_query, c, j0, META, META.KEEP), input_precision=META.PRECISION)
        add_atomically(key_sums.key + at * META.HEAD_DIM, chunk, c, META)
    ones = tl.full((META.BLOCK_M, 16), 1.0, dS.dtype)
    column_sum = tl.max(tl.dot(dS, ones, input_precision=META.PRECISION), 1)
    tl.atomic_add((key_sums.column + at) + tl.arange(0, META.BLOCK_N), column_sum, sem="relaxed")


@triton.jit
def _main_loop(
    tile, content_query, position_query, grad_rows, terms, row_mask, span, statistics, grad_rel, key_sums, keys, memory,
    rel_key, segments, mask, dropout, scale, size, META, RING: tl.constexpr,
):  # fmt: skip
    """The loop over keys of a tile of rows: acc, and rowsum(dS) / scale (BLOCK_M,) over keys of other segments.

    acc: dQ / scale less the segment term, in chunks (BLOCK_M, BLOCK_D). With META.PRECISION "tf32" as many chunks
    (BLOCK_D,) follow: the sums over rows of its position term.
    """
    KEEP: tl.constexpr = META.KEEP
    CHUNKS: tl.constexpr = (META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D
    # Masked although grad_rel has room for whole blocks, because otherwise the compiler unrolls a loop over chunks
    MASKED: tl.constexpr = not META.KEEP
    acc = zeros(META.BLOCK_M, META)
    if META.PRECISION == "tf32":
        for _ in tl.static_range(CHUNKS):
            acc = acc + (tl.zeros((META.BLOCK_D,), tl.float32),)
    dS_different = tl.zeros((META.BLOCK_M,), tl.float32)
    if RING:
        first, middle = open_ring(position_query, tile, rel_key, tile.origin + span.begin, 0, size, META, KEEP)
        first_dS = tl.zeros((META.BLOCK_M, META.BLOCK_N), tl.float32)
        middle_dS = tl.zeros((META.BLOCK_M, META.BLOCK_N), tl.float32)
    for j0 in range(span.begin, span.end, META.BLOCK_N):
        # position
        if RING:
            at = tile.origin + j0 + tl.maximum(META.BLOCK_M, META.BLOCK_N)
            new = rel_product(position_query, rel_key, at, j0, size, META, KEEP)  # (BLOCK_M, BLOCK_N)
            score, first, middle = shift_in(first, middle, new, opaque(tile.shift, j0), META)
        else:
            score = shift_blocks(position_query, tile, rel_key, j0, j0, size, META, KEEP, False)

        # content, segments: in forward's order
        kept_k = keep_keys(memory.key, keys.key, tile.head, j0, size, META, KEEP)
        tile_k = KeyOperand(kept_k, keys.key, memory.key, tile.head, j0)  # (BLOCK_N, D)
        id_least, id_largest = id_range(segments, tile.head, j0, size, META)
        if KEEP:
            score, term = add_segments(score, terms, segments, tile.head, id_least, id_largest, j0, size, META)
        score = add_product(score, content_query, tile_k, j0, 0, size, META, KEEP, KEEP)
        if not KEEP:
            score, term = add_segments(score, terms, segments, tile.head, id_least, id_largest, j0, size, META)

        # dP
        tile_v = KeyOperand((), keys.value, memory.value, tile.head, j0)  # (BLOCK_N, D)
        dP = tl.zeros((META.BLOCK_M, META.BLOCK_N), tl.float32)
        dP = add_product(dP, grad_rows, tile_v, j0, 0, size, META, KEEP, False)

        # mask, softmax, dropout
        every = False
        near = True
        # Only with KEEP, because otherwise scores that pass through branches cost hundreds of spills.
        if KEEP:
            rank_least, rank_largest = rank_range(mask, tile.head, j0, size, META)
            every, near = visibility(tile, row_mask, mask, rank_least, rank_largest, j0, size, META)
        dropped, dS = softmax_backward(
            score, term, dP, statistics, scale * LOG2_E, dropout, tile, mask, row_mask, every, near, j0, size, META
        )  # fmt: skip

        # dQ, the band of dS
        dS_different = add_dS_different(
            dS_different, dS, terms.ids, segments, tile.head, id_least, id_largest, j0, size, META
        )
        narrowed = dS.to(keys.key.data.dtype.element_ty)
        sums = ()
        for c in tl.static_range(CHUNKS):
            chunk = key_chunk(tile_k, c, 0, size, META, KEEP)
            sums = sums + (tl.dot(narrowed, chunk, acc=acc[c], input_precision=META.PRECISION),)
        if META.PRECISION == "tf32":
            for c in tl.static_range(CHUNKS):
                sums = sums + (acc[CHUNKS + c],)
        acc = sums
        if META.ONE_PASS:
            _add_to_keys(key_sums, tile.head, j0, dropped, narrowed, content_query, grad_rows, size, META)
        start = tile.origin + j0
        if RING:
            # Opaque, because keeping the conditions from above would cost more than computing them again
            shift = opaque(tile.shift, span.end - j0)
            band, first_dS, middle_dS = shift_out(dS, first_dS, middle_dS, shift, META)
            acc = _add_band(grad_rel, acc, rel_key, start, size.rel_len, band, position_query, j0, size, META, MASKED)
        else:
            acc = _add_far_blocks(grad_rel, acc, rel_key, start, dS, tile, position_query, size, META, MASKED)
        pass_on(grad_rel, start + META.BLOCK_N, META)
    if RING:
        acc = _add_open_blocks(
            grad_rel, acc, rel_key, first_dS, middle_dS, tile, span, position_query, size, META, MASKED
        )
    wait(grad_rel, END, META)
    pass_on(grad_rel, END, META)
    return acc, dS_different


@triton.jit
def _store_gradients(result, rows, segments, tile, alive, sums_row, out_row, acc, dS_same, dS_different, size, META):
    """Store dQ with its segment term, and the sums over a tile's rows; acc and dS are unscaled."""
    D: tl.constexpr = META.HEAD_DIM
    CHUNKS: tl.constexpr = (D + META.BLOCK_D - 1) // META.BLOCK_D
    dS_same *= rows.scale
    dS_different *= rows.scale
    for c in tl.static_range(CHUNKS):
        d = columns(c, META)
        total = tl.where(alive.inside[:, None], acc[c] * rows.scale, 0.0)  # (BLOCK_M, BLOCK_D); other rows may be NaN
        sums = result.sums + sums_row * 4 * D + d
        if META.PRECISION == "tf32":
            tl.store(sums, acc[CHUNKS + c] * rows.scale, mask=d < D)
        else:
            tl.store(sums, tl.sum(total, 0), mask=d < D)
        if segments.key_ids is not None:
            biased = add_bias(load_query(rows, alive, c, META), segments.bias, alive, c, META).to(tl.float32)
            term = dS_same[:, None] * load_embedding(segments, tile.head, 0, c, size, META)[None, :]
            term += dS_different[:, None] * load_embedding(segments, tile.head, 1, c, size, META)[None, :]
            tl.store(sums + D, tl.sum(dS_same[:, None] * biased, 0), mask=d < D)
            tl.store(sums + 2 * D, tl.sum(dS_different[:, None] * biased, 0), mask=d < D)
            tl.store(sums + 3 * D, tl.sum(term, 0), mask=d < D)
            total += term
        pointer = result.query + out_row[:, None] * D + d[None, :]
        tl.store(pointer, total.to(result.query.dtype.element_ty), mask=tile.inside[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=[*SIZES, "groups", "run", "copies"])
def rows_kernel(
    rows, keys, memory, rel_key, segments, rank_mask, dense_mask, positions, dropout, given, backward, result, key_sums,
    heads, length, mem_len, key_len, rel_len, max_distance, threshold, groups, run, copies, META,
):  # fmt: skip
    """dQ, drel_key and the sums for the biases' gradients. Program (tile, b * heads + h); arguments.py has the tuples.

    The gradient of rel_key is accumulated in any order, or with ORDERED in a fixed order.
    """
    size = Sizes(heads, length, mem_len, mem_len + key_len, rel_len, max_distance)
    mask = Mask(rank_mask, dense_mask)
    dropout = Dropout(dropout.state, dropout.kept_scale, threshold)
    tiles = tl.cdiv(length, META.BLOCK_M)
    order = OrderedAccumulation(groups, run, copies)
    if META.ORDERED and META.NEEDS_REL:
        ticket = take_ticket(result.rel_key, order, rel_len, META)
        first, index = ticket % tiles, ticket // tiles
    else:
        first, index = program(tiles)
        # Last tiles first, because with a causal mask they are the longest.
        first = tiles - 1 - first
    head = head_at(index, size)
    # A loop of one step (see compiler.py), because without it ptxas spills thousands of words.
    for number in range(first, first + 1):
        grad_rel = rel_sums(result.rel_key, order, index, number, tiles, rel_len, META)

        # load
        tile = load_tile(positions, head, number, size, META)
        rank, floor, own = load_row_mask(mask, tile, size)
        row_mask = RowMask(rank, floor, own, tl.min(rank, 0), tl.max(floor, 0))
        span = span_of_keys(tile, row_mask, mask, size, META)
        terms = load_row_segments(rows, segments, tile, size, META)
        content_query = row_operand(rows.content, tile, size, META, META.KEEP)  # (BLOCK_M, D)
        position_query = row_operand(rows.position, tile, size, META, META.KEEP)  # (BLOCK_M, D)
        grad_rows = row_operand(backward.grad_out, tile, size, META, META.KEEP)  # (BLOCK_M, D)
        statistics = load_statistics(backward, tile, size, META)

        arguments = (
            tile, content_query, position_query, grad_rows, terms, row_mask, span, statistics, grad_rel, key_sums,
            keys, memory, rel_key, segments, mask, dropout, rows.scale, size,
        )  # fmt: skip
        if is_narrow(positions, tile, META):
            acc, dS_different = _main_loop(*arguments, META, True)
        else:
            acc, dS_different = _main_loop(*arguments, META, False)

        # epilogue
        sums_row = head.index.to(tl.int64) * tiles + number
        out_row = (head.b * length + tile.row) * heads + head.h
        # Because other rows may hold NaN.
        alive = SomeRows(head, tile.start, tile.row, statistics.inverse != 0)
        dS_same = -dS_different
        if given.grad_lse is not None:  # the sum of a row of dS
            row = of_head_rows(head, size) + tile.row
            dS_same += tl.load(given.grad_lse + row, mask=alive.inside, other=0.0)
        _store_gradients(result, rows, segments, tile, alive, sums_row, out_row, acc, dS_same, dS_different, size, META)
