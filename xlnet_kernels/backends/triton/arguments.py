"""Arguments of the kernels: named tuples, grouped by the terms of the score.

A term that a call lacks is a tuple of Nones: kernels test a member, never the tuple. Triton 3.6 accepts None inside of
tuples, but can neither compare such a tuple with None nor return it from a function. So tuples that may hold None are
built where they are used, and pointers move to a batch and head at the load. `do_not_specialize` does not reach into
tuples (3.6 to 3.9): sizes, which change from call to call, stay separate arguments, as does dropout's threshold.
Kernels first gather them in `Sizes`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Vectors over rows or keys are padded to multiples of this, at least the largest BLOCK_M and BLOCK_N of the table.
PADDING = tl.constexpr(128)
# Blocks reach beyond the first and the last row of rel_key. Its gradient has room for the larger sides of ROOM tiles at
# both ends, to avoid tests.
ROOM = tl.constexpr(4)
# Arguments that change from call to call, excluded from specialisation to avoid variants for multiples of 16 and for 1.
SIZES = ["heads", "length", "mem_len", "key_len", "rel_len", "max_distance", "threshold"]

Pointer = Any  # a tensor for the launch, a pointer in the kernel, or None
Number = Any  # a number for the launch, a scalar in the kernel


class Matrix(NamedTuple):
    """Tensor (B, H, rows, D) whose last dimension is dense."""

    data: Pointer = None
    stride_b: Number = 0
    stride_h: Number = 0
    stride_l: Number = 0


class Rows(NamedTuple):
    """Query rows; from `content` on results of preprocess.py, in the order of their positions, and padded."""

    query: Matrix  # (B, H, L, D)
    content_bias: Pointer  # (H, D) or None
    position_bias: Pointer  # (H, D) or None
    scale: Number  # of the scores, positive
    content: Pointer  # (B, H, padded L, D): plus content_bias
    position: Pointer  # (B, H, padded L, D): plus position_bias
    same: Pointer  # (B, H, padded L) float32 or None: the segment term of a key in the same segment
    different: Pointer  # as same: the further term of a key in another segment


class Keys(NamedTuple):
    """Keys and values of the current segment, or of the memory before it."""

    key: Matrix = Matrix()  # (B, H, K, D); memory: (B, H, M, D) or None
    value: Matrix = Matrix()  # as key


class Segments(NamedTuple):
    """The segment term."""

    embed: Pointer = None  # (2, H, D): same, different
    bias: Pointer = None  # (H, D) or None
    query_ids: Pointer = None  # (B, L) int32
    key_ids: Pointer = None  # (B, padded M + K) int32
    least: Pointer = None  # (B, padded M + K / BOUND) int32, of key_ids
    largest: Pointer = None  # as least


class RankMask(NamedTuple):
    """Mask where row i sees key j if query_floor[i] <= key_rank[j] < query_rank[i], or its own key if sees_self[i]."""

    query_rank: Pointer = None  # (B, L) int32
    key_rank: Pointer = None  # (B, padded M + K) int32, the highest rank beyond M + K
    least: Pointer = None  # (B, padded M + K / BOUND) int32, of key_rank
    largest: Pointer = None  # as least
    query_floor: Pointer = None  # (B, L) int32 or None
    sees_self: Pointer = None  # (B, L) uint8 or None


class Copy(NamedTuple):
    """Matrix and its copy, made by unread.py; Nones: no copy."""

    given: Matrix = Matrix()
    copy: Matrix = Matrix()  # of the same shape


class Copies(NamedTuple):
    """Copies in which unread rows that hold NaN or infinity are zeros."""

    keys: Copy = Copy()  # of keys in backward, of values in forward
    memory: Copy = Copy()
    rel_key: Copy = Copy()


class KeyVectors(NamedTuple):
    """Vectors over keys for preprocess.py to pad."""

    ids: Pointer = None  # (B, M + K) int32: segments of keys
    rank: Pointer = None  # (B, M + K) int32


class DenseMask(NamedTuple):
    """Mask where row i sees key j if data[i, j] is not zero."""

    data: Pointer = None  # (B, H, L, M + K) uint8, any strides
    stride_b: Number = 0
    stride_h: Number = 0
    stride_l: Number = 0
    stride_k: Number = 0


class Mask(NamedTuple):
    """Either kind of mask, or none. Pairs without a row in rel_key are hidden too."""

    rank: RankMask
    dense: DenseMask


class Positions(NamedTuple):
    """Rows in the order of their positions; None: row i is at position i."""

    row: Pointer = None  # (B, L) int32: index in the call
    position: Pointer = None  # (B, L) int32, ascending


class Dropout(NamedTuple):
    """Dropout state: see xlnet_kernels/dropout.py."""

    state: Pointer  # (2,) int64: seed, offset; or None
    kept_scale: Number  # 1 / (1 - p)
    threshold: Number = None  # filled in by the kernel from a separate argument


class Output(NamedTuple):
    """Results of forward."""

    out: Pointer  # (B, L, H, D)
    lse: Pointer  # (B, H, L) float32
    row_max: Pointer  # as lse: subtracted before exponentials, in units of log2, less the term `same`
    row_sum: Pointer  # as lse: the sum of these exponentials; 0 in fully masked rows
    out_residual: Pointer  # as out: its rounding error; or None


class Given(NamedTuple):
    """Inputs of backward besides those of forward."""

    out: Pointer = None  # (B, L, H, D)
    out_residual: Pointer = None  # as out, or None
    row_max: Pointer = None  # (B, H, L) float32
    row_sum: Pointer = None  # (B, H, L) float32
    grad_out: Matrix = Matrix()  # (B, H, L, D)
    grad_lse: Pointer = None  # (B, H, L) float32 or None


class Backward(NamedTuple):
    """Rows of backward made by preprocess.py: in the order of their positions, and padded."""

    grad_out: Pointer = None  # (B, H, padded L, D), zeros in fully masked rows
    row_max: Pointer = None  # (B, H, padded L) float32, infinity in rows that do not exist
    inverse: Pointer = None  # (B, H, padded L) float32: 1 / row_sum, 0 in fully masked rows
    delta: Pointer = None  # (B, H, padded L) float32: rowsum(dO * O) - dlse, times inverse
    rank_least: Pointer = None  # (B, padded L / BOUND) int32 or None: of query_rank, rows in that order
    rank_largest: Pointer = None  # as rank_least
    floor_least: Pointer = None  # as rank_least, of query_floor
    floor_largest: Pointer = None  # as floor_least


class RowGradients(NamedTuple):
    """Results of the rows kernel."""

    query: Pointer  # (B, L, H, D)
    rel_key: Pointer  # (copies, H or B * H, room for blocks that reach beyond, rel_len, room, D) float32. Behind it
    # int32, with deterministic: the number of programs that have begun, the progress of each tile of rows. All zeros
    sums: Pointer  # (B, H, tiles, 4, D) float32: over rows, of dQ less its segment term, with TF32 of its position
    # term alone; dS of the same segment times (q + segment bias); dS of others times it; and dQ's segment term


class KeySums(NamedTuple):
    """Sums of the rows kernel in one-pass backward, initially zeros. Memory first, without scale."""

    key: Pointer = None  # (B, H, padded M + K, D) float32: dK
    value: Pointer = None  # as key: dV
    column: Pointer = None  # (B, H, padded M + K) float32: colsum(dS)


class KeyGradients(NamedTuple):
    """Results of the keys kernel."""

    key: Pointer  # (B, K, H, D)
    value: Pointer  # (B, K, H, D)
    memory_key: Pointer  # (B, M, H, D) or None
    memory_value: Pointer  # (B, M, H, D) or None
    sums: Pointer  # (B, H, tiles, D) float32: over keys, of colsum(dS) k


class ParameterGradients(NamedTuple):
    """Results of postprocess.py; None: not needed."""

    rel_key: Pointer  # (H or B * H, P, D)
    content_bias: Pointer  # (H, D)
    position_bias: Pointer  # (H, D)
    segment_embed: Pointer  # (2, H, D)
    segment_bias: Pointer  # (H, D)


class Meta(NamedTuple):
    """Compile-time constants of a kernel. For BLOCK_D and KEEP see operands.py."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    KEEP: Any
    HEAD_DIM: Any
    BOUNDED_BEHIND: Any  # rel_key has no row for some key before its query,
    BOUNDED_AHEAD: Any  # for some key after it
    PRECISION: Any  # of float32 products: "tf32", "tf32x3" or "ieee"
    QUADS: Any  # see shift.py's `rotate`
    SHIFT_PTX: Any  # see shift_ptx.py
    FOLDED: Any  # see operands.py's `rows_of_tile`
    LAZY: Any  # see softmax.py's LARGEST_SUM
    IN_REGISTERS: Any  # see tuning.py's `in_registers`
    NEEDS_REL: Any = None  # the gradient of rel_key is needed
    ORDERED: Any = None  # and accumulated in a fixed order: see ordered_accumulation.py
    ONE_PASS: Any = None  # the rows kernel makes the sums over rows too, and the keys kernel only rounds them


