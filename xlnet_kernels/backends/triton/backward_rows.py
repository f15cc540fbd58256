"""The backward kernel that walks the keys of each tile of rows: gradients of query, rel_key and the small parameters.

The probabilities are recomputed from the log-sum-exp. With dP = dO V^T and delta = rowsum(dO * O) - dlse,
dS = P * (dP - delta) * scale; the rest is products of dS with what the scores were made of.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunks import (
    add_bias,
    add_product,
    in_loop,
    in_loop_rows,
    keep_keys,
    keep_rows,
    key_chunk,
    load_block,
    load_rows,
    row_chunk,
    zeros,
)
from .shift import block_of, open_ring, rel_product, rotate, shift_blocks, shift_in, shift_out
from .tiles import (
    BLOCK,
    LOG2_E,
    SIZES,
    add_segments,
    all_seen,
    is_near,
    is_same_segment,
    load_positions,
    load_row_masks,
    load_segment,
    load_segments,
    program,
    range_of,
    score_gradients,
    span_of_keys,
)


@triton.jit
def _add_rel_chunk(
    grad_rel, start, rel_rows, band, position_query, c, BN: tl.constexpr, D: tl.constexpr, BC: tl.constexpr,
    KEEP: tl.constexpr, ATOMIC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds band^T (q + position_bias) to chunk c of grad_rel."""
    tile = tl.dot(tl.trans(band), row_chunk(position_query, c, D, BC, KEEP), input_precision=PRECISION)
    column = tl.arange(0, BN)
    d = c * BC + tl.arange(0, BC)
    pointer = (grad_rel + start * D) + (column[:, None] * D + d[None, :])
    if not KEEP:  # grad_rel has room for whole blocks; but without a mask the compiler unrolls the loop over chunks
        mask = (column < rel_rows - start)[:, None] & (d < D)[None, :]
    elif D % BC != 0:
        mask = (d < D)[None, :]
    else:
        mask = None
    if ATOMIC:
        tl.atomic_add(pointer, tile, mask=mask, sem="relaxed")
    else:
        tl.store(pointer, tl.load(pointer, mask=mask, volatile=True) + tile, mask=mask)


