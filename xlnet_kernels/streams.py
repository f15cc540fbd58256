"""Content and query rows stacked for one call of the operator: their masks and segments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import check_bool_mask, check_not_padding
from .masks import RankMask


def stack_segments(segment_ids: Tensor, positions: Tensor | None, mem_len: int) -> tuple[Tensor, Tensor]:
    """Segments of all rows and of all keys, from those of the current segment (B, L); memory is segment 0."""
    return segment_ids if positions is None else segment_ids.gather(1, positions), F.pad(segment_ids, (mem_len, 0))


def mask_of_targets(targets: Tensor, length: int, mem_len: int, ahead: bool) -> RankMask:
    """What the query stream sees where no mask is given: never the token of its own position.

    Args:
        targets: (B, N), the positions of the query rows.
        ahead: whether rows see keys ahead of them: then the targets' tokens are hidden from every other row, so that
            no layer brings them back. If not, the mask is causal.
    """
    if not ahead:
        return RankMask.causal(1, length, mem_len, device=targets.device)
    seen = torch.ones(targets.shape[0], length, dtype=torch.bool, device=targets.device).scatter(1, targets, False)
    return RankMask.padding(attention_mask=seen, mem_len=mem_len)


def stack_mask(
    mask: RankMask | Tensor | None, positions: Tensor | None, h: Tensor, n_head: int, mem_len: int
) -> RankMask | Tensor | None:
    """The mask of all rows: content rows see what the query stream sees there and themselves, then query rows.

    Args:
        mask: as in `TwoStreamAttention.forward`.
        positions: (B, L + N), of content and query rows, or None for content rows alone.
        h: (B, L, d_model), for its shape and device.

    Raises:
        ValueError: the mask does not fit; the text says how.
    """
    if mask is None:
        return None
    batch, length = h.shape[:2]
    keys = mem_len + length
    if isinstance(mask, RankMask):
        check_rank_mask(mask, batch, length, keys)
        if positions is None:
            return mask.for_stream("content")
        sees_self = torch.arange(positions.shape[1], device=h.device) < length
        return mask.for_stream("query").rows(positions).seeing_self(sees_self.expand(batch, -1))

    mask = check_bool_mask(mask, h, "h")
    check_not_padding(mask, batch, length, keys)
    shape = tuple(mask.shape)
    if mask.dim() < 4:
        mask = mask[(None,) * (3 - mask.dim())][:, None]
    wanted = (batch, n_head, length, keys)
    if mask.dim() > 4 or any(size not in (1, want) for size, want in zip(mask.shape, wanted, strict=True)):
        raise ValueError(f"mask must broadcast to (B, L, M + L) = {(batch, length, keys)}, got {shape}")
    mask = mask.expand(-1, -1, length, keys)
    own = torch.eye(length, dtype=torch.bool, device=h.device)
    content = mask | F.pad(own, (mem_len, 0))
    if positions is None:
        return content
    rows = positions[:, None, length:, None].expand(-1, mask.shape[1], -1, keys)
    return torch.cat([content.expand(batch, -1, -1, -1), mask.expand(batch, -1, -1, -1).gather(2, rows)], 2)


def check_rank_mask(mask: RankMask, batch: int, length: int, keys: int) -> None:
    """A row for each position and `keys` columns, for one sequence or all."""
    rows, columns = tuple(mask.query_rank.shape), mask.key_rank.shape[1]
    if rows not in ((batch, length), (1, length)) or columns != keys:
        raise ValueError(
            f"mask must have query_rank ({batch}, {length}) and key_rank ({batch}, {keys}), got {rows} and "
            f"{tuple(mask.key_rank.shape)}"
        )
