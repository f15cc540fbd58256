"""A padding mask that stays one row for all queries, where a library makes a map of all pairs of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import map_instances
from ..masks import LOWEST, RankMask
from ._masks import EVERYTHING, LayerMask, OfLast, known

_KEPT = {"unsqueeze", "__getitem__", "to", "bool", "detach", "__and__"}  # what makes another row of a row
_SKIPPED = {"expand", "transpose"}  # what repeats it for each query


class PaddingRow(Tensor):
    """Flags (B, K) of frames, and what transformers' masks make of them: (B, 1, K), (B, 1, 1, K).

    Repeating the row for each query is left out, and so is the product with the flags of the queries. All else is an
    operation on the flags, and gives a plain tensor.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in _SKIPPED and isinstance(args[0], cls):
            return args[0]
        plain = map_instances(cls, _plain, (args, kwargs or {}))
        if name == "__and__" and not all(isinstance(x, cls) for x in args):
            flags, other = plain[0] if isinstance(args[0], cls) else plain[0][::-1]
            if other.shape[-1:] != (1,) or not other.all():  # more than the flag of each query that it sees
                return flags & other
            return _row(flags)
        found = function(*plain[0], **plain[1])
        return _row(found) if name in _KEPT else found

    def plain(self) -> Tensor:
        return _plain(self)

    def pairs(self) -> Tensor:
        """(B, 1, K, K) of (B, 1, 1, K), True where both the query and the key are frames."""
        return _plain(self) & _plain(self).mT


class TracedRow:
    """A `PaddingRow` of flags (B, K) while torch.onnx.export traces, which cannot follow a subclass of Tensor.

    It has what ParakeetEncoder and its convolutions ask of their mask.
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
    """The flags (B, K) as a `PaddingRow`, unless there are none or their values are not known."""
    is_row = isinstance(flags, Tensor) and flags.dim() == 2 and known(flags)
    return _row(flags) if is_row else flags


@OfLast
def of_keys(frames: Tensor) -> LayerMask:
    """Every query sees the frames (B, K), padding too."""
    if frames.all():
        return EVERYTHING
    fully_masked = ~frames.any(1, keepdim=True).expand_as(frames)
    return LayerMask(RankMask.padding(attention_mask=frames), fully_masked if fully_masked.any() else None)


@OfLast
def of_pairs(frames: Tensor) -> LayerMask:
    """Frames (B, K) see frames, and padding sees nothing."""
    if known(frames) and frames.all():
        return EVERYTHING
    ranks = RankMask.padding(attention_mask=frames)
    return LayerMask(RankMask(ranks.query_rank.masked_fill(~frames, LOWEST), ranks.key_rank), ~frames)
