"""Positions, masks and segments of content and query rows stacked for one call of the operator."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import check_bool_mask, check_matrix, check_not_padding, check_range
from ._torch import exports_to_onnx, register
from .masks import HIGHEST, LOWEST, RankMask


@register
@dataclass(frozen=True, eq=False)
class RowPositions:
    """Positions of query rows, sorted once for all layers and backward passes that share them.

    `rel_attention` accepts it as `query_positions`; a tensor would be sorted again in each pass. Make a new one when
    positions change, because it holds copies.

    Args:
        position: (B, L) int32 or int64, the position of each query row in the segment.

    Attributes:
        ascending: (B, L) int32, the same positions in ascending order.
        row: (B, L) int32, the rows with these positions; equal positions keep the order of their rows.

    Raises:
        ValueError: `position` has the wrong shape or dtype.

    >>> RowPositions(torch.tensor([[0, 1, 2, 1]])).row.tolist()
    [[0, 1, 3, 2]]
    """

    position: Tensor
    # Always computed from `position`; arguments only because FSDP rebuilds dataclasses by dataclasses.replace.
    ascending: Tensor = field(default=None, kw_only=True)  # type: ignore[assignment]
    row: Tensor = field(default=None, kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        position = check_matrix("RowPositions: position", self.position)
        if position.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"RowPositions: position must hold int32 or int64, got {position.dtype}")
        # Because ONNX has no stable sort, and the operator needs no order there.
        if exports_to_onnx():
            ascending, row = position, torch.arange(position.shape[1], device=position.device).expand_as(position)
        else:
            ascending, row = position.sort(dim=1, stable=True)
        object.__setattr__(self, "ascending", ascending.clamp(LOWEST, HIGHEST).int())
        object.__setattr__(self, "row", row.int())

    def to(self, device: torch.device | str) -> RowPositions:
        """These positions on `device`."""
        return RowPositions(self.position.to(device))


def split_positions(positions: Tensor | RowPositions | None) -> tuple[Tensor | None, Tensor | None]:
    """query_positions and query_order for the operator: see ops.py."""
    if isinstance(positions, RowPositions):
        return positions.ascending, positions.row
    return positions, None


def stack_segments(segment_ids: Tensor, positions: Tensor | None, mem_len: int) -> tuple[Tensor, Tensor]:
    """Segment ids of all rows and all keys, int32, from those of the current segment (B, L); memory is segment 0."""
    if segment_ids.dtype == torch.int64:
        check_range("segment_ids", segment_ids, -(2**31), 2**31)
    ids = segment_ids.int()
    return ids if positions is None else ids.gather(1, positions), F.pad(ids, (mem_len, 0))


def is_one_stream(mask: RankMask | Tensor, length: int) -> bool:
    """Whether a mask from `check_mask` is a RankMask of `one_stream`, or dense with one row for all."""
    return mask.one_stream if isinstance(mask, RankMask) else length > 1 and mask.shape[2] == 1


def mask_of_targets(
    targets: Tensor, length: int, mem_len: int, ahead: bool, mask: RankMask | Tensor | None = None
) -> RankMask | Tensor:
    """The query stream's default mask, which always hides the token at its own position.

    Args:
        targets: (B, N), the positions of the query rows.
        ahead: whether rows see keys ahead of them. Then the targets' tokens are hidden from every other row, because a
            later layer would leak them. If not, the mask is causal.
        mask: a mask of one stream, from `check_mask`: the targets' tokens are hidden there too.
    """
    if mask is None and not ahead:
        return RankMask.causal(1, length, mem_len, device=targets.device)
    batch = targets.shape[0]
    flags = torch.zeros(batch, length, dtype=torch.bool, device=targets.device).scatter(1, targets, True)
    if mask is None:
        mask = RankMask.full(batch, length, mem_len, targets.device)
    if isinstance(mask, RankMask):
        return mask.hide_targets(flags)
    return mask & ~F.pad(flags, (mem_len, 0))[:, None, None]


def stack_mask(
    mask: RankMask | Tensor | None, positions: Tensor | None, h: Tensor, n_head: int, mem_len: int
) -> RankMask | Tensor | None:
    """The mask of all rows, content rows first: they see the query stream's keys and themselves.

    Args:
        mask: as in `TwoStreamAttention.forward`.
        positions: (B, L + N), of content and query rows, or None for content rows alone.
        h: (B, L, d_model), for its shape and device.

    Raises:
        ValueError: the mask does not fit; the text says why.
    """
    if mask is None:
        return None
    batch, length = h.shape[:2]
    keys = mem_len + length
    mask = check_mask(mask, h, n_head, mem_len)
    if isinstance(mask, RankMask):
        if positions is None:
            mask = mask.expand(batch)
            sees_self = torch.ones_like(mask.query_rank, dtype=torch.bool)
        else:
            mask = mask.rows(positions)
            sees_self = (torch.arange(positions.shape[1], device=h.device) < length).expand(batch, -1)
        return mask.seeing_self(sees_self).contiguous()

    mask = mask.expand(-1, -1, length, keys)
    own = torch.eye(length, dtype=torch.bool, device=h.device)
    content = mask | F.pad(own, (mem_len, 0))
    if positions is None:
        return content
    rows = positions[:, None, length:, None].expand(-1, mask.shape[1], -1, keys)
    return torch.cat([content.expand(batch, -1, -1, -1), mask.expand(batch, -1, -1, -1).gather(2, rows)], 2)


def check_mask(mask: RankMask | Tensor, h: Tensor, n_head: int, mem_len: int) -> RankMask | Tensor:
    """The checked mask: a RankMask, or a 4-dimensional bool tensor that broadcasts to (B, H, L, M + L)."""
    batch, length = h.shape[:2]
    keys = mem_len + length
    if isinstance(mask, RankMask):
        check_rank_mask(mask, batch, length, keys)
        return mask
    mask = check_bool_mask(mask, h, "h")
    check_not_padding(mask, batch, length, keys)
    shape = tuple(mask.shape)
    if mask.dim() < 4:
        mask = mask[(None,) * (3 - mask.dim())][:, None]
    wanted = (batch, n_head, length, keys)
    if mask.dim() > 4 or any(size != 1 and size != want for size, want in zip(mask.shape, wanted, strict=True)):
        raise ValueError(f"mask must broadcast to (B, L, M + L) = {(batch, length, keys)}, got {shape}")
    return mask


def check_rank_mask(mask: RankMask, batch: int, length: int, keys: int) -> None:
    """Require one row for each position and `keys` columns, for one sequence or all."""
    rows, columns = tuple(mask.query_rank.shape), mask.key_rank.shape[1]
    if rows not in ((batch, length), (1, length)) or columns != keys:
        raise ValueError(
            f"mask must have query_rank ({batch}, {length}) and key_rank ({batch}, {keys}), got {rows} and "
            f"{tuple(mask.key_rank.shape)}"
        )
