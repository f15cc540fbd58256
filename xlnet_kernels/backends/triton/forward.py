"""The forward kernel: one pass over the keys of each tile of rows, online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from .chunks import add_product, in_loop, in_loop_rows, keep_keys, keep_rows, key_chunk, zeros
from .shift import open_ring, rel_product, shift_blocks, shift_in
from .tiles import (
    BLOCK,
    LOG2_E,
    SIZES,
    add_segments,
    all_seen,
    is_near,
    kept,
    load_positions,
    load_row_masks,
    load_segments,
    program,
    range_of,
    span_of_keys,
    visible,
)


@triton.jit
def _walk(
    content_query, position_query, key, value, rel_key, memory_key, memory_value, key_l, value_l, rel_key_p,
    memory_key_l, memory_value_l, ids, same, different, key_ids, id_least, id_largest, row, inside, position, rank,
    floor, own, key_rank, rank_least, rank_largest, query_floor, sees_self, mask, mask_l, mask_k, dropout_state, head,
    shift, origin, begin, end, first_position, last_position, mem_len, keys, rel_rows, threshold, scale,
    D: tl.constexpr, BC: tl.constexpr, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """All tiles of keys that a tile of rows may see: (largest score, sum of exponentials, sum of values)."""
    largest = tl.full((BM,), -float("inf"), tl.float32)
    lowest_rank, highest_floor = tl.min(rank, 0), tl.max(floor, 0)
    total = tl.zeros((BM,), tl.float32)
    acc = zeros(BM, D, BC)
    if RING:
        first, middle = open_ring(
            position_query, rel_key, rel_key_p, origin + begin, rel_rows, shift, BM, BN, D, BC, KEEP, PRECISION
        )
    for j0 in range(begin, end, BN):
        position_rows = in_loop_rows(position_query, j0, KEEP)
        if RING:
            at = origin + j0 + tl.maximum(BM, BN)
            new = rel_product(position_rows, rel_key, rel_key_p, at, rel_rows, BM, BN, D, BC, KEEP, PRECISION)
            score, first, middle = shift_in(first, middle, new, in_loop(shift, j0), BM, BN)
        else:
            score = shift_blocks(
                position_rows, rel_key, rel_key_p, origin + j0, rel_rows, shift, last_position - first_position, BM, BN,
                D, BC, KEEP, PRECISION, False,
            )  # fmt: skip
        if KEEP:  # before the product of content: Triton 3.6 computes twice what comes right after a branch
            id_low, id_high = range_of(id_least, id_largest, j0, BN)
            score, term = add_segments(score, ids, same, different, key_ids, id_low, id_high, j0, BN)
        tile_k = keep_keys(memory_key, memory_key_l, key, key_l, j0, mem_len, keys, BN, D, BC, False)
        score = add_product(score, in_loop_rows(content_query, j0, KEEP), tile_k, BN, D, BC, KEEP, False, PRECISION)
        if not KEEP:  # without branches, here and below: scores that go through them would be spilled
            score, term = add_segments(score, ids, same, different, key_ids, 0, 1, j0, BN)
        every = False
        near = True
        if KEEP:
            rank_low, rank_high = range_of(rank_least, rank_largest, j0, BN)
            every = all_seen(
                first_position, lowest_rank, highest_floor, j0, rank_low, rank_high, keys, mem_len, key_rank,
                query_floor, mask, BN, CAUSAL,
            )  # fmt: skip
            near = is_near(first_position, last_position, j0, mem_len, sees_self, BN, CAUSAL)
        if not every:
            if near:
                seen = visible(
                    row, inside, position, j0, keys, mem_len, rank, floor, own, key_rank, query_floor, sees_self, mask,
                    mask_l, mask_k, BN, CAUSAL, True,
                )  # fmt: skip
                score = tl.where(seen, score, -float("inf"))
            else:
                seen = visible(
                    row, inside, position, j0, keys, mem_len, rank, floor, own, key_rank, query_floor, sees_self, mask,
                    mask_l, mask_k, BN, CAUSAL, False,
                )  # fmt: skip
                score = tl.where(seen, score, -float("inf"))

        larger = tl.maximum(largest, (tl.max(score, 1) + term) * scale)
        pivot = tl.where(larger == -float("inf"), 0.0, larger)  # -inf - -inf would give NaN
        probability = tl.exp2(score * scale + (term * scale - pivot)[:, None])
        correction = tl.exp2(largest - pivot)
        total = total * correction + tl.sum(probability, 1)
        if dropout_state is not None:
            probability = tl.where(kept(dropout_state, row, head, j0, threshold, BM, BN), probability, 0.0)
        tile_v = keep_keys(memory_value, memory_value_l, value, value_l, j0, mem_len, keys, BN, D, BC, False)
        probability = probability.to(value.dtype.element_ty)
        sums = ()
        for c in tl.static_range((D + BC - 1) // BC):
            tile = key_chunk(tile_v, c, BN, D, BC, False)
            sums = sums + (tl.dot(probability, tile, acc=acc[c] * correction[:, None], input_precision=PRECISION),)
        acc = sums
        largest = larger
    return largest, total, acc


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    query, key, value, rel_key, content_bias, position_bias, memory_key, memory_value, segment_embed, segment_bias,
    query_ids, key_ids, id_least, id_largest, query_rank, key_rank, rank_least, rank_largest, query_floor, sees_self,
    mask, positions, order, dropout_state,
    out,  # (B, L, H, D)
    lse,  # (B, H, L) float32
    query_b, query_h, query_l, key_b, key_h, key_l, value_b, value_h, value_l, rel_key_b, rel_key_h, rel_key_p,
    memory_key_b, memory_key_h, memory_key_l, memory_value_b, memory_value_h, memory_value_l,
    mask_b, mask_h, mask_l, mask_k,
    heads, rows, mem_len, keys, padded_keys, rel_rows, max_distance, threshold, scale, kept_scale,
    D: tl.constexpr, BC: tl.constexpr, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, b * heads + h); arguments as launch.py names them."""
    # Rows that see most come last in a causal mask: start with them.
    tiles = tl.cdiv(rows, BM)
    place, head = program(tiles)
    tile = tiles - 1 - place
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
        rank_least += b * (padded_keys // BLOCK)
        rank_largest += b * (padded_keys // BLOCK)
    if mask is not None:
        mask += b * mask_b + h * mask_h
    begin, end = span_of_keys(rank, floor, first, last, key_rank, query_floor, sees_self, keys, mem_len, BN, CAUSAL)

    scale *= LOG2_E
    ids, same, different = load_segments(
        query, query_l, segment_embed, segment_bias, query_ids, row, b * rows + row, inside, h, heads, D, BC, PRECISION,
    )  # fmt: skip
    content_query = keep_rows(query, row, query_l, inside, content_bias, h, D, BC, KEEP)
    position_query = keep_rows(query, row, query_l, inside, position_bias, h, D, BC, KEEP)
    if key_ids is not None:
        key_ids += b * padded_keys
        id_least += b * (padded_keys // BLOCK)
        id_largest += b * (padded_keys // BLOCK)

    if positions is None:
        narrow = True
    else:
        narrow = last - first < tl.maximum(BM, BN)
    arguments = (
        content_query, position_query, key, value, rel_key, memory_key, memory_value, key_l, value_l, rel_key_p,
        memory_key_l, memory_value_l, ids, same, different, key_ids, id_least, id_largest, row, inside, position, rank,
        floor, own, key_rank, rank_least, rank_largest, query_floor, sees_self, mask, mask_l, mask_k, dropout_state,
        head, shift, origin, begin, end, first, last, mem_len, keys, rel_rows, threshold, scale,
    )  # fmt: skip
    if narrow:
        largest, total, acc = _walk(*arguments, D, BC, KEEP, BM, BN, CAUSAL, PRECISION, True)
    else:
        largest, total, acc = _walk(*arguments, D, BC, KEEP, BM, BN, CAUSAL, PRECISION, False)

    sees_any = total != 0  # NaN counts
    factor = tl.where(sees_any, kept_scale / tl.where(sees_any, total, 1.0), 0.0)[:, None]
    lse_row = tl.where(sees_any, (largest + tl.log2(total)) / LOG2_E, -float("inf"))
    out_row = out + ((b * rows + row) * heads + h)[:, None] * D
    for c in tl.static_range((D + BC - 1) // BC):
        d = c * BC + tl.arange(0, BC)
        tile = (acc[c] * factor).to(out.dtype.element_ty)
        tl.store(out_row + d[None, :], tile, mask=inside[:, None] & (d < D)[None, :])
    tl.store(lse + head.to(tl.int64) * rows + row, lse_row, mask=inside)
