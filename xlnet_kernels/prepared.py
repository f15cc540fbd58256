"""Attention inputs that a model prepares once for all its layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._torch import register, with_tensors_on
from .masks import RankMask
from .two_streams import RowPositions

# Keys and values (B, H, M, D), and the rel_key table (H, P, D) or (2, H, P, D), or None where it is not projected yet.
Projected = tuple[Tensor, Tensor, Tensor | None]


@register
@dataclass(eq=False)
class Prepared:
    """Inputs of `TwoStreamAttention` shared by all layers, for L content rows and N query rows stacked.

    It is registered with torch's pytrees, so hooks that move or cast a module's arguments find its tensors.

    Args:
        length: L, the number of content rows, which come first and give keys and values.
        rel_pos: positions to project, (P, d_model), or (2, P, d_model) for forward and reversed halves of a batch;
            None where `projected` has them.
        rel_rows: the range of the projected positions that the call needs, first and number.
        mask, segment_rows, positions, mapping, need_weights: as `TwoStreamAttention.attend` takes them.
        wanted: (B, n), the rows that attend; None for all. The others only give keys and values.
        attends: False to compute keys and values only; the other fields are then ignored.
        entries: for cached decoding, (sequence, row, place) of n content rows each: keys and values of these rows go
            to these places of `projected`, and all rows attend to all places.
        places: for cached decoding, the number of places: where `projected` is None, it is made of zeros.
    """

    length: int
    rel_pos: Tensor | None = None
    rel_rows: tuple[int, int] = (0, 0)
    mask: RankMask | Tensor | None = None
    segment_rows: tuple[Tensor, Tensor] | None = None
    positions: RowPositions | None = None
    mapping: Tensor | None = None
    need_weights: bool = False
    wanted: Tensor | None = None
    attends: bool = True
    entries: tuple[Tensor, Tensor, Tensor] | None = None
    places: int = 0

    def to(self, device: torch.device | str | None) -> Prepared:
        """These inputs on `device`."""
        return with_tensors_on(device, self)

    def of_rows(self, wanted: Tensor) -> Prepared:
        """The inputs of a last layer that needs these rows only: attention and feed-forward of n rows, not L + N."""
        mask, segment_rows, positions = of_rows(wanted, self.mask, self.segment_rows, self.positions)
        return replace(self, mask=mask, segment_rows=segment_rows, positions=positions, wanted=wanted)

    def enter(self, key: Tensor, value: Tensor, cached: Projected | None) -> tuple[Tensor, Tensor]:
        """Write the keys and values of `entries` in place; returns those of all places."""
        assert self.entries is not None, "called in cached decoding"
        sequence, row, place = self.entries
        if cached is None:
            # Zeros, because unwritten places have the weight 0, and 0 times NaN would be NaN.
            shape = (*key.shape[:2], self.places, key.shape[3])
            cached = key.new_zeros(shape), value.new_zeros(shape), None
        for kept, new in zip(cached[:2], (key, value), strict=True):
            kept[sequence, :, place] = new[sequence, :, row]
        return cached[:2]


def pick_rows(rows: Tensor, wanted: Tensor) -> Tensor:
    """The rows at `wanted` (B, n) of rows (B, R, d_model)."""
    return rows.gather(1, wanted[:, :, None].expand(-1, -1, rows.shape[2]))


def of_rows(
    wanted: Tensor,
    mask: RankMask | Tensor | None,
    segment_rows: tuple[Tensor, Tensor] | None,
    positions: RowPositions | None,
) -> tuple[RankMask | Tensor | None, tuple[Tensor, Tensor] | None, RowPositions]:
    """The mask, segment_rows and positions of `stack_rows`, for the rows `wanted` (B, n) only."""
    if isinstance(mask, RankMask):
        mask = mask.rows(wanted).contiguous()
    elif mask is not None:
        index = wanted[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
        mask = mask.expand(wanted.shape[0], -1, -1, -1).gather(2, index)
    if segment_rows is not None:
        segment_rows = (segment_rows[0].gather(1, wanted), segment_rows[1])
    position = wanted if positions is None else positions.position.gather(1, wanted)
    return mask, segment_rows, RowPositions(position)
