"""The forward kernel: one pass over the keys of each tile of rows, online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from .shift import in_loop, open_ring, shift_blocks, shift_in
from .tiles import (
    LOG2_E,
    SIZES,
    add_bias,
    add_content,
    kept,
    load_block,
    load_keys,
    load_positions,
    load_row_masks,
    load_rows,
    load_segments,
    span_of_keys,
    visible,
)


@triton.jit
def _walk(
    content_query, position_query, key, value, rel_key, memory_key, memory_value, key_l, value_l, rel_key_p,
    memory_key_l, memory_value_l, ids, same, different, key_ids, row, inside, position, rank, floor, own, key_rank,
    query_floor, sees_self, mask, mask_l, mask_k, dropout_state, head, shift, origin, begin, end, spread, mem_len, keys,
    rel_rows, threshold, scale, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """All tiles of keys that a tile of rows may see: (largest score, sum of exponentials, sum of values)."""
    largest = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    if RING:
        first, middle = open_ring(
            position_query, rel_key, rel_key_p, origin + begin, rel_rows, shift, BM, BN, D, BD, PRECISION
        )
    for j0 in range(begin, end, BN):
        if RING:
            tile_r = load_block(rel_key, rel_key_p, origin + j0 + tl.maximum(BM, BN), rel_rows, BN, D, BD)
            new = tl.dot(position_query, tl.trans(tile_r), input_precision=PRECISION)
            score, first, middle = shift_in(first, middle, new, in_loop(shift, j0), BM, BN)
        else:
            score = shift_blocks(
                position_query, rel_key, rel_key_p, origin + j0, rel_rows, shift, spread, BM, BN, D, BD, PRECISION,
                False,
            )  # fmt: skip
        tile_k = load_keys(memory_key, memory_key_l, key, key_l, j0, mem_len, keys, BN, D, BD)
        score = add_content(score, content_query, tile_k, scale, ids, same, different, key_ids, j0, BN, PRECISION)
        seen = visible(
            row, inside, position, j0, keys, mem_len, rank, floor, own, key_rank, query_floor, sees_self, mask, mask_l,
            mask_k, BN, CAUSAL,
        )  # fmt: skip
        tile_v = load_keys(memory_value, memory_value_l, value, value_l, j0, mem_len, keys, BN, D, BD)

        score = tl.where(seen, score, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        pivot = tl.where(larger == -float("inf"), 0.0, larger)  # -inf - -inf would give NaN
        probability = tl.exp2(score - pivot[:, None])
        correction = tl.exp2(largest - pivot)
        total = total * correction + tl.sum(probability, 1)
        if dropout_state is not None:
            probability = tl.where(kept(dropout_state, row, head, j0, threshold, BM, BN), probability, 0.0)
        acc = tl.dot(probability.to(tile_v.dtype), tile_v, acc=acc * correction[:, None], input_precision=PRECISION)
        largest = larger
    return largest, total, acc


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    query, key, value, rel_key, content_bias, position_bias, memory_key, memory_value, segment_embed, segment_bias,
    query_ids, key_ids, query_rank, key_rank, query_floor, sees_self, mask, positions, order, dropout_state,
    out,  # (B, L, H, D)
    lse,  # (B, H, L) float32
    query_b, query_h, query_l, key_b, key_h, key_l, value_b, value_h, value_l, rel_key_b, rel_key_h, rel_key_p,
    memory_key_b, memory_key_h, memory_key_l, memory_value_b, memory_value_h, memory_value_l,
    mask_b, mask_h, mask_l, mask_k,
    heads, rows, mem_len, keys, padded_keys, rel_rows, max_distance, threshold, scale, kept_scale,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, b * heads + h); arguments as launch.py names them."""
    # Rows that see most come last in a causal mask: start with them.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    query += b * query_b + h * query_h
    key += b * key_b + h * key_h
    value += b * value_b + h * value_h
    rel_key += b * rel_key_b + h * rel_key_h
    if memory_key is not None:
        memory_key += b * memory_key_b + h * memory_key_h
        memory_value += b * memory_value_b + h * memory_value_h

    if positions is not None:
        positions += b * rows
        order += b * rows
    row, position, inside, first, last = load_positions(positions, order, tile, rows, BM)
    shift = tl.where(inside, last - position, 0)
    origin = max_distance - mem_len - last

    rank, floor, own = load_row_masks(query_rank, query_floor, sees_self, b * rows + row, inside)
    if key_rank is not None:
        key_rank += b * padded_keys
    if mask is not None:
        mask += b * mask_b + h * mask_h
    begin, end = span_of_keys(rank, floor, first, last, key_rank, query_floor, sees_self, keys, mem_len, BN, CAUSAL)

    query_tile = load_rows(query, row, query_l, inside, D, BD)
    scale *= LOG2_E
    ids, same, different = load_segments(
        query_tile, segment_embed, segment_bias, query_ids, b * rows + row, inside, h, heads, scale, D, BD, PRECISION
    )
    content_query = add_bias(query_tile, content_bias, h, D, BD)
    position_query = add_bias(query_tile, position_bias, h, D, BD)
    if key_ids is not None:
        key_ids += b * padded_keys

    if positions is None:
        narrow = True
    else:
        narrow = last - first < tl.maximum(BM, BN)
    arguments = (
        content_query, position_query, key, value, rel_key, memory_key, memory_value, key_l, value_l, rel_key_p,
        memory_key_l, memory_value_l, ids, same, different, key_ids, row, inside, position, rank, floor, own, key_rank,
        query_floor, sees_self, mask, mask_l, mask_k, dropout_state, head, shift, origin, begin, end, last - first,
        mem_len, keys, rel_rows, threshold, scale,
    )  # fmt: skip
    if narrow:
        largest, total, acc = _walk(*arguments, D, BD, BM, BN, CAUSAL, PRECISION, True)
    else:
        largest, total, acc = _walk(*arguments, D, BD, BM, BN, CAUSAL, PRECISION, False)

    sees_any = total != 0  # NaN counts
    acc = acc * tl.where(sees_any, kept_scale / tl.where(sees_any, total, 1.0), 0.0)[:, None]
    lse_row = tl.where(sees_any, (largest + tl.log2(total)) / LOG2_E, -float("inf"))
    d = tl.arange(0, BD)
    pointer = out + ((b * rows + row) * heads + h)[:, None] * D + d[None, :]
    tl.store(pointer, acc.to(out.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])
    tl.store(lse + head.to(tl.int64) * rows + row, lse_row, mask=inside)
