"""`merge`: exact attention over several sets of keys from the attention over each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from calls of `rel_attention` that see disjoint parts of them.

    Outputs are weighted by the softmax of their log-sum-exps and added: exact, and differentiable in both. A row that
    is fully masked in every part gives zeros, a log-sum-exp of -inf and zero gradients.

    Args:
        outs: (B, H, L, D) each, of one floating dtype.
        lses: (B, H, L) each, the log-sum-exps of the same calls (``return_lse=True``).

    Returns:
        (B, H, L, D) in the dtype of `outs`, and the log-sum-exp (B, H, L).

    Raises:
        ValueError: there is no part, or the parts do not fit each other; the text names the part.

    >>> (q, k, v), rel_key = torch.randn(3, 1, 2, 5, 8), torch.randn(2, 10, 8)
    >>> is_first = torch.arange(5)[None] < 2
    >>> masks = RankMask.padding(is_first), RankMask.padding(~is_first)
    >>> parts = [rel_attention(q, k, v, rel_key, mask=mask, return_lse=True) for mask in masks]
    >>> out, lse = merge(*zip(*parts))
    >>> torch.allclose(out, rel_attention(q, k, v, rel_key), atol=1e-5)
    True
    """
    _check(outs, lses)
    stacked = torch.stack(list(lses))
    # Filled, to avoid gradients of -inf minus -inf.
    fully_masked = (stacked == -torch.inf).all(0)
    stacked = stacked.masked_fill(fully_masked, 0.0)
    # Not exp(lse - total), to avoid the rounding error of a total far from 0, in gradients as well.
    largest = stacked.detach().amax(0)
    exponentials = (stacked - largest).exp()
    total_weight = exponentials.sum(0)
    total = (total_weight.log() + largest).masked_fill(fully_masked, -torch.inf)
    weights = (exponentials / total_weight).masked_fill(fully_masked, 0.0)[..., None]
    out = sum(part.to(total.dtype) * weight for part, weight in zip(outs, weights, strict=True))
    assert isinstance(out, Tensor)
    return out.to(outs[0].dtype), total


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)) or not parts or not all(isinstance(part, Tensor) for part in parts):
            raise ValueError(f"{name} must be a list of at least one tensor, got {type(parts).__name__}")
    if len(outs) != len(lses):
        raise ValueError(f"lses must have one log-sum-exp for each of {len(outs)} outputs, got {len(lses)}")
    first = outs[0]
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != first.shape or out.dtype != first.dtype or not out.is_floating_point():
            raise ValueError(
                f"outs[{index}] must be floating and like outs[0], {first.dtype} of shape {tuple(first.shape)}, got "
                f"{out.dtype} of shape {tuple(out.shape)}"
            )
        if lse.shape != out.shape[:-1] or lse.dtype != lses[0].dtype or not lse.is_floating_point():
            dtype = f"{lses[0].dtype} like lses[0]" if index else "floating"
            raise ValueError(
                f"lses[{index}] must be {dtype} and of shape {tuple(out.shape[:-1])}, got {lse.dtype} of shape "
                f"{tuple(lse.shape)}"
            )
