"""Fully masked rows as in transformers: the average over all keys, added to the operator's zeros."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import readable
from .._torch import autocasts
from ..backends import reference
from ..call import TENSORS, Call, mem_len, positions_by_row, replace
from ..masks import RankMask

_SLOPE = 2.0**-20


def find_fully_masked_rows(
    mask: RankMask | Tensor, position: Tensor, empty: Tensor | None, length: int, mem_len: int, unidirectional: bool
) -> tuple[Tensor, Tensor] | None:
    """Fully masked query rows, except those of empty targets.

    Returns:
        Their indices (B, n) among all rows, n being the largest number in a sequence, and a mask of valid indices; or
        None.
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
    # One synchronisation; where it is impossible, as in a compiler, all query rows.
    most = max(fully_masked.sum(-1).tolist(), default=0) if readable(fully_masked) else count
    if most == 0:
        return None
    counts, index = fully_masked.int().topk(most, -1)
    return index + length, counts.bool()


def average_weights(call: Call, index: Tensor) -> Tensor:
    """Attention maps (B, H, n, M + L) of the rows `index` (B, n): equal weights with the gradients of a softmax.

    transformers subtracts 1e30 from each of their scores, which makes them equal, and keeps the gradient. Here the
    gradient comes from a softmax so flat that it does not depend on the scores.

    call: from `collect`; its masks are ignored, and its query rows have positions.
    """
    query, memory, positions = call.query, mem_len(call), positions_by_row(call.query_positions, call.query_order)
    keys = memory + call.key.shape[2]
    assert positions is not None
    wide = torch.promote_types(query.dtype, torch.float32)
    device = query.device.type
    # In 32 bits and outside autocast, because 16 bits cannot hold gradients times the slope.
    with torch.autocast(device, enabled=False) if autocasts(device) else nullcontext():
        tensors = {name: getattr(call, name) for name, argument in TENSORS.items() if argument.is_floating}
        changes: dict[str, Any] = {
            name: None if x is None else x.to(wide) for name, x in tensors.items() if not name.endswith("value")
        }
        rows = index[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        # Where rel_key ends at distance 0: zeros for the keys ahead, whose scores in transformers belong to other rows.
        changes["rel_key"] = F.pad(call.rel_key.to(wide), (0, 0, 0, 2 * keys - memory - call.rel_key.shape[-2]))
        changes["query"] = query.gather(2, rows).to(wide)
        changes |= {
            "query_ids": None if call.query_ids is None else call.query_ids.gather(1, index),
            "query_positions": positions.gather(1, index),
            "scale": query.shape[3] ** -0.5 * _SLOPE,
            "max_distance": keys,
        }
        changes |= dict.fromkeys(("query_order", "query_rank", "key_rank", "query_floor", "sees_self", "mask"))
        flat, _, _ = reference.attention_map(replace(call, **changes))
        return F.dropout(1 / keys + (flat - flat.detach()) / _SLOPE, call.dropout_p)
