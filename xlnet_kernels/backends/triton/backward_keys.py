"""Keys kernel of backward: gradients of key and value, memory included, by a loop over rows for each tile of keys.

With ONE_PASS the rows kernel makes the sums, and this kernel rounds them.


Rows and their statistics are results of preprocess.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arguments import SIZES, Dropout, Mask, Sizes, head_at, of_key_sums, program
from .compiler import opaque
from .mask import RowMask, load_row_mask, rank_range, row_bounds, span_of_rows, visibility
from .operands import (
    KeyOperand,
    add_product,
    columns,
    keep_keys,
    load_keys,
    row_chunk,
    row_operand,
    store_keys,
    zeros,
)
from .segments import add_segments, id_range, load_row_segments
from .shift import are_narrow, load_tile, shift_blocks
from .softmax import LOG2_E, load_statistics, softmax_backward


@triton.jit
def _main_loop(
    rows, keys, memory, head, span, j0, rel_key, segments, mask, positions, dropout, backward, size, META,
    NARROW: tl.constexpr,
):  # fmt: skip
    """dK / scale and dV of a tile of keys in chunks (BLOCK_N, BLOCK_D), and colsum(dS) / scale (BLOCK_N,)."""
    KEEP: tl.constexpr = META.KEEP
    kept_k = keep_keys(memory.key, keys.key, head, j0, size, META, KEEP)
    tile_k = KeyOperand(kept_k, keys.key, memory.key, head, j0)  # (BLOCK_N, D)
    kept_v = keep_keys(memory.value, keys.value, head, j0, size, META, KEEP)
    tile_v = KeyOperand(kept_v, keys.value, memory.value, head, j0)  # (BLOCK_N, D)
    acc_k = zeros(META.BLOCK_N, META)
    acc_v = zeros(META.BLOCK_N, META)
    if KEEP:
        column_sum = tl.zeros((META.BLOCK_N, 16), tl.float32)  # equal columns; 16 is the least width of a product
    else:
        column_sum = tl.zeros((META.BLOCK_M // 16, 8, META.BLOCK_N), tl.float32)  # in parts, each of them in one thread
    id_least, id_largest = id_range(segments, head, j0, size, META)
    rank_least, rank_largest = rank_range(mask, head, j0, size, META)
    for n0 in range(span.begin, span.end, META.BLOCK_M):
        # position
        tile = load_tile(positions, head, n0 // META.BLOCK_M, size, META)
        position_query = row_operand(rows.position, tile, size, META, False)  # (BLOCK_M, D)
        score = shift_blocks(position_query, tile, rel_key, j0, 0, size, META, False, NARROW)  # (BLOCK_M, BLOCK_N)

        # content, segments: in forward's order
        content_query = row_operand(rows.content, tile, size, META, KEEP)  # (BLOCK_M, D)
        terms = load_row_segments(rows, segments, tile, size, META)
        if KEEP:
            score, term = add_segments(score, terms, segments, head, id_least, id_largest, j0, size, META)
        score = add_product(score, content_query, tile_k, 0, n0, size, META, KEEP, KEEP)
        if not KEEP:
            score, term = add_segments(score, terms, segments, head, id_least, id_largest, j0, size, META)

        # dP
        statistics = load_statistics(backward, tile, size, META)
        grad_rows = row_operand(backward.grad_out, tile, size, META, KEEP)  # (BLOCK_M, D)
        dP = tl.zeros((META.BLOCK_M, META.BLOCK_N), tl.float32)
        dP = add_product(dP, grad_rows, tile_v, 0, n0, size, META, KEEP, KEEP)

        # mask, softmax, dropout
        rank, floor, own = load_row_mask(mask, tile, size)
        lowest_rank, highest_floor = row_bounds(backward, head, n0, size, META)
        row_mask = RowMask(rank, floor, own, lowest_rank, highest_floor)
        every, near = visibility(tile, row_mask, mask, rank_least, rank_largest, j0, size, META)
        dropped, dS = softmax_backward(
            score, term, dP, statistics, rows.scale * LOG2_E, dropout, tile, mask, row_mask, every, near, j0, size, META
        )  # fmt: skip

        # dV, dK
        dropped = tl.trans(dropped.to(backward.grad_out.dtype.element_ty))  # (BLOCK_N, BLOCK_M)
        rounded = dS.to(rows.query.data.dtype.element_ty)
        narrowed = tl.trans(rounded)
        sums_k = ()
        sums_v = ()
        for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
            chunk = row_chunk(grad_rows, c, 0, META, KEEP)  # (BLOCK_M, BLOCK_D)
            sums_v = sums_v + (tl.dot(dropped, chunk, acc=acc_v[c], input_precision=META.PRECISION),)
            chunk = row_chunk(content_query, c, 0, META, KEEP)
            sums_k = sums_k + (tl.dot(narrowed, chunk, acc=acc_k[c], input_precision=META.PRECISION),)
        acc_k = sums_k
        acc_v = sums_v
        # Rounded like dQ's dS, because position_bias's gradient is the difference of sums of both.
        if KEEP:
            ones = tl.full((META.BLOCK_M, 16), 1.0, narrowed.dtype)
            column_sum = tl.dot(narrowed, ones, acc=column_sum, input_precision=META.PRECISION)
        else:
            parts = tl.reshape(rounded.to(tl.float32), (META.BLOCK_M // 16, 2, 8, META.BLOCK_N))
            column_sum += tl.sum(parts, 1)
    if KEEP:
        column_sum = tl.max(column_sum, 1)
    else:
        column_sum = tl.sum(tl.sum(column_sum, 0), 0)
    return acc_k, acc_v, column_sum


@triton.jit
def _load_sums(key_sums, head, j0, size, META):
    """The results of `_main_loop` from the sums of one pass."""
    at = of_key_sums(head, size) + j0
    column = tl.arange(0, META.BLOCK_N)
    acc_k = ()
    acc_v = ()
    for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
        d = columns(c, META)
        offset = column[:, None] * META.HEAD_DIM + d[None, :]
        mask = (d < META.HEAD_DIM)[None, :]
        acc_k = acc_k + (tl.load((key_sums.key + at * META.HEAD_DIM) + offset, mask=mask, other=0.0),)
        acc_v = acc_v + (tl.load((key_sums.value + at * META.HEAD_DIM) + offset, mask=mask, other=0.0),)
    return acc_k, acc_v, tl.load((key_sums.column + at) + column)


@triton.jit(do_not_specialize=SIZES)
def keys_kernel(
    rows, keys, memory, rel_key, segments, rank_mask, dense_mask, positions, dropout, backward, result, key_sums,
    heads, length, mem_len, key_len, rel_len, max_distance, threshold, META,
):  # fmt: skip
    """dK and dV, memory included, and the sums for content_bias's gradient.

    Program (tile, b * heads + h); arguments.py has the tuples.
    """
    size = Sizes(heads, length, mem_len, mem_len + key_len, rel_len, max_distance)
    mask = Mask(rank_mask, dense_mask)
    dropout = Dropout(dropout.state, dropout.kept_scale, threshold)
    tiles = tl.cdiv(size.keys, META.BLOCK_N)
    number, index = program(tiles)
    head = head_at(index, size)
    j0 = number * META.BLOCK_N

    # load
    if META.ONE_PASS:
        acc_k, acc_v, column_sum = _load_sums(key_sums, head, j0, size, META)
    else:
        span = span_of_rows(positions, mask, backward, head, j0, size, META)
        arguments = (
            rows, keys, memory, head, span, j0, rel_key, segments, mask, positions, dropout, backward, size,
        )  # fmt: skip
        if are_narrow(positions, head, span, size, META):
            acc_k, acc_v, column_sum = _main_loop(*arguments, META, True)
        else:
            acc_k, acc_v, column_sum = _main_loop(*arguments, META, False)
        # Opaque, to load keys again below, because the main loop has no registers to spare.
        j0 = opaque(j0, span.end)

    # epilogue
    store_keys(result.memory_key, result.key, head, j0, acc_k, rows.scale, size, META)
    store_keys(result.memory_value, result.value, head, j0, acc_v, 1.0, size, META)
    sums = result.sums + (head.index.to(tl.int64) * tiles + number) * META.HEAD_DIM
    for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
        d = columns(c, META)
        chunk = load_keys(memory.key, keys.key, head, j0, c, size, META).to(tl.float32)  # (BLOCK_N, BLOCK_D)
        tl.store(sums + d, tl.sum(column_sum[:, None] * chunk, 0) * rows.scale, mask=d < META.HEAD_DIM)
