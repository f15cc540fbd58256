"""Conversion of other libraries' dense attention masks for the operator, done once for all layers of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._checks import readable
from .._content import row_hashes
from ..masks import HIGHEST, RankMask

Found = TypeVar("Found")


class LayerMask(NamedTuple):
    """Mask of a layer, and its fully masked rows (B, L) bool, or None without such rows."""

    visible: RankMask | Tensor | None
    fully_masked: Tensor | None = None


EVERYTHING = LayerMask(None)


def hide_keys(mask: RankMask | Tensor | None, hidden: Tensor) -> RankMask | Tensor:
    """The mask that also hides the keys where `hidden` (B, K) is True, for every query."""
    if mask is None:
        return RankMask.padding(attention_mask=~hidden)
    if isinstance(mask, RankMask):
        mask = mask.expand(hidden.shape[0])
        own = mask.sees_self
        # Because sees_self shows a row's own key regardless of its rank.
        if own is not False:
            own = own & ~hidden[:, -mask.query_rank.shape[1] :]
        return RankMask(mask.query_rank, mask.key_rank.masked_fill(hidden, HIGHEST), mask.query_floor, own)
    return mask & ~hidden[:, None, None]


class OfLast(Generic[Found]):
    """Cache of the result of `find` for the last tensor, by content, so that all layers of a model share one mask.

    It keeps no reference to the tensor, and notices every change of it.
    """

    def __init__(self, find: Callable[[Tensor], Found]) -> None:
        self.find = find
        self.last: tuple[tuple, Tensor, Found] | None = None

    def __call__(self, tensor: Tensor) -> Found:
        if not known(tensor) or not tensor.numel():
            return self.find(tensor)
        # Read once, because another thread may write it.
        last = self.last
        kind, hashes = (tensor.shape, tensor.dtype, tensor.device), row_hashes(_distinct(tensor))
        if last is not None and last[0] == kind and torch.equal(last[1], hashes):
            return last[2]
        # Because a tensor made in inference mode could not be used in training later.
        with torch.inference_mode(False):
            found = self.find(tensor)
        self.last = kind, hashes, found
        return found


def known(tensor: Tensor) -> bool:
    """Whether the values can be read and are valid beyond this call: not in a trace or a captured graph."""
    if not readable(tensor) or torch.jit.is_tracing():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _distinct(tensor: Tensor) -> Tensor:
    """The tensor without the copies in expanded dimensions."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def layer_mask(mask: Any) -> LayerMask | None:
    """LayerMask of a mask (B, 1 or H, L, K), where True, or 0 in a mask added to scores, means may attend.

    None for a mask that the operator does not support: not a tensor (FlexAttention's), or with values other than 0 and
    the lowest number.
    """
    if mask is None:
        return EVERYTHING
    if not isinstance(mask, Tensor):
        return None
    found = _found(mask)
    if found is None or found is EVERYTHING or found.visible is not None:
        return found
    return LayerMask(visible_pairs(mask), found.fully_masked)


@OfLast
def padding_mask(mask: Tensor) -> LayerMask:
    """LayerMask of a mask (B, 1, K), 0 at padding; fully masked rows give zeros."""
    return LayerMask(RankMask.padding(mask[:, 0] == 0))


@OfLast
def _found(mask: Tensor) -> LayerMask | None:
    """LayerMask with `visible` None where ranks cannot express the mask."""
    if mask.dim() != 4:
        return None
    is_known = known(mask)
    if mask.is_floating_point() and (not is_known or not ((mask == 0) | (mask <= torch.finfo(mask.dtype).min)).all()):
        return None
    visible = visible_pairs(mask)
    if is_known and visible.all():
        return EVERYTHING
    fully_masked = ~visible.any(-1).any(1)
    if not is_known:
        return LayerMask(None, fully_masked)
    return LayerMask(
        spans(visible[:, 0]) if visible.shape[1] == 1 else None, fully_masked if fully_masked.any() else None
    )


def visible_pairs(mask: Tensor) -> Tensor:
    return mask == 0 if mask.is_floating_point() else mask.bool()


def spans(visible: Tensor) -> RankMask | None:
    """RankMask of a mask (B, L, K) whose rows see a contiguous range of keys, padding aside; else None.

    >>> spans(torch.ones(2, 4, 4, dtype=torch.bool).tril()).query_rank.tolist()
    [[1, 2, 3, 4], [1, 2, 3, 4]]
    """
    keys = visible.shape[2]
    flags = visible.view(torch.uint8) if visible.is_contiguous() else visible.to(torch.uint8)
    sees = visible.any(2)
    first = flags.argmax(2)
    end = (keys - flags.flip(2).argmax(2)).where(sees, first)
    place = torch.arange(keys, device=visible.device).expand(visible.shape[0], -1)
    mask = RankMask(end, place.where(visible.any(1), HIGHEST), first)
    return mask if torch.equal(mask.to_bool(), visible) else None


def visible_ranks(mask: Tensor | None, hidden: bool) -> RankMask | Tensor | None:
    """Mask for the operator from a tensor ((B,) L or 1, K).

    With `hidden`, True means may not attend (NeMo); else nonzero means may attend (ESPnet).

    A RankMask where possible, None where nothing is hidden, else bool (B, 1, L, K). Fully masked rows give zeros in
    both libraries, as in the operator.
    """
    if mask is None or isinstance(mask, RankMask):
        return mask
    found = (_hidden if hidden else _seen)(mask)
    return _dense(mask, hidden)[:, None] if found is _DENSE else found.visible


_DENSE = LayerMask(None)


def _dense(mask: Tensor, hidden: bool) -> Tensor:
    mask = mask if mask.dim() == 3 else mask[None]
    return mask == 0 if hidden else mask != 0


def _ranks_of(visible: Tensor) -> LayerMask:
    if not known(visible):
        return _DENSE
    if visible.all():
        return EVERYTHING
    ranks = RankMask.padding(attention_mask=visible[:, 0]) if visible.shape[1] == 1 else spans(visible)
    return _DENSE if ranks is None else LayerMask(ranks)


_hidden = OfLast(lambda mask: _ranks_of(_dense(mask, True)))
_seen = OfLast(lambda mask: _ranks_of(_dense(mask, False)))
