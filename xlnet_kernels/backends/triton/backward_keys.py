"""The backward kernel that walks the rows of each tile of keys: gradients of key and value, the memory's too.

It runs after backward_rows.py, which leaves delta = rowsum(dO * O) - dlse.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunks import add_product, in_loop_keys, keep_keys, keep_rows, key_chunk, row_chunk, store_keys, zeros
from .shift import shift_blocks
from .tiles import (
    BLOCK,
    LOG2_E,
    SIZES,
    add_segments,
    all_seen,
    is_near,
    load_positions,
    load_row_masks,
    program,
    range_of,
    score_gradients,
    span_of_rows,
    widest_tile,
)


@triton.jit
def _walk_rows(
    query, rel_key, grad_out, tile_k, tile_v, content_bias, position_bias, query_ids, key_ids, query_rank, key_rank,
    row_rank_least, query_floor, row_floor_largest, sees_self, mask, positions, order, dropout_state, lse, delta, kinds,
    query_l, rel_key_p, grad_out_l, mask_l, mask_k, head, h, id_low, id_high, rank_low, rank_high, j0, begin, end, rows,
    mem_len, keys, rel_rows, max_distance, threshold, scale, kept_scale, D: tl.constexpr, BC: tl.constexpr,
    KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, and colsum(dS)."""
    acc_k = zeros(BN, D, BC)
    acc_v = zeros(BN, D, BC)
    column_sum = tl.zeros((BM // 16, 8, BN), tl.float32)  # in parts, each of them in one thread
    for n0 in range(begin, end, BM):
        row, position, inside, first, last = load_positions(positions, order, n0 // BM, rows, BM)
        shift = tl.where(inside, last - position, 0)
        content_query = keep_rows(query, row, query_l, inside, content_bias, h, D, BC, KEEP)
        position_query = keep_rows(query, row, query_l, inside, position_bias, h, D, BC, False)
        score = shift_blocks(
            position_query, rel_key, rel_key_p, max_distance - mem_len - last + j0, rel_rows, shift, last - first, BM,
            BN, D, BC, False, PRECISION, NARROW,
        )  # fmt: skip
        score = add_product(score, content_query, in_loop_keys(tile_k, n0, KEEP), BN, D, BC, KEEP, KEEP, PRECISION)
        term = 0.0
        if key_ids is not None:
            ids = tl.load(query_ids + row, mask=inside, other=0)
            same = tl.load(kinds + row, mask=inside, other=0.0)
            different = tl.load(kinds + (rows + row), mask=inside, other=0.0)
            score, term = add_segments(score, ids, same, different, key_ids, id_low, id_high, j0, BN)
        # rows that do not exist: P = 0
        base = term * (scale * LOG2_E) - tl.load(lse + row, mask=inside, other=float("inf")) * LOG2_E
        delta_row = tl.load(delta + row, mask=inside, other=0.0) * scale
        grad_rows = keep_rows(grad_out, row, grad_out_l, inside, None, h, D, BC, KEEP)
        grad = tl.zeros((BM, BN), tl.float32)
        grad = add_product(grad, grad_rows, in_loop_keys(tile_v, n0, KEEP), BN, D, BC, KEEP, KEEP, PRECISION)
        rank, floor, own = load_row_masks(query_rank, query_floor, sees_self, row, inside)
        lowest_rank, _ = range_of(row_rank_least, row_rank_least, n0, BM)
        _, highest_floor = range_of(row_floor_largest, row_floor_largest, n0, BM)
        every = all_seen(
            first, lowest_rank, highest_floor, j0, rank_low, rank_high, keys, mem_len, key_rank, query_floor, mask, BN,
            CAUSAL,
        )  # fmt: skip
        near = is_near(first, last, j0, mem_len, sees_self, BN, CAUSAL)
        dropped, grad = score_gradients(
            score, base, delta_row, grad, scale, kept_scale, dropout_state, head, threshold, every, near, row, inside,
            position, j0, keys, mem_len, rank, floor, own, key_rank, query_floor, sees_self, mask, mask_l, mask_k, BM,
            BN, CAUSAL,
        )  # fmt: skip
        dropped = tl.trans(dropped.to(grad_out.dtype.element_ty))
        narrowed = tl.trans(grad.to(query.dtype.element_ty))
        sums_k = ()
        sums_v = ()
        for c in tl.static_range((D + BC - 1) // BC):
            grad_tile = row_chunk(grad_rows, c, D, BC, KEEP)
            sums_v = sums_v + (tl.dot(dropped, grad_tile, acc=acc_v[c], input_precision=PRECISION),)
            query_tile = row_chunk(content_query, c, D, BC, KEEP)
            sums_k = sums_k + (tl.dot(narrowed, query_tile, acc=acc_k[c], input_precision=PRECISION),)
        acc_k = sums_k
        acc_v = sums_v
        column_sum += tl.sum(tl.reshape(grad, (BM // 16, 2, 8, BN)), 1)
    return acc_k, acc_v, tl.sum(tl.sum(column_sum, 0), 0)


@triton.jit(do_not_specialize=SIZES)
def keys_kernel(
    query, key, value, rel_key, content_bias, position_bias, memory_key, memory_value, segment_embed, segment_bias,
    query_ids, key_ids, id_least, id_largest, query_rank, key_rank, rank_least, rank_largest, query_floor, sees_self,
    mask, positions, order, dropout_state,
    row_rank_least, row_floor_largest,  # (B, blocks) int32: of every BLOCK rows, sorted by position
    lse, grad_out, delta, kinds,
    grad_key, grad_value,  # (B, K, H, D)
    grad_memory_key, grad_memory_value,  # (B, M, H, D)
    key_sums,  # (B * H, tiles, D) float32: over the tile's keys, of colsum(dS) k
    query_b, query_h, query_l, key_b, key_h, key_l, value_b, value_h, value_l, rel_key_b, rel_key_h, rel_key_p,
    memory_key_b, memory_key_h, memory_key_l, memory_value_b, memory_value_h, memory_value_l,
    mask_b, mask_h, mask_l, mask_k, grad_out_b, grad_out_h, grad_out_l,
    heads, rows, mem_len, keys, padded_keys, rel_rows, max_distance, threshold, scale, kept_scale,
    D: tl.constexpr, BC: tl.constexpr, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv, the memory's too, and what content_bias's gradient is made of. Program (tile, b * heads + h)."""
    tiles = tl.cdiv(keys, BN)
    tile, head = program(tiles)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    j0 = tile * BN
    query += b * query_b + h * query_h
    grad_out += b * grad_out_b + h * grad_out_h
    rel_key += b * rel_key_b + h * rel_key_h
    key += b * key_b + h * key_h
    value += b * value_b + h * value_h
    if memory_key is not None:
        memory_key += b * memory_key_b + h * memory_key_h
        memory_value += b * memory_value_b + h * memory_value_h
        memory_offset = b * mem_len * heads * D + h * D
        grad_memory_key += memory_offset
        grad_memory_value += memory_offset
    blocks = b * (padded_keys // BLOCK)
    row_blocks = b * tl.cdiv(rows, BLOCK)
    if key_ids is not None:
        key_ids += b * padded_keys
        id_least += blocks
        id_largest += blocks
        query_ids += b * rows
        kinds += head.to(tl.int64) * 2 * rows
    if query_rank is not None:
        key_rank += b * padded_keys
        rank_least += blocks
        rank_largest += blocks
        query_rank += b * rows
        row_rank_least += row_blocks
    if query_floor is not None:
        query_floor += b * rows
        row_floor_largest += row_blocks
    if sees_self is not None:
        sees_self += b * rows
    if mask is not None:
        mask += b * mask_b + h * mask_h
    if positions is not None:
        positions += b * rows
        order += b * rows
    begin, end = span_of_rows(
        query_rank, query_floor, sees_self, positions, order, key_rank, j0, rows, keys, mem_len, BM, BN, CAUSAL
    )
    tile_k = keep_keys(memory_key, memory_key_l, key, key_l, j0, mem_len, keys, BN, D, BC, KEEP)
    tile_v = keep_keys(memory_value, memory_value_l, value, value_l, j0, mem_len, keys, BN, D, BC, KEEP)
    lse += head.to(tl.int64) * rows
    delta += head.to(tl.int64) * rows
    if positions is None:
        narrow = True
    else:
        narrow = widest_tile(positions, begin, end, rows, BM) < tl.maximum(BM, BN)
    id_low, id_high = range_of(id_least, id_largest, j0, BN)
    rank_low, rank_high = range_of(rank_least, rank_largest, j0, BN)
    arguments = (
        query, rel_key, grad_out, tile_k, tile_v, content_bias, position_bias, query_ids, key_ids, query_rank, key_rank,
        row_rank_least, query_floor, row_floor_largest, sees_self, mask, positions, order, dropout_state, lse, delta,
        kinds, query_l, rel_key_p, grad_out_l, mask_l, mask_k, head, h, id_low, id_high, rank_low, rank_high, j0, begin,
        end, rows, mem_len, keys, rel_rows, max_distance, threshold, scale, kept_scale,
    )  # fmt: skip
    if narrow:
        acc_k, acc_v, column_sum = _walk_rows(*arguments, D, BC, KEEP, BM, BN, CAUSAL, PRECISION, True)
    else:
        acc_k, acc_v, column_sum = _walk_rows(*arguments, D, BC, KEEP, BM, BN, CAUSAL, PRECISION, False)

    current_offset = b * (keys - mem_len) * heads * D + h * D
    stride = heads * D
    store_keys(grad_memory_key, stride, grad_key + current_offset, stride, j0, mem_len, keys, acc_k, BN, D, BC)
    store_keys(grad_memory_value, stride, grad_value + current_offset, stride, j0, mem_len, keys, acc_v, BN, D, BC)
    key_sums += (head.to(tl.int64) * tiles + tile) * D
    for c in tl.static_range((D + BC - 1) // BC):
        d = c * BC + tl.arange(0, BC)
        tile = key_chunk(tile_k, c, BN, D, BC, KEEP).to(tl.float32)
        tl.store(key_sums + d, tl.sum(column_sum[:, None] * tile, 0), mask=d < D)
