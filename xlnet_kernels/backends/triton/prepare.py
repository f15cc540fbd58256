"""What a pass makes of the query rows before its main kernel: once for a row instead of once for each tile of keys.

Operands that come straight from memory are what wgmma can take from shared memory; with a bias added on the way there
they would fill registers. Rows are written in the order of their positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arguments import Sizes, head_at, matrix_at, of_head_rows, of_prepared, of_rows, padded, program
from .chunks import SomeRows, add_bias, columns, load_query, load_rows
from .segments import store_row_segments
from .softmax import load_out


@triton.jit
def _store_rows(prepared, chunk, tile, c, size, META):
    """Keeps a chunk of a tile's rows, which are among the padded ones."""
    d = columns(c, META)
    base = prepared + (of_prepared(tile.head, size) + tile.start) * META.HEAD_DIM
    row = tl.arange(0, META.BLOCK_M)
    tl.store(base + (row[:, None] * META.HEAD_DIM + d[None, :]), chunk, mask=(d < META.HEAD_DIM)[None, :])


@triton.jit
def _store_statistics(given, backward, tile, exists, inverse, size, META):
    """Keeps the rows of grad_out and what dS is made of: see `Statistics`."""
    out_row = (tile.head.b * size.length + tile.row) * size.heads + tile.head.h
    delta = tl.zeros((META.BLOCK_M,), tl.float32)
    for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
        grad = load_rows(matrix_at(given.grad_out, tile.head), tile.row, given.grad_out.stride_l, tile.inside, c, META)
        _store_rows(backward.grad_out, grad, tile, c, size, META)  # (BLOCK_M, BLOCK_D)
        delta += tl.sum(grad.to(tl.float32) * load_out(given, out_row, tile, c, META), 1)
    row = of_head_rows(tile.head, size) + tile.row
    if given.grad_lse is not None:
        delta -= tl.load(given.grad_lse + row, mask=tile.inside, other=0.0)
    at = of_prepared(tile.head, size) + tile.start + tl.arange(0, META.BLOCK_M)
    tl.store(backward.inverse + at, inverse)
    tl.store(backward.delta + at, delta * inverse)
    tl.store(backward.row_max + at, tl.load(given.row_max + row, mask=exists, other=float("inf")))


@triton.jit(do_not_specialize=["heads", "length"])
def prepare_kernel(rows, segments, positions, given, backward, heads, length, META):
    """Query rows plus each of the biases, their segment terms; for backward, grad_out's rows and their statistics.
    Program (tile, b * heads + h); arguments.py says what the tuples hold.

    In backward, what fully masked rows hold is zero: 0 times NaN is NaN.
    """
    size = Sizes(heads, length, 0, 0, 0, 0)
    number, index = program(padded(length) // META.BLOCK_M)
    head = head_at(index, size)
    n = number * META.BLOCK_M + tl.arange(0, META.BLOCK_M)
    row = n
    inside = n < length
    if positions.row is not None:
        row = tl.load((positions.row + of_rows(head, size)) + n, mask=inside, other=0)
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