@triton.jit
def _add_rel_gradient(
    grad_rel, rel_key, rel_key_p, start, rel_rows, band, position_query, grad_query, BN: tl.constexpr, D: tl.constexpr,
    BC: tl.constexpr, KEEP: tl.constexpr, NEEDS_REL: tl.constexpr, ATOMIC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes one complete block of the band of dS into grad_rel (float32, contiguous) and grad_query."""
    band = band.to(rel_key.dtype.element_ty)
    if NEEDS_REL:
        if KEEP:
            for c in tl.static_range((D + BC - 1) // BC):
                _add_rel_chunk(grad_rel, start, rel_rows, band, position_query, c, BN, D, BC, KEEP, ATOMIC, PRECISION)
        else:
            for c in range((D + BC - 1) // BC):
                _add_rel_chunk(grad_rel, start, rel_rows, band, position_query, c, BN, D, BC, KEEP, ATOMIC, PRECISION)
    sums = ()
    for c in tl.static_range((D + BC - 1) // BC):
        tile_r = load_block(rel_key, rel_key_p, start, rel_rows, c, BN, D, BC)
        sums = sums + (tl.dot(band, tile_r, acc=grad_query[c], input_precision=PRECISION),)
    return sums


@triton.jit
def _walk_keys(
    content_query, position_query, grad_rows, key, value, rel_key, key_l, value_l, rel_key_p, memory_key_l,
    memory_value_l, ids, same, different, row, inside, position, rank, floor, own, query_floor, sees_self, mask_l,
    mask_k, dropout_state, head, shift, origin, begin, end, first_position, last_position, mem_len, keys, rel_rows,
    threshold, scale, kept_scale, lse_row, delta_row, grad_rel, memory_key, memory_value, key_ids, id_least, id_largest,
    key_rank, rank_least, rank_largest, mask, D: tl.constexpr, BC: tl.constexpr, KEEP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, NEEDS_REL: tl.constexpr, ATOMIC: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """dq of a tile of rows without the segment term, and rowsum(dS) over the keys of other segments."""
    acc = zeros(BM, D, BC)
    grad_different = tl.zeros((BM,), tl.float32)
    lowest_rank, highest_floor = tl.min(rank, 0), tl.max(floor, 0)
    spread = last_position - first_position
    if RING:
        first, middle = open_ring(
            position_query, rel_key, rel_key_p, origin + begin, rel_rows, shift, BM, BN, D, BC, KEEP, PRECISION
        )
        first_grad = tl.zeros((BM, BN), tl.float32)
        middle_grad = tl.zeros((BM, BN), tl.float32)
    for j0 in range(begin, end, BN):
        position_rows = in_loop_rows(position_query, j0, KEEP)
        if RING:
            at = origin + j0 + tl.maximum(BM, BN)
            new = rel_product(position_rows, rel_key, rel_key_p, at, rel_rows, BM, BN, D, BC, KEEP, PRECISION)
            score, first, middle = shift_in(first, middle, new, in_loop(shift, j0), BM, BN)
        else:
            score = shift_blocks(
                position_rows, rel_key, rel_key_p, origin + j0, rel_rows, shift, spread, BM, BN, D, BC, KEEP,
                PRECISION, False,
            )  # fmt: skip
        tile_k = keep_keys(memory_key, memory_key_l, key, key_l, j0, mem_len, keys, BN, D, BC, KEEP)
        score = add_product(score, in_loop_rows(content_query, j0, KEEP), tile_k, BN, D, BC, KEEP, KEEP, PRECISION)
        id_low, id_high = range_of(id_least, id_largest, j0, BN)
        score, term = add_segments(score, ids, same, different, key_ids, id_low, id_high, j0, BN)
        tile_v = keep_keys(memory_value, memory_value_l, value, value_l, j0, mem_len, keys, BN, D, BC, False)
        grad = tl.zeros((BM, BN), tl.float32)
        grad = add_product(grad, in_loop_rows(grad_rows, j0, KEEP), tile_v, BN, D, BC, KEEP, False, PRECISION)
        every = False
        near = True
        if KEEP:  # without, scores that go through branches cost hundreds of spills
            rank_low, rank_high = range_of(rank_least, rank_largest, j0, BN)
            every = all_seen(
                first_position, lowest_rank, highest_floor, j0, rank_low, rank_high, keys, mem_len, key_rank,
                query_floor, mask, BN, CAUSAL,
            )  # fmt: skip
            near = is_near(first_position, last_position, j0, mem_len, sees_self, BN, CAUSAL)
        _, grad = score_gradients(
            score, term * (scale * LOG2_E) - lse_row, delta_row * scale, grad, scale, kept_scale, dropout_state, head,
            threshold, every, near, row, inside, position, j0, keys, mem_len, rank, floor, own, key_rank, query_floor,
            sees_self, mask, mask_l, mask_k, BM, BN, CAUSAL,
        )  # fmt: skip
        if key_ids is not None:
            if id_low == id_high:
                grad_different += tl.where(ids == id_low, 0.0, tl.sum(grad, 1))
            else:
                grad_different += tl.sum(tl.where(is_same_segment(ids, key_ids, j0, BN), 0.0, grad), 1)
        narrowed = grad.to(key.dtype.element_ty)
        sums = ()
        for c in tl.static_range((D + BC - 1) // BC):
            tile = key_chunk(tile_k, c, BN, D, BC, KEEP)
            sums = sums + (tl.dot(narrowed, tile, acc=acc[c], input_precision=PRECISION),)
        acc = sums
        if RING:
            # another name for the shift: conditions that the compiler kept from above would cost more than new ones
            band, first_grad, middle_grad = shift_out(grad, first_grad, middle_grad, in_loop(shift, end - j0), BM, BN)
            acc = _add_rel_gradient(
                grad_rel, rel_key, rel_key_p, origin + j0, rel_rows, band, position_rows, acc, BN, D, BC, KEEP,
                NEEDS_REL, ATOMIC, PRECISION,
            )  # fmt: skip
        else:
            grad = rotate(grad, -shift)
            block = block_of(shift, BN)
            for index in range(0, spread // BN + 2):
                acc = _add_rel_gradient(
                    grad_rel, rel_key, rel_key_p, origin + j0 + index * BN, rel_rows,
                    tl.where(block == index, grad, 0.0), in_loop_rows(position_query, index, KEEP), acc, BN, D, BC,
                    KEEP, NEEDS_REL, ATOMIC, PRECISION,
                )  # fmt: skip
    if RING:  # the blocks that are still open
        start = origin + begin + tl.cdiv(tl.maximum(end - begin, 0), BN) * BN
        acc = _add_rel_gradient(
            grad_rel, rel_key, rel_key_p, start, rel_rows, first_grad, position_query, acc, BN, D, BC, KEEP, NEEDS_REL,
            ATOMIC, PRECISION,
        )  # fmt: skip
        if BM > BN:
            acc = _add_rel_gradient(
                grad_rel, rel_key, rel_key_p, start + BN, rel_rows, middle_grad, position_query, acc, BN, D, BC, KEEP,
                NEEDS_REL, ATOMIC, PRECISION,
            )  # fmt: skip
    return acc, grad_different


@triton.jit(do_not_specialize=[*SIZES, "tiles", "items", "groups", "programs", "grad_rel_rows"])
def rows_kernel(
    query, key, value, rel_key, content_bias, position_bias, memory_key, memory_value, segment_embed, segment_bias,
    query_ids, key_ids, id_least, id_largest, query_rank, key_rank, rank_least, rank_largest, query_floor, sees_self,
    mask, positions, order, dropout_state,
    out, lse, grad_out, grad_lse,
    grad_query,  # (B, L, H, D)
    delta,  # (B, H, L) float32
    kinds,  # (B, H, 2, L) float32: scores of keys in the same segment and in another
    grad_rel,  # (slots, H or B * H, grad_rel_rows, D) float32 of zeros: P rows and what blocks reach beyond them
    sums,  # (B * H, tiles, 4, D) float32: over rows, of dq without the segment term; dsame (q + b); ddifferent (q + b);
    #        and dq's segment term
    query_b, query_h, query_l, key_b, key_h, key_l, value_b, value_h, value_l, rel_key_b, rel_key_h, rel_key_p,
    memory_key_b, memory_key_h, memory_key_l, memory_value_b, memory_value_h, memory_value_l,
    mask_b, mask_h, mask_l, mask_k, grad_out_b, grad_out_h, grad_out_l,
    heads, rows, mem_len, keys, padded_keys, rel_rows, max_distance, threshold, scale, kept_scale, tiles, items, groups,
    programs, grad_rel_rows, D: tl.constexpr, BC: tl.constexpr, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, NEEDS_REL: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """dq, delta, drel_key and the sums that the biases' gradients are made of.

    Program (place, group) works on every programs-th tile of rows of its group, where a group is what shares rows of
    rel_key: a head, or a head of one batch. With ATOMIC there is one slot of grad_rel for all programs; otherwise
    each program owns a slot, and the order of additions is fixed.
    """
    place, group = program(programs)
    slot = 0 if ATOMIC else place
    grad_rel += (slot * groups + group).to(tl.int64) * grad_rel_rows * D
    for item in range(place, items, programs):
        tile = tiles - 1 - item % tiles
        head = item // tiles * groups + group
        b = (head // heads).to(tl.int64)
        h = (head % heads).to(tl.int64)
        key_of = key + b * key_b + h * key_h
        value_of = value + b * value_b + h * value_h
        rel_of = rel_key + b * rel_key_b + h * rel_key_h
        memory_key_of = memory_key
        memory_value_of = memory_value
        if memory_key is not None:
            memory_key_of += b * memory_key_b + h * memory_key_h
            memory_value_of += b * memory_value_b + h * memory_value_h
        key_ids_of = key_ids
        id_least_of = id_least
        id_largest_of = id_largest
        if key_ids is not None:
            key_ids_of += b * padded_keys
            id_least_of += b * (padded_keys // BLOCK)
            id_largest_of += b * (padded_keys // BLOCK)
        key_rank_of = key_rank
        rank_least_of = rank_least
        rank_largest_of = rank_largest
        if key_rank is not None:
            key_rank_of += b * padded_keys
            rank_least_of += b * (padded_keys // BLOCK)
            rank_largest_of += b * (padded_keys // BLOCK)
        mask_of = mask
        if mask is not None:
            mask_of += b * mask_b + h * mask_h
        positions_of = positions
        order_of = order
        if positions is not None:
            positions_of += b * rows
            order_of += b * rows
        row, position, inside, first, last = load_positions(positions_of, order_of, tile, rows, BM)
        shift = tl.where(inside, last - position, 0)
        origin = max_distance - mem_len - last
        rank, floor, own = load_row_masks(query_rank, query_floor, sees_self, b * rows + row, inside)
        begin, end = span_of_keys(
            rank, floor, first, last, key_rank_of, query_floor, sees_self, keys, mem_len, BN, CAUSAL
        )

        query_of = query + b * query_b + h * query_h
        grad_of = grad_out + b * grad_out_b + h * grad_out_h
        ids, same, different = load_segments(
            query_of, query_l, segment_embed, segment_bias, query_ids, row, b * rows + row, inside, h, heads, D, BC,
            PRECISION,
        )  # fmt: skip
        content_query = keep_rows(query_of, row, query_l, inside, content_bias, h, D, BC, KEEP)
        position_query = keep_rows(query_of, row, query_l, inside, position_bias, h, D, BC, KEEP)
        grad_rows = keep_rows(grad_of, row, grad_out_l, inside, None, h, D, BC, KEEP)
        out_row = (b * rows + row) * heads + h
        row_of_head = head.to(tl.int64) * rows + row
        if key_ids is not None:
            tl.store(kinds + (row_of_head + head.to(tl.int64) * rows), same, mask=inside)
            tl.store(kinds + (row_of_head + (head + 1).to(tl.int64) * rows), different, mask=inside)
        lse_row = tl.load(lse + row_of_head, mask=inside, other=float("inf")) * LOG2_E  # rows that do not exist: P = 0
        delta_row = tl.zeros((BM,), tl.float32)
        for c in tl.static_range((D + BC - 1) // BC):
            out_tile = load_rows(out, out_row, D, inside, c, D, BC).to(tl.float32)
            delta_row += tl.sum(row_chunk(grad_rows, c, D, BC, KEEP).to(tl.float32) * out_tile, 1)
        grad_total = tl.zeros((BM,), tl.float32)  # rowsum(dS)
        if grad_lse is not None:
            grad_lse_row = tl.load(grad_lse + row_of_head, mask=inside, other=0.0)
            delta_row -= grad_lse_row
            grad_total = tl.where(lse_row == -float("inf"), 0.0, grad_lse_row) * scale
        tl.store(delta + row_of_head, delta_row, mask=inside)

        if positions is None:
            narrow = True
        else:
            narrow = last - first < tl.maximum(BM, BN)
        arguments = (
            content_query, position_query, grad_rows, key_of, value_of, rel_of, key_l, value_l, rel_key_p,
            memory_key_l, memory_value_l, ids, same, different, row, inside, position, rank, floor, own, query_floor,
            sees_self, mask_l, mask_k, dropout_state, head, shift, origin, begin, end, first, last, mem_len, keys,
            rel_rows, threshold, scale, kept_scale, lse_row, delta_row, grad_rel,
        )  # fmt: skip
        if narrow:
            acc, grad_different = _walk_keys(
                *arguments, memory_key_of, memory_value_of, key_ids_of, id_least_of, id_largest_of, key_rank_of,
                rank_least_of, rank_largest_of, mask_of, D, BC, KEEP, BM, BN, CAUSAL, PRECISION, NEEDS_REL, ATOMIC,
                True,
            )  # fmt: skip
        else:
            acc, grad_different = _walk_keys(
                *arguments, memory_key_of, memory_value_of, key_ids_of, id_least_of, id_largest_of, key_rank_of,
                rank_least_of, rank_largest_of, mask_of, D, BC, KEEP, BM, BN, CAUSAL, PRECISION, NEEDS_REL, ATOMIC,
                False,
            )  # fmt: skip

        grad_same = grad_total - grad_different
        for c in tl.static_range((D + BC - 1) // BC):
            d = c * BC + tl.arange(0, BC)
            total = acc[c]
            sums_row = sums + (head.to(tl.int64) * tiles + tile) * 4 * D + d
            tl.store(sums_row, tl.sum(acc[c], 0), mask=d < D)
            if key_ids is not None:
                biased = add_bias(load_rows(query_of, row, query_l, inside, c, D, BC), segment_bias, h, c, D, BC)
                biased = biased.to(tl.float32)
                term = grad_same[:, None] * load_segment(segment_embed, h, heads, 0, c, D, BC)[None, :]
                term += grad_different[:, None] * load_segment(segment_embed, h, heads, 1, c, D, BC)[None, :]
                tl.store(sums_row + D, tl.sum(grad_same[:, None] * biased, 0), mask=d < D)
                tl.store(sums_row + 2 * D, tl.sum(grad_different[:, None] * biased, 0), mask=d < D)
                tl.store(sums_row + 3 * D, tl.sum(term, 0), mask=d < D)
                total += term
            pointer = grad_query + out_row[:, None] * D + d[None, :]
            tl.store(pointer, total.to(grad_query.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])
        if not ATOMIC:
            tl.debug_barrier()  # the next item's blocks are aligned otherwise: other threads add to the same elements
