"""Forward kernel: one pass over the keys of each tile of rows, online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from .arguments import SIZES, Dropout, Mask, Sizes, head_at, of_head_rows, program
from .compiler import computed_once, opaque
from .dropout import kept
from .mask import RowMask, hide, load_row_mask, rank_range, span_of_keys, visibility
from .operands import KeyOperand, add_product, columns, key_chunk, row_operand, scaled, zeros
from .segments import add_segments, id_range, load_row_segments
from .shift import is_narrow, load_tile, open_ring, rel_product, shift_blocks, shift_in
from .softmax import LARGEST_SUM, LOG2_E, UNSEEN, exponentials, fully_masked_or_nan, log_sum_exp, raised, residual_of


@triton.jit
def _main_loop(
    tile, content_query, position_query, terms, row_mask, span, keys, memory, rel_key, segments, mask, dropout,
    scale, size, META, RING: tl.constexpr,
):  # fmt: skip
    """The loop over the keys of a tile of rows.

    Returns row_max, row_sum, the sum of P rounded as in its product, and the sum of values in chunks (BLOCK_M,
    BLOCK_D).
    """
    KEEP: tl.constexpr = META.KEEP
    # Two tiles a step, to avoid moving the ring's blocks between registers, where there are registers enough.
    simple: tl.constexpr = mask.rank.sees_self is None and mask.rank.query_floor is None and mask.dense.data is None
    ordinary: tl.constexpr = memory.key.data is None and dropout.state is None and RING
    UNROLL: tl.constexpr = 2 if META.SHIFT_PTX and KEEP and META.HEAD_DIM <= 64 and simple and ordinary else 1
    row_max = tl.full((META.BLOCK_M,), UNSEEN, tl.float32)
    row_sum = tl.zeros((META.BLOCK_M,), tl.float32)
    acc = zeros(META.BLOCK_M, META)
    ROUNDED: tl.constexpr = keys.value.data.dtype.element_ty != tl.float32
    rounded_sum = tl.zeros((META.BLOCK_M, 16), tl.float32)  # equal columns; 16 is the least width of a product
    if RING:
        first, middle = open_ring(position_query, tile, rel_key, tile.origin + span.begin, 0, size, META, KEEP)
    for j0 in tl.range(span.begin, span.end, META.BLOCK_N, loop_unroll_factor=UNROLL):
        # position
        if RING:
            at = tile.origin + j0 + tl.maximum(META.BLOCK_M, META.BLOCK_N)
            new = rel_product(position_query, rel_key, at, j0, size, META, KEEP)  # (BLOCK_M, BLOCK_N)
            score, first, middle = shift_in(first, middle, new, opaque(tile.shift, j0), META)
        else:
            score = shift_blocks(position_query, tile, rel_key, j0, j0, size, META, KEEP, False)

        # content, segments
        # Before the product of content, because Triton 3.6 computes code right after a branch twice.
        if KEEP:
            id_least, id_largest = id_range(segments, tile.head, j0, size, META)
            score, term = add_segments(score, terms, segments, tile.head, id_least, id_largest, j0, size, META)
        tile_k = KeyOperand((), keys.key, memory.key, tile.head, j0)
        score = add_product(score, content_query, tile_k, j0, 0, size, META, KEEP, False)
        # Without branches, here and below, because scores that pass through them would be spilled.
        if not KEEP:
            score, term = add_segments(score, terms, segments, tile.head, 0, 1, j0, size, META)

        # mask
        every = False
        near = True
        if KEEP:
            rank_least, rank_largest = rank_range(mask, tile.head, j0, size, META)
            every, near = visibility(tile, row_mask, mask, rank_least, rank_largest, j0, size, META)
        score = hide(score, tile, row_mask, mask, every, near, j0, size, META)

        # softmax, dropout
        if META.LAZY:
            probability, sums = exponentials(score, term, row_max, scale)
            operand = probability.to(keys.value.data.dtype.element_ty)
            if tl.max(tl.where(sums <= LARGEST_SUM, 0, 1), 0) != 0:  # true for NaN
                row_max, correction, probability, sums = raised(score, term, row_max, scale)
                operand = probability.to(keys.value.data.dtype.element_ty)
                row_sum *= correction
                rounded_sum *= correction[:, None]
                acc = scaled(acc, correction)
        else:
            row_max, correction, probability, sums = raised(score, term, row_max, scale)
            operand = probability.to(keys.value.data.dtype.element_ty)
            row_sum *= correction
            rounded_sum *= correction[:, None]
            acc = scaled(acc, correction)
        if META.SHIFT_PTX and ROUNDED:
            operand = computed_once(operand)
        row_sum += sums
        # Normalised by its own sum, because P then gives a constant value exactly, on which delta depends.
        if ROUNDED:
            ones = tl.full((META.BLOCK_N, 16), 1.0, operand.dtype)
            rounded_sum = tl.dot(operand, ones, acc=rounded_sum)
        if dropout.state is not None:
            operand = tl.where(kept(dropout, tile, j0, META), operand, 0.0)

        # values
        tile_v = KeyOperand((), keys.value, memory.value, tile.head, j0)
        added = ()
        for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
            values = key_chunk(tile_v, c, 0, size, META, False)  # (BLOCK_N, BLOCK_D)
            added = added + (tl.dot(operand, values, acc=acc[c], input_precision=META.PRECISION),)
        acc = added
    return row_max, row_sum, tl.max(rounded_sum, 1) if ROUNDED else row_sum, acc


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    rows, keys, memory, rel_key, segments, rank_mask, dense_mask, positions, dropout, output,
    heads, length, mem_len, key_len, rel_len, max_distance, threshold, META,
):  # fmt: skip
    """The output, and rows' statistics for backward. Program (tile, b * heads + h); arguments.py has the tuples."""
    size = Sizes(heads, length, mem_len, mem_len + key_len, rel_len, max_distance)
    mask = Mask(rank_mask, dense_mask)
    dropout = Dropout(dropout.state, dropout.kept_scale, threshold)
    # Last rows first, because they see most keys under a causal mask.
    tiles = tl.cdiv(length, META.BLOCK_M)
    turn, index = program(tiles)
    head = head_at(index, size)

    # load
    tile = load_tile(positions, head, tiles - 1 - turn, size, META)
    rank, floor, own = load_row_mask(mask, tile, size)
    row_mask = RowMask(rank, floor, own, tl.min(rank, 0), tl.max(floor, 0))
    span = span_of_keys(tile, row_mask, mask, size, META)
    terms = load_row_segments(rows, segments, tile, size, META)
    # One of the two only, because wgmma has no registers for both
    content_query = row_operand(rows.content, tile, size, META, META.KEEP, META.IN_REGISTERS and not META.SHIFT_PTX)
    position_query = row_operand(rows.position, tile, size, META, META.KEEP, META.IN_REGISTERS)  # (BLOCK_M, D)

    arguments = (
        tile, content_query, position_query, terms, row_mask, span, keys, memory, rel_key, segments, mask,
        dropout, rows.scale * LOG2_E, size,
    )  # fmt: skip
    if is_narrow(positions, tile, META):
        row_max, row_sum, rounded_sum, acc = _main_loop(*arguments, META, True)
    else:
        row_max, row_sum, rounded_sum, acc = _main_loop(*arguments, META, False)

    # epilogue
    # Computed again, as all values below, because the main loop has no registers to keep them.
    turn, index = program(opaque(tiles, span.end))
    number = tiles - 1 - turn
    head = head_at(index, size)
    tile = load_tile(positions, head, number, size, META)
    terms = load_row_segments(rows, segments, tile, size, META)
    row = of_head_rows(head, size) + tile.row
    tl.store(output.lse + row, log_sum_exp(row_max, row_sum, terms.same * (rows.scale * LOG2_E)), mask=tile.inside)
    row_sum = fully_masked_or_nan(row_sum, positions, mask, head, number, span, size, META)
    tl.store(output.row_max + row, tl.where(row_max == UNSEEN, -float("inf"), row_max), mask=tile.inside)
    tl.store(output.row_sum + row, row_sum, mask=tile.inside)
    factor = tl.where(row_sum != 0, dropout.kept_scale / tl.where(row_sum == row_sum, rounded_sum, row_sum), 0.0)
    out_row = ((head.b * length + tile.row) * heads + head.h)[:, None] * META.HEAD_DIM
    for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
        d = columns(c, META)
        stored = tile.inside[:, None] & (d < META.HEAD_DIM)[None, :]
        chunk = tl.where((row_sum != 0)[:, None], acc[c] * factor[:, None], 0.0)  # (BLOCK_M, BLOCK_D); acc may be NaN
        rounded = chunk.to(output.out.dtype.element_ty)
        tl.store(output.out + (out_row + d[None, :]), rounded, mask=stored)
        if output.out_residual is not None:
            tl.store(output.out_residual + (out_row + d[None, :]), residual_of(chunk, rounded), mask=stored)
