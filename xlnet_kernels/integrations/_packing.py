"""Packing of a padded batch's sequences into one row without padding, and unpacking."""

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
    """Packed row of T: the frames of a batch (B, L) with a gap between sequences; replaces a layer's mask.

    Convolutions read zeros at the gap, as at padding. It has the attributes and operators of a mask that Parakeet's
    convolution uses.

    Attributes:
        source: indices in B * L of the frames, in the order of the row.
        place: their indices in the row.
        flags: (1, T) bool, True at frames.
        visible: mask where every frame sees those of its own sequence.
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
        """Pack (B, L, width) into (1, T, width), zeros at gaps."""
        row = x.new_zeros(self.flags.shape[1], x.shape[2])
        return row.index_copy(0, self.place, x.flatten(0, 1).index_select(0, self.source))[None]

    def unpack(self, x: Tensor, batch: int, length: int) -> Tensor:
        """Unpack (1, T, width) into (B, L, width), zeros at padding."""
        rows = x.new_zeros(batch * length, x.shape[2])
        return rows.index_copy(0, self.source, x[0].index_select(0, self.place)).unflatten(0, (batch, length))


def packed_row(flags: Tensor, gap: int) -> PackedRow | None:
    """PackedRow of flags (B, L), True at frames; None where the row would not be shorter, or values are unknown."""
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
