"""Padding mask kept as one row for all queries, where a library would expand it to all pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import map_instances
from ..masks import LOWEST, RankMask
from ._masks import EVERYTHING, LayerMask, OfLast, known

_KEPT = {"unsqueeze", "__getitem__", "to", "bool", "detach", "__and__"}  # functions that give another row
_SKIPPED = {"expand", "transpose"}  # functions that repeat it for each query


class PaddingRow(Tensor):
    """Flags (B, K) of frames, also in the shapes of transformers' masks: (B, 1, K), (B, 1, 1, K).

    Repeating the row for each query and multiplying by the queries' flags are skipped. All other functions operate on
    the flags and give a plain tensor.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in _SKIPPED and isinstance(args[0], cls):
            return args[0]
        plain = map_instances(cls, _plain, (args, kwargs or {}))
        if name == "__and__" and not all(isinstance(x, cls) for x in args):
            flags, other = plain[0] if isinstance(args[0], cls) else plain[0][::-1]
            if other.shape[-1:] != (1,) or not other.all():  # more than the flags of the queries
                return flags & other
            return _row(flags)
        found = function(*plain[0], **plain[1])
        return _row(found) if name in _KEPT else found

    def plain(self) -> Tensor:
        return _plain(self)

    def pairs(self) -> Tensor:
        """Mask (B, 1, K, K) of (B, 1, 1, K), True where both the query and the key are frames."""
        return _plain(self) & _plain(self).mT


class TracedRow:
    """Replacement of `PaddingRow`, of flags (B, K), under torch.onnx.export, which cannot trace a subclass of Tensor.

    It has the methods of a mask that ParakeetEncoder and its convolutions use.
    """

    dtype = torch.bool

    def __init__(self, flags: Tensor) -> None:
        self.flags = flags

    def _same(self, *arguments: Any) -> TracedRow:
        return self

    unsqueeze = expand = transpose = __and__ = _same

    def __invert__(self) -> Tensor:
        return ~self.plain()

    def int(self) -> Tensor:
        return self.flags.int()

    def plain(self) -> Tensor:
        """(B, 1, 1, K)."""
        return self.flags[:, None, None]

    def pairs(self) -> Tensor:
        """(B, 1, K, K), True where both the query and the key are frames."""
        return self.plain() & self.plain().mT


def _plain(flags: Tensor) -> Tensor:
    return flags.as_subclass(Tensor)


def _row(flags: Tensor) -> PaddingRow:
    return flags.as_subclass(PaddingRow)


def padding_row(flags: Any) -> Any:
    """The flags (B, K) as a `PaddingRow`; unchanged if None or with unknown values."""
    is_row = isinstance(flags, Tensor) and flags.dim() == 2 and known(flags)
    return _row(flags) if is_row else flags


@OfLast
def of_keys(frames: Tensor) -> LayerMask:
    """Mask where every query, padding included, sees the frames (B, K)."""
    if frames.all():
        return EVERYTHING
    fully_masked = ~frames.any(1, keepdim=True).expand_as(frames)
    return LayerMask(RankMask.padding(attention_mask=frames), fully_masked if fully_masked.any() else None)


@OfLast
def of_pairs(frames: Tensor) -> LayerMask:
    """Mask where frames (B, K) see frames, and padding is fully masked."""
    if known(frames) and frames.all():
        return EVERYTHING
    ranks = RankMask.padding(attention_mask=frames)
    return LayerMask(RankMask(ranks.query_rank.masked_fill(~frames, LOWEST), ranks.key_rank), ~frames)
