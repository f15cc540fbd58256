"""Online softmax forward, and dS backward. Scores are in units of log2 there, so that exp2 serves."""

from __future__ import annotations

import triton
import triton.language as tl

from .dropout import kept
from .mask import visible

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def online_softmax(score, term, row_max, row_sum, scale):
    """One step: (unnormalised P (BLOCK_M, BLOCK_N), row_max, row_sum, what earlier sums are multiplied with).

    The scores are score + term (BLOCK_M,), times scale.
    """
    larger = tl.maximum(row_max, (tl.max(score, 1) + term) * scale)
    pivot = tl.where(larger == -float("inf"), 0.0, larger)  # -inf - -inf would give NaN
    probability = tl.exp2(score * scale + (term * scale - pivot)[:, None])
    correction = tl.exp2(row_max - pivot)
    return probability, larger, row_sum * correction + tl.sum(probability, 1), correction


@triton.jit
def normalise(row_max, row_sum, kept_scale):
    """(what the sum of values is multiplied with, lse), both (BLOCK_M,); fully masked rows: 0 and minus infinity."""
    sees_any = row_sum != 0  # NaN counts
    factor = tl.where(sees_any, kept_scale / tl.where(sees_any, row_sum, 1.0), 0.0)
    return factor, tl.where(sees_any, (row_max + tl.log2(row_sum)) / LOG2_E, -float("inf"))


@triton.jit
def softmax_backward(score, base, dP, delta, scale, dropout, tile, mask, row_mask, every, near, j0, size, META):
    """(P with dropout, dS) of one tile, both (BLOCK_M, BLOCK_N).

    `base` (BLOCK_M,) is what is added to scaled scores, and `delta` (BLOCK_M,) is scaled too; every, near: as mask.py's
    `visibility` says.
    """
    if dropout.state is not None:
        keep = kept(dropout, tile, j0, META)
        dP = tl.where(keep, dP * dropout.kept_scale, 0.0)
    probability = tl.exp2(score * (scale * LOG2_E) + base[:, None])
    dS = probability * (dP * scale - delta[:, None])
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
