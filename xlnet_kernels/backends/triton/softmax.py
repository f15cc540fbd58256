"""Online softmax forward, and dS backward. Scores are in units of log2 there, so that exp2 serves."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import of_padded_rows
from .dropout import kept
from .mask import RowMask, load_row_mask, sees_any_key, visible
from .operands import load_rows, rows_of_tile
from .shift import load_tile

LOG2_E = tl.constexpr(1.4426950408889634)
# Exponentials are taken of scores less row_max before the largest score is known. Only where those of a row sum up to
# more than this in a tile is row_max raised. The quotient does not depend on it, and float16 has room for it.
LARGEST_SUM = tl.constexpr(16384.0)
UNSEEN = tl.constexpr(-3.4028234663852886e38)  # row_max before the first key: any exponential is infinite, or 0 of -inf


class Statistics(NamedTuple):
    """The statistics of a tile's rows, as forward left them; P = exp2(scaled score - row_max) * inverse."""

    row_max: Any  # (BLOCK_M,); infinity in rows that do not exist
    inverse: Any  # (BLOCK_M,): 1 / row_sum, 0 in fully masked rows
    delta: Any  # (BLOCK_M,): rowsum(dO * O) - dlse, times inverse


@triton.jit
def _exponential(score, scale, addend):
    """exp2 of score (BLOCK_M, BLOCK_N) * scale + addend (BLOCK_M,), rounded once: left to the compiler, it would be
    rounded twice in some blocks."""
    return tl.exp2(tl.fma(score, scale, addend[:, None]))


@triton.jit
def exponentials(score, term, row_max, scale):
    """(unnormalised P (BLOCK_M, BLOCK_N), its sum for each row) of scores score + term (BLOCK_M,), times scale, less
    row_max."""
    probability = _exponential(score, scale, term * scale - row_max)
    return probability, tl.sum(probability, 1)


@triton.jit
def raised(score, term, row_max, scale):
    """(row_max, no less than the largest score; the factor of earlier sums; P and its sums)."""
    larger = tl.maximum(row_max, (tl.max(score, 1) + term) * scale)
    unseen = larger == UNSEEN  # the term of a row that sees nothing may be NaN
    probability = _exponential(score, scale, tl.where(unseen, 0.0, term * scale - larger))
    return larger, tl.exp2(row_max - larger), probability, tl.sum(probability, 1)


@triton.jit
def log_sum_exp(row_max, row_sum, same):
    """(BLOCK_M,); minus infinity where no score is larger. `same` is the segment term that row_max leaves out."""
    return tl.where(row_sum != 0, (row_max + same + tl.log2(row_sum)) / LOG2_E, -float("inf"))


@triton.jit
def fully_masked_or_nan(row_sum, positions, mask, head, number, span, size, META):
    """row_sum (BLOCK_M,) of a tile's rows, 0 in fully masked ones alone: NaN where all visible scores are minus
    infinity."""
    if tl.min(row_sum, 0) == 0:
        tile = load_tile(positions, head, number, size, META)  # again: the main loop has no registers to keep it in
        rank, floor, own = load_row_mask(mask, tile, size)
        row_mask = RowMask(rank, floor, own, 0, 0)
        seen = sees_any_key(tile, row_mask, mask, span, size, META)
        row_sum = tl.where((row_sum == 0) & seen, float("nan"), row_sum)
    return row_sum


@triton.jit
def largest_of(DTYPE: tl.constexpr):
    """The largest finite number of a 16-bit dtype: where rounding gives infinity, the residual is counted from it."""
    return 65504.0 if DTYPE == tl.float16 else 3.3895313892515355e38


@triton.jit
def residual_of(chunk, rounded):
    """The rounding error of a chunk of the output."""
    largest = largest_of(rounded.dtype)
    return (chunk - tl.clamp(rounded.to(tl.float32), -largest, largest)).to(rounded.dtype)


@triton.jit
def load_out(given, out_row, tile, c, META):
    """Chunk c (BLOCK_M, BLOCK_D) of the output before it was rounded, in float32."""
    out = load_rows(given.out, out_row, META.HEAD_DIM, tile.inside, c, META)
    if given.out_residual is None:
        return out.to(tl.float32)
    else:
        largest = largest_of(out.dtype)
        residual = load_rows(given.out_residual, out_row, META.HEAD_DIM, tile.inside, c, META)
        return tl.clamp(out.to(tl.float32), -largest, largest) + residual.to(tl.float32)


@triton.jit
def load_statistics(backward, tile, size, META):
    at = of_padded_rows(tile.head, size) + tile.start + rows_of_tile(META)
    return Statistics(tl.load(backward.row_max + at), tl.load(backward.inverse + at), tl.load(backward.delta + at))


@triton.jit
def softmax_backward(
    score, term, dP, statistics, scale, dropout, tile, mask, row_mask, every, near, j0, size, META
):  # fmt: skip
    """(P with dropout, dS / scale) of one tile, both (BLOCK_M, BLOCK_N).

    The scores are those of forward's `raised`; every, near: as mask.py's `visibility` says. 16 bits have no room for dS
    times scale: its sums are multiplied.
    """
    if dropout.state is not None:
        keep = kept(dropout, tile, j0, META)
        dP = tl.where(keep, dP * dropout.kept_scale, 0.0)
    # First of all row_max, of which row_sum knows how it was rounded: both together would be rounded otherwise.
    exponential = _exponential(score, scale, term * scale - statistics.row_max)
    dS = exponential * (dP * statistics.inverse[:, None] - statistics.delta[:, None])
    probability = exponential * statistics.inverse[:, None]
    # Both are hidden: delta of a row that sees a NaN is NaN, also where the row sees nothing.
    if not every and near:
        seen = visible(tile, row_mask, mask, j0, size, META, True)
        probability = tl.where(seen, probability, 0.0)
        dS = tl.where(seen, dS, 0.0)
    if not every and not near:
        seen = visible(tile, row_mask, mask, j0, size, META, False)
        probability = tl.where(seen, probability, 0.0)
        dS = tl.where(seen, dS, 0.0)
    dropped = probability
    if dropout.state is not None:
        dropped = tl.where(keep, probability * dropout.kept_scale, 0.0)
    return dropped, dS
