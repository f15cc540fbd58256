"""Online softmax in forward, and dS in backward. Scores are in units of log2, to use exp2."""

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
# Exponentials of scores less row_max are taken while the largest score is unknown. row_max is raised only where a row's
# exponentials in a tile sum to more than this. The quotient does not depend on it, and it fits into float16.
LARGEST_SUM = tl.constexpr(16384.0)
UNSEEN = tl.constexpr(-3.4028234663852886e38)  # initial row_max: any exponential is infinite, or 0 for -inf


class Statistics(NamedTuple):
    """Forward's statistics of a tile's rows; P = exp2(scaled score - row_max) * inverse."""

    row_max: Any  # (BLOCK_M,); infinity in nonexistent rows
    inverse: Any  # (BLOCK_M,): 1 / row_sum, 0 in fully masked rows
    delta: Any  # (BLOCK_M,): rowsum(dO * O) - dlse, times inverse


@triton.jit
def _exponential(score, scale, addend):
    """exp2 of score (BLOCK_M, BLOCK_N) * scale + addend (BLOCK_M,), rounded once by an explicit fma.

    Explicit because the compiler would round twice in some blocks.
    """
    return tl.exp2(tl.fma(score, scale, addend[:, None]))


@triton.jit
def exponentials(score, term, row_max, scale):
    """Unnormalised P (BLOCK_M, BLOCK_N) and its row sums, of (score + term (BLOCK_M,)) * scale - row_max."""
    probability = _exponential(score, scale, term * scale - row_max)
    return probability, tl.sum(probability, 1)


@triton.jit
def raised(score, term, row_max, scale):
    """Raised row_max, at least the largest score; the factor of earlier sums; P and its sums."""
    larger = tl.maximum(row_max, (tl.max(score, 1) + term) * scale)
    # Because the term of a fully masked row may be NaN.
    unseen = larger == UNSEEN
    probability = _exponential(score, scale, tl.where(unseen, 0.0, term * scale - larger))
    return larger, tl.exp2(row_max - larger), probability, tl.sum(probability, 1)


@triton.jit
def log_sum_exp(row_max, row_sum, same):
    """Log-sum-exp (BLOCK_M,), minus infinity where no score is larger; `same`: the segment term missing in row_max."""
    return tl.where(row_sum != 0, (row_max + same + tl.log2(row_sum)) / LOG2_E, -float("inf"))


@triton.jit
def fully_masked_or_nan(row_sum, positions, mask, head, number, span, size, META):
    """row_sum (BLOCK_M,), 0 in fully masked rows only: NaN where all visible scores are minus infinity."""
    if tl.min(row_sum, 0) == 0:
        # Loaded again, because the main loop has no registers to keep it.
        tile = load_tile(positions, head, number, size, META)
        rank, floor, own = load_row_mask(mask, tile, size)
        row_mask = RowMask(rank, floor, own, 0, 0)
        seen = sees_any_key(tile, row_mask, mask, span, size, META)
        row_sum = tl.where((row_sum == 0) & seen, float("nan"), row_sum)
    return row_sum


@triton.jit
def largest_of(DTYPE: tl.constexpr):
    """Largest finite number of a 16-bit dtype: the base of the residual where rounding gives infinity."""
    return 65504.0 if DTYPE == tl.float16 else 3.3895313892515355e38


@triton.jit
def residual_of(chunk, rounded):
    """Rounding error of a chunk of the output."""
    largest = largest_of(rounded.dtype)
    return (chunk - tl.clamp(rounded.to(tl.float32), -largest, largest)).to(rounded.dtype)


@triton.jit
def load_out(given, out_row, tile, c, META):
    """Chunk c (BLOCK_M, BLOCK_D) of the unrounded output, in float32."""
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
    """P with dropout and dS / scale of one tile, both (BLOCK_M, BLOCK_N).

    The scores are those of forward's `raised`; every, near: see mask.py's `visibility`. The scale multiplies the sums,
    because dS times scale does not fit into 16 bits.
    """
    if dropout.state is not None:
        keep = kept(dropout, tile, j0, META)
        dP = tl.where(keep, dP * dropout.kept_scale, 0.0)
    # row_max is subtracted first, as in row_sum, because adding both terms at once would round differently.
    exponential = _exponential(score, scale, term * scale - statistics.row_max)
    dS = exponential * (dP * statistics.inverse[:, None] - statistics.delta[:, None])
    probability = exponential * statistics.inverse[:, None]
    # Both are masked, because delta of a row that sees a NaN is NaN, also at its hidden keys.
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
