"""The backward kernel that walks the rows of each tile of keys: gradients of key and value, the memory's too.

It runs after backward_rows.py, which leaves delta = rowsum(dO * O) - dlse.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .shift import shift_blocks
from .tiles import (
    LOG2_E,
    SIZES,
    add_bias,
    add_content,
    load_keys,
    load_positions,
    load_row_masks,
    load_rows,
    load_segments,
    score_gradients,
    span_of_rows,
    store_keys,
    visible,
    widest_tile,
)


@triton.jit
def _walk_rows(
    query, rel_key, grad_out, tile_k, tile_v, content_bias, position_bias, segment_embed, segment_bias, query_ids,
    key_ids, query_rank, key_rank, query_floor, sees_self, mask, positions, order, dropout_state, lse, delta, query_l,
    rel_key_p, grad_out_l, mask_l, mask_k, head, h, heads, j0, begin, end, rows, mem_len, keys, rel_rows, max_distance,
    threshold, scale, kept_scale, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, and colsum(dS)."""
    acc_k = tl.zeros((BN, BD), tl.float32)
    acc_v = tl.zeros((BN, BD), tl.float32)
    column_sum = tl.zeros((BN,), tl.float32)
    for n0 in range(begin, end, BM):
        row, position, inside, first, last = load_positions(positions, order, n0 // BM, rows, BM)
        shift = tl.where(inside, last - position, 0)
        query_tile = load_rows(query, row, query_l, inside, D, BD)
        content_query = add_bias(query_tile, content_bias, h, D, BD)
        position_query = add_bias(query_tile, position_bias, h, D, BD)
        score = shift_blocks(
            position_query, rel_key, rel_key_p, max_distance - mem_len - last + j0, rel_rows, shift, last - first, BM,
            BN, D, BD, PRECISION, NARROW,
        )  # fmt: skip
        ids, same, different = load_segments(
            query_tile, segment_embed, segment_bias, query_ids, row, inside, h, heads, scale * LOG2_E, D, BD, PRECISION
        )
        score = add_content(
            score, content_query, tile_k, scale * LOG2_E, ids, same, different, key_ids, j0, BN, PRECISION
        )
        rank, floor, own = load_row_masks(query_rank, query_floor, sees_self, row, inside)
        seen = visible(
            row, inside, position, j0, keys, mem_len, rank, floor, own, key_rank, query_floor, sees_self, mask, mask_l,
            mask_k, BN, CAUSAL,
        )  # fmt: skip
        lse_row = tl.load(lse + row, mask=inside, other=0.0) * LOG2_E
        delta_row = tl.load(delta + row, mask=inside, other=0.0)
        grad_tile = load_rows(grad_out, row, grad_out_l, inside, D, BD)
        dropped, grad = score_gradients(
            score, seen, lse_row, delta_row, grad_tile, tile_v, scale, kept_scale, dropout_state, row, head, j0,
            threshold, BM, BN, PRECISION,
        )  # fmt: skip
        acc_v = tl.dot(tl.trans(dropped.to(grad_tile.dtype)), grad_tile, acc=acc_v, input_precision=PRECISION)
        acc_k = tl.dot(tl.trans(grad.to(query_tile.dtype)), content_query, acc=acc_k, input_precision=PRECISION)
        column_sum += tl.sum(grad, 0)
    return acc_k, acc_v, column_sum


@triton.jit(do_not_specialize=SIZES)
def keys_kernel(
    query, key, value, rel_key, content_bias, position_bias, memory_key, memory_value, segment_embed, segment_bias,
    query_ids, key_ids, query_rank, key_rank, query_floor, sees_self, mask, positions, order, dropout_state,
    lse, grad_out, delta,
    grad_key, grad_value,  # (B, K, H, D)
    grad_memory_key, grad_memory_value,  # (B, M, H, D)
    key_sums,  # (B * H, tiles, D) float32: over the tile's keys, of colsum(dS) k
    query_b, query_h, query_l, key_b, key_h, key_l, value_b, value_h, value_l, rel_key_b, rel_key_h, rel_key_p,
    memory_key_b, memory_key_h, memory_key_l, memory_value_b, memory_value_h, memory_value_l,
    mask_b, mask_h, mask_l, mask_k, grad_out_b, grad_out_h, grad_out_l,
    heads, rows, mem_len, keys, padded_keys, rel_rows, max_distance, threshold, scale, kept_scale,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv, the memory's too, and what content_bias's gradient is made of. Program (tile, b * heads + h)."""
    head = tl.program_id(1)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    j0 = tl.program_id(0) * BN
    d = tl.arange(0, BD)
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
    if key_ids is not None:
        key_ids += b * padded_keys
        query_ids += b * rows
    if query_rank is not None:
        key_rank += b * padded_keys
        query_rank += b * rows
    if query_floor is not None:
        query_floor += b * rows
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
    tile_k = load_keys(memory_key, memory_key_l, key, key_l, j0, mem_len, keys, BN, D, BD)
    tile_v = load_keys(memory_value, memory_value_l, value, value_l, j0, mem_len, keys, BN, D, BD)
    lse += head.to(tl.int64) * rows
    delta += head.to(tl.int64) * rows
    if positions is None:
        narrow = True
    else:
        narrow = widest_tile(positions, begin, end, rows, BM) < tl.maximum(BM, BN)
    arguments = (
        query, rel_key, grad_out, tile_k, tile_v, content_bias, position_bias, segment_embed, segment_bias, query_ids,
        key_ids, query_rank, key_rank, query_floor, sees_self, mask, positions, order, dropout_state, lse, delta,
        query_l, rel_key_p, grad_out_l, mask_l, mask_k, head, h, heads, j0, begin, end, rows, mem_len, keys, rel_rows,
        max_distance, threshold, scale, kept_scale,
    )  # fmt: skip
    if narrow:
        acc_k, acc_v, column_sum = _walk_rows(*arguments, D, BD, BM, BN, CAUSAL, PRECISION, True)
    else:
        acc_k, acc_v, column_sum = _walk_rows(*arguments, D, BD, BM, BN, CAUSAL, PRECISION, False)

    current_offset = b * (keys - mem_len) * heads * D + h * D
    stride = heads * D
    store_keys(grad_memory_key, stride, grad_key + current_offset, stride, j0, mem_len, keys, acc_k, BN, D, BD)
    store_keys(grad_memory_value, stride, grad_value + current_offset, stride, j0, mem_len, keys, acc_v, BN, D, BD)
    key_sum = tl.sum(column_sum[:, None] * tile_k.to(tl.float32), 0)
    slot = head.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(key_sums + slot * D + d, key_sum, mask=d < D)
