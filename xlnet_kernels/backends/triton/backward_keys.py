"""The backward kernel that visits the rows of each tile of keys: gradients of key and value, the memory's too.

It runs after backward_rows.py, which leaves delta = rowsum(dO * O) - dlse and both segment terms of each row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arguments import SIZES, Dropout, Mask, Sizes, head_at, of_head_rows, program
from .chunks import (
    KeyOperand,
    RowOperand,
    add_product,
    columns,
    keep_keys,
    keep_rows,
    key_chunk,
    row_chunk,
    store_keys,
    zeros,
)
from .mask import RowMask, load_row_mask, rank_range, row_bounds, span_of_rows, visibility
from .segments import add_segments, id_range, load_segment_scores
from .shift import are_narrow, load_tile, shift_blocks
from .softmax import LOG2_E, softmax_backward


@triton.jit
def _main_loop(
    rows, tile_k, tile_v, head, span, j0, rel_key, segments, mask, positions, dropout, backward, size, META,
    NARROW: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys in chunks (BLOCK_N, BLOCK_D), and colsum(dS) (BLOCK_N,)."""
    KEEP: tl.constexpr = META.KEEP
    acc_k = zeros(META.BLOCK_N, META)
    acc_v = zeros(META.BLOCK_N, META)
    column_sum = tl.zeros((META.BLOCK_M // 16, 8, META.BLOCK_N), tl.float32)  # in parts, each of them in one thread
    id_least, id_largest = id_range(segments, head, j0, size, META)
    rank_least, rank_largest = rank_range(mask, head, j0, size, META)
    for n0 in range(span.begin, span.end, META.BLOCK_M):
        # position
        tile = load_tile(positions, head, n0 // META.BLOCK_M, size, META)
        position_query = RowOperand((), rows.query, rows.position_bias, tile)  # (BLOCK_M, D)
        score = shift_blocks(position_query, rel_key, j0, 0, size, META, False, NARROW)  # (BLOCK_M, BLOCK_N)

        # content
        kept_content = keep_rows(rows.query, rows.content_bias, tile, META, KEEP)
        content_query = RowOperand(kept_content, rows.query, rows.content_bias, tile)  # (BLOCK_M, D)
        score = add_product(score, content_query, tile_k, 0, n0, size, META, KEEP, KEEP)

        # segments
        term = 0.0
        if segments.key_ids is not None:
            terms = load_segment_scores(segments, backward, tile, size)
            score, term = add_segments(score, terms, segments, head, id_least, id_largest, j0, size, META)

        # dP
        row = of_head_rows(head, size)
        lse = tl.load((backward.lse + row) + tile.row, mask=tile.inside, other=float("inf"))  # no such row: P = 0
        delta = tl.load((backward.delta + row) + tile.row, mask=tile.inside, other=0.0) * rows.scale
        kept_grad = keep_rows(backward.grad_out, None, tile, META, KEEP)
        grad_rows = RowOperand(kept_grad, backward.grad_out, None, tile)  # (BLOCK_M, D)
        dP = tl.zeros((META.BLOCK_M, META.BLOCK_N), tl.float32)
        dP = add_product(dP, grad_rows, tile_v, 0, n0, size, META, KEEP, KEEP)

        # mask, softmax, dropout
        rank, floor, own = load_row_mask(mask, tile, size)
        lowest_rank, highest_floor = row_bounds(backward, head, n0, size, META)
        row_mask = RowMask(rank, floor, own, lowest_rank, highest_floor)
        every, near = visibility(tile, row_mask, mask, rank_least, rank_largest, j0, size, META)
        base = term * (rows.scale * LOG2_E) - lse * LOG2_E
        dropped, dS = softmax_backward(
            score, base, dP, delta, rows.scale, dropout, tile, mask, row_mask, every, near, j0, size, META
        )

        # dV, dK
        dropped = tl.trans(dropped.to(backward.grad_out.data.dtype.element_ty))  # (BLOCK_N, BLOCK_M)
        narrowed = tl.trans(dS.to(rows.query.data.dtype.element_ty))
        sums_k = ()
        sums_v = ()
        for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
            chunk = row_chunk(grad_rows, c, 0, META, KEEP)  # (BLOCK_M, BLOCK_D)
            sums_v = sums_v + (tl.dot(dropped, chunk, acc=acc_v[c], input_precision=META.PRECISION),)
            chunk = row_chunk(content_query, c, 0, META, KEEP)
            sums_k = sums_k + (tl.dot(narrowed, chunk, acc=acc_k[c], input_precision=META.PRECISION),)
        acc_k = sums_k
        acc_v = sums_v
        column_sum += tl.sum(tl.reshape(dS, (META.BLOCK_M // 16, 2, 8, META.BLOCK_N)), 1)
    return acc_k, acc_v, tl.sum(tl.sum(column_sum, 0), 0)


@triton.jit(do_not_specialize=SIZES)
def keys_kernel(
    rows, keys, memory, rel_key, segments, rank_mask, dense_mask, positions, dropout, backward, result,
    heads, length, mem_len, key_len, rel_len, max_distance, threshold, META,
):  # fmt: skip
    """dK and dV, the memory's too, and what content_bias's gradient is made of. Program (tile, b * heads + h);
    arguments.py says what the tuples hold."""
    size = Sizes(heads, length, mem_len, mem_len + key_len, rel_len, max_distance)
    mask = Mask(rank_mask, dense_mask)
    dropout = Dropout(dropout.state, dropout.kept_scale, threshold)
    tiles = tl.cdiv(size.keys, META.BLOCK_N)
    number, index = program(tiles)
    head = head_at(index, size)
    j0 = number * META.BLOCK_N

    # load
    span = span_of_rows(positions, mask, head, j0, size, META)
    kept_k = keep_keys(memory.key, keys.key, head, j0, size, META, META.KEEP)
    tile_k = KeyOperand(kept_k, keys.key, memory.key, head, j0)  # (BLOCK_N, D)
    kept_v = keep_keys(memory.value, keys.value, head, j0, size, META, META.KEEP)
    tile_v = KeyOperand(kept_v, keys.value, memory.value, head, j0)  # (BLOCK_N, D)

    arguments = (
        rows, tile_k, tile_v, head, span, j0, rel_key, segments, mask, positions, dropout, backward, size,
    )  # fmt: skip
    if are_narrow(positions, head, span, size, META):
        acc_k, acc_v, column_sum = _main_loop(*arguments, META, True)
    else:
        acc_k, acc_v, column_sum = _main_loop(*arguments, META, False)

    # epilogue
    store_keys(result.memory_key, result.key, head, j0, acc_k, size, META)
    store_keys(result.memory_value, result.value, head, j0, acc_v, size, META)
    sums = result.sums + (head.index.to(tl.int64) * tiles + number) * META.HEAD_DIM
    for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
        d = columns(c, META)
        chunk = key_chunk(tile_k, c, 0, size, META, META.KEEP).to(tl.float32)  # (BLOCK_N, BLOCK_D)
        tl.store(sums + d, tl.sum(column_sum[:, None] * chunk, 0), mask=d < META.HEAD_DIM)
