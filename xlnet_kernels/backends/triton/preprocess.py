"""Preprocessing kernel: makes the operands of the main kernels.

These are query rows (once for each row, not for each tile of keys), ranks and segments (once for all heads), and copies
without the NaN of unread rows (unread.py).

wgmma can take operands from shared memory that are loaded there directly; adding a bias on the way would take
registers. Rows are written in the order of their positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arguments import (
    PADDING,
    SIZES,
    Mask,
    Sizes,
    head_at,
    load_row,
    matrix_at,
    of_head_rows,
    of_padded_rows,
    of_rows,
    padded,
    program,
)
from .mask import BOUND, HIGHEST, LOWEST
from .operands import SomeRows, add_bias, columns, load_query, load_rows
from .segments import store_row_segments
from .softmax import load_out
from .unread import copy_rows


@triton.jit
def _store_rows(preprocessed, chunk, tile, c, size, META):
    """Store a chunk of a tile's rows among the padded rows."""
    d = columns(c, META)
    base = preprocessed + (of_padded_rows(tile.head, size) + tile.start) * META.HEAD_DIM
    row = tl.arange(0, META.BLOCK_M)
    tl.store(base + (row[:, None] * META.HEAD_DIM + d[None, :]), chunk, mask=(d < META.HEAD_DIM)[None, :])


@triton.jit
def _store_statistics(given, backward, tile, exists, inverse, size, META):
    """Store the rows of grad_out and their statistics: see `Statistics`."""
    out_row = (tile.head.b * size.length + tile.row) * size.heads + tile.head.h
    delta = tl.zeros((META.BLOCK_M,), tl.float32)
    for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
        grad = load_rows(matrix_at(given.grad_out, tile.head), tile.row, given.grad_out.stride_l, tile.inside, c, META)
        _store_rows(backward.grad_out, grad, tile, c, size, META)  # (BLOCK_M, BLOCK_D)
        delta += tl.sum(grad.to(tl.float32) * load_out(given, out_row, tile, c, META), 1)
    row = of_head_rows(tile.head, size) + tile.row
    if given.grad_lse is not None:
        delta -= tl.load(given.grad_lse + row, mask=tile.inside, other=0.0)
    at = of_padded_rows(tile.head, size) + tile.start + tl.arange(0, META.BLOCK_M)
    tl.store(backward.inverse + at, inverse)
    tl.store(backward.delta + at, delta * inverse)
    tl.store(backward.row_max + at, tl.load(given.row_max + row, mask=exists, other=float("inf")))


@triton.jit
def _store_bounds(values, least, largest, at):
    """Store the least and the largest of every BOUND of values (PADDING,), which begin at index `at`."""
    bound = at // BOUND + tl.arange(0, PADDING // BOUND)
    values = tl.reshape(values, (PADDING // BOUND, BOUND))
    tl.store(least + bound, tl.min(values, 1))
    tl.store(largest + bound, tl.max(values, 1))


@triton.jit
def _pad_keys(given, kept, least, largest, b, first, keys, beyond: tl.constexpr):
    """Store numbers first .. first + PADDING - 1 of a batch's keys, `beyond` after the last key, and their bounds."""
    j = first + tl.arange(0, PADDING)
    values = tl.load((given + b * keys) + j, mask=j < keys, other=beyond)
    start = b * padded(keys)
    tl.store((kept + start) + j, values)
    _store_bounds(values, least, largest, start + first)


@triton.jit
def _bound_rows(given, least, largest, positions, b, first, length):
    """Store the bounds of a batch's rows first .. first + PADDING - 1, in the order of their positions."""
    row = first + tl.arange(0, PADDING)
    inside = row < length
    if positions.row is not None:
        row = load_row(positions, b * length + row, inside, length)
    values = tl.load((given + b * length) + row, mask=inside, other=LOWEST)
    _store_bounds(values, least, largest, b * padded(length) + first)


@triton.jit
def _preprocess_vectors(vectors, segments, rank_mask, positions, backward, number, length, keys):
    """Preprocess vectors over keys and, in backward, rows: program `number` of batches and parts."""
    parts = tl.maximum(padded(keys), padded(length)) // PADDING
    b = (number // parts).to(tl.int64)
    first = number % parts * PADDING
    if first < keys:
        if vectors.ids is not None:
            _pad_keys(vectors.ids, segments.key_ids, segments.least, segments.largest, b, first, keys, 0)
        if vectors.rank is not None:
            _pad_keys(vectors.rank, rank_mask.key_rank, rank_mask.least, rank_mask.largest, b, first, keys, HIGHEST)
    if first < length:
        if backward.rank_least is not None:
            given = rank_mask.query_rank
            _bound_rows(given, backward.rank_least, backward.rank_largest, positions, b, first, length)
        if backward.floor_least is not None:
            given = rank_mask.query_floor
            _bound_rows(given, backward.floor_least, backward.floor_largest, positions, b, first, length)


@triton.jit
def _preprocess_rows(rows, segments, positions, given, backward, size, META):
    """Preprocess query rows: plus each bias, with segment terms; for backward, grad_out's rows and their statistics.

    In backward fully masked rows are zeros, because 0 times NaN is NaN.
    """
    number, index = program(padded(size.length) // META.BLOCK_M)
    head = head_at(index, size)
    n = number * META.BLOCK_M + tl.arange(0, META.BLOCK_M)
    row = n
    inside = n < size.length
    if positions.row is not None:
        row = load_row(positions, of_rows(head, size) + n, inside, size.length)
    if given.row_sum is not None:
        row_sum = tl.load((given.row_sum + of_head_rows(head, size)) + row, mask=inside, other=0.0)
        inverse = tl.where(row_sum != 0, 1 / row_sum, 0.0)
        tile = SomeRows(head, number * META.BLOCK_M, row, inverse != 0)
        _store_statistics(given, backward, tile, inside, inverse, size, META)
    else:
        tile = SomeRows(head, number * META.BLOCK_M, row, inside)
    for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
        query = load_query(rows, tile, c, META)  # (BLOCK_M, BLOCK_D)
        _store_rows(rows.content, add_bias(query, rows.content_bias, tile, c, META), tile, c, size, META)
        _store_rows(rows.position, add_bias(query, rows.position_bias, tile, c, META), tile, c, size, META)
    store_row_segments(rows, segments, tile, size, META)


PROGRAMS = ["row_programs", "vector_programs", "key_programs"]


@triton.jit(do_not_specialize=[*SIZES, "batch", "groups", *PROGRAMS])
def preprocess_kernel(
    rows, vectors, segments, rank_mask, dense_mask, positions, given, backward, copies,
    heads, length, mem_len, key_len, rel_len, max_distance, batch, groups,
    row_programs, vector_programs, key_programs, META,
):  # fmt: skip
    """Preprocessing of rows, vectors and copies. arguments.py has the tuples.

    Programs (tile, b * heads + h) for rows, `row_programs` in all; then `vector_programs` (b, part) for vectors that
    all heads share; then those that copy.
    """
    size = Sizes(heads, length, mem_len, mem_len + key_len, rel_len, max_distance)
    number = tl.program_id(0) - row_programs
    if number < 0:
        _preprocess_rows(rows, segments, positions, given, backward, size, META)
    elif number < vector_programs:
        _preprocess_vectors(vectors, segments, rank_mask, positions, backward, number, length, size.keys)
    elif copies.keys.given.data is not None or copies.rel_key.given.data is not None:
        number -= vector_programs
        mask = Mask(rank_mask, dense_mask)
        copy_rows(copies, number, key_programs, batch, groups, mask, vectors.rank, positions, size, META)