class Sizes(NamedTuple):
    """Lengths of a call."""

    heads: Any
    length: Any  # L
    mem_len: Any  # M
    keys: Any  # M + K
    rel_len: Any  # P
    max_distance: Any


class Head(NamedTuple):
    """Index of one head of one batch."""

    index: Any  # b * heads + h, int32
    b: Any  # int64
    h: Any  # int64


@triton.jit
def program(tiles):
    """(tile, group) of this program, from the first grid dimension, because the others are limited in size."""
    return tl.program_id(0) % tiles, tl.program_id(0) // tiles


@triton.jit
def head_at(index, size):
    return Head(index, (index // size.heads).to(tl.int64), (index % size.heads).to(tl.int64))


@triton.jit
def matrix_at(matrix, head):
    """Pointer to a matrix's first element of one head."""
    return matrix.data + (head.b * matrix.stride_b + head.h * matrix.stride_h)


@triton.jit
def of_rows(head, size):
    """Offset of a batch's elements in a vector over rows."""
    return head.b * size.length


@triton.jit
def of_head_rows(head, size):
    """Offset of a head's elements in a matrix over heads and rows."""
    return head.index.to(tl.int64) * size.length


@triton.jit
def padded(count):
    return tl.cdiv(count, PADDING) * PADDING


@triton.jit
def of_key_sums(head, size):
    """Offset of a head's keys in KeySums."""
    return head.index.to(tl.int64) * padded(size.keys)


@triton.jit
def of_padded_rows(head, size):
    """Offset of a head's rows in the padded rows of preprocess.py."""
    return head.index.to(tl.int64) * padded(size.length)


@triton.jit
def load_or(pointer, start, index, inside, other):
    """Load elements start + index where `inside`; `other` elsewhere and where there is no pointer."""
    if pointer is None:
        return tl.full(index.shape, other, tl.int32)
    # In a branch, because Triton would compile code after a return anyway.
    else:
        return tl.load((pointer + start) + index, mask=inside, other=other)


@triton.jit
def load_row(positions, at, inside, length):
    """Load rows number `at`, clamped to the rows of the call, because values are not checked on a GPU."""
    return tl.maximum(tl.minimum(tl.load(positions.row + at, mask=inside, other=0), length - 1), 0)


@triton.jit
def load_position(positions, at, exists, size):
    """Load positions number `at`, clamped to the segment.

    Clamped because values are not checked on a GPU and additions to rel_key's gradient have no bounds check.
    """
    position = tl.load(positions.position + at, mask=exists, other=0)
    return tl.maximum(tl.minimum(position, size.keys - size.mem_len - 1), 0)
