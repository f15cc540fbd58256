"""Fully masked rows: zeros for our operator, for transformers the average over all keys, which is made here."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import readable
from ..backends import reference
from ..functional import autocasts
from ..masks import RankMask
from ..segments import Segments
from ..two_streams import RowPositions

_SLOPE = 2.0**-20


def find_fully_masked_rows(
    mask: RankMask | Tensor, position: Tensor, empty: Tensor | None, length: int, mem_len: int, unidirectional: bool
) -> tuple[Tensor, Tensor] | None:
    """Fully masked query rows, those of empty targets aside.

    Returns:
        Their indices (B, n) among all rows, n the most that a sequence has, and which of these count; None for none.
    """
    keys = mem_len + length
    batch, count, device = position.shape[0], position.shape[1] - length, position.device
    if isinstance(mask, RankMask):
        rows = torch.arange(length, length + count, device=device).expand(batch, -1)
        visible = mask.rows(rows).for_stream("query").to_bool()
    else:
        visible = mask[:, 0, length:]
    if unidirectional:
        visible = visible & (torch.arange(keys, device=device) <= position[:, length:, None] + mem_len)
    fully_masked = ~visible.any(-1)
    if empty is not None:
        fully_masked = fully_masked & ~empty
    fully_masked = fully_masked.expand(batch, -1)
    # One synchronisation; where it cannot be had, in a compiler above all, all query rows.
    most = max(fully_masked.sum(-1).tolist(), default=0) if readable(fully_masked) else count
    if most == 0:
        return None
    counts, index = fully_masked.int().topk(most, -1)
    return index + length, counts.bool()


def average_weights(
    query: Tensor,
    key: Tensor,
    rel_key: Tensor,
    index: Tensor,
    *,
    segments: Segments | None,
    query_positions: RowPositions,
    dropout_p: float,
    memory: tuple[Tensor, Tensor] | None,
    **biases: Tensor,
) -> Tensor:
    """Attention maps (B, H, n, M + L) of the rows `index` (B, n): equal weights with the gradients of a softmax.

    transformers subtracts 1e30 from each of their scores, which makes them equal, and lets the gradient through. Here
    it comes from a softmax so flat that it does not matter where it is taken.
    """
    widths = (-1, query.shape[1], -1, query.shape[3])
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, mem_len = key.shape[2], 0 if memory is None else memory[0].shape[2]
    # Where rel_key ends at distance 0: zeros for the keys ahead, whose scores in transformers are those of other rows.
    rel_key = F.pad(rel_key, (0, 0, 0, 2 * keys - mem_len - rel_key.shape[-2]))
    device = query.device.type
    with torch.autocast(device, enabled=False) if autocasts(device) else nullcontext():
        if segments is not None:
            ids, embed = segments.query_ids.gather(1, index), segments.embed.to(wide)
            bias = None if segments.bias is None else segments.bias.to(wide)
            segments = Segments(ids, segments.key_ids, embed, bias)
        # in 32 bits and outside autocast, since 16 bits cannot hold gradients times the slope
        flat, _, _ = reference.attention_map(
            query.gather(2, index[:, None, :, None].expand(widths)).to(wide),
            key.to(wide),
            rel_key.to(wide),
            mem_len=mem_len,
            segments=segments,
            mask=None,
            query_positions=query_positions.position.gather(1, index),
            max_distance=keys,
            dropout_p=0.0,
            dropout_state=None,
            scale=query.shape[3] ** -0.5 * _SLOPE,
            **{name: bias.to(wide) for name, bias in biases.items()},
        )
        return F.dropout(1 / keys + (flat - flat.detach()) / _SLOPE, dropout_p)
