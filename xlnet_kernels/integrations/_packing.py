"""Sequences of a padded batch in one row without their padding, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..masks import HIGHEST, LOWEST, RankMask
from ._masks import OfLast, known


@dataclass(frozen=True, eq=False)
class PackedRow:
    """The frames of a batch (B, L) in one row of T, with a gap between sequences; stands for a layer's mask there.

    Convolutions read zeros at the gap, as at padding. The attributes and operators that Parakeet's convolution asks of
    its mask are here.

    Attributes:
        source: indices in B * L of what is in the row, in its order.
        place: their indices in the row.
        flags: (1, T) bool, True at frames.
        visible: every frame sees those of its own sequence.
        longest: the number of frames from the first to the last of the longest sequence.
    """

    source: Tensor
    place: Tensor
    flags: Tensor
    visible: RankMask
    longest: int

    dtype = torch.bool

    def __invert__(self) -> Tensor:
        """(1, 1, 1, T), True at gaps."""
        return ~self.flags[:, None, None]

    def pack(self, x: Tensor) -> Tensor:
        """(1, T, width) of (B, L, width), zeros at gaps."""
        row = x.new_zeros(self.flags.shape[1], x.shape[2])
        return row.index_copy(0, self.place, x.flatten(0, 1).index_select(0, self.source))[None]

    def unpack(self, x: Tensor, batch: int, length: int) -> Tensor:
        """The reverse, zeros at padding."""
        rows = x.new_zeros(batch * length, x.shape[2])
        return rows.index_copy(0, self.source, x[0].index_select(0, self.place)).unflatten(0, (batch, length))


def packed_row(flags: Tensor, gap: int) -> PackedRow | None:
    """Of flags (B, L), True at frames; None where the row would be no shorter than the batch, or values are unknown."""
    return _packed_row(gap)(flags) if known(flags) else None


@cache
def _packed_row(gap: int) -> Callable[[Tensor], PackedRow | None]:
    return OfLast(lambda flags: _make(flags, gap))


def _make(flags: Tensor, gap: int) -> PackedRow | None:
    batch, length = flags.shape
    frame = torch.arange(length, device=flags.device)
    first = frame.where(flags, length).amin(1, keepdim=True)
    end = (frame + 1).where(flags, 0).amax(1, keepdim=True)
    counts = (end - first).clamp(min=0)[:, 0]
    total = int(counts.sum()) + gap * (batch - 1)
    if not counts.any() or total >= batch * length:
        return None
    source = ((frame >= first) & (frame < end)).flatten().nonzero()[:, 0]
    sequence = source // length
    place = torch.arange(len(source), device=flags.device) + gap * sequence
    start = counts.cumsum(0) - counts + gap * torch.arange(batch, device=flags.device)
    is_frame = torch.zeros(total, dtype=torch.bool, device=flags.device)
    is_frame[place] = flags.flatten()[source]
    frames = is_frame[place]
    real, own = place[frames], sequence[frames]

    def rank(values: Tensor, elsewhere: int) -> Tensor:
        return torch.full_like(is_frame, elsewhere, dtype=torch.int32).index_copy(0, real, values.int())[None]

    visible = RankMask(rank((start + counts)[own], LOWEST), rank(real, HIGHEST), rank(start[own], 0))
    return PackedRow(source, place, is_frame[None], visible, int(counts.max()))
