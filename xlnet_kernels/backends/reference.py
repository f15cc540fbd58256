"""Reference implementation: plain torch, any dtype and device, gradients by autograd, every map materialised.

    score[i,j] = scale * ((q_i + u).k_j + (q_i + v).r[p] + (q_i + b).s[different?(i,j)]),  p = max_distance - distance
    out_i      = sum_j dropout(softmax_j(score where visible))[i,j] v_j,                   distance = pos_i + M - j

Dai et al. 2019 (Transformer-XL), section 3.3; Yang et al. 2019 (XLNet), sections 2.4 and 2.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ranks import own_key, ranks_see
from ..call import Call, mem_len, positions_by_row, with_memory
from ..dropout import keep_mask

DEVICE = None  # any
DTYPES = None  # any


def max_head_dim(dtype: torch.dtype, device: torch.device | None = None) -> None:
    """No limit."""


def unavailable(device: torch.device | None = None) -> None:
    """None: always available."""


def rel_attention(call: Call) -> tuple[Tensor, Tensor]:
    """Output (B, H, L, D) and log-sum-exp of the visible scores (B, H, L) of a call checked by `call_checks`."""
    probability, lse, visible = attention_map(call)
    return weighted_sum(probability, call, visible), lse


def attention_map(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities after dropout (B, H, L, M + K), log-sum-exp (B, H, L), and the mask of visible pairs."""
    query, rel_key, max_distance = call.query, call.rel_key, call.max_distance
    key, memory = with_memory(call.memory_key, call.key), mem_len(call)
    batch, heads, length, _ = query.shape
    keys = key.shape[2]

    # distance of each (query, key) pair, and the row of rel_key that encodes it
    position = positions_by_row(call.query_positions, call.query_order)
    if position is None:
        position = torch.arange(length, device=query.device)[None]
    distance = (position + memory)[:, :, None] - torch.arange(keys, device=query.device)  # (B or 1, L, M + K)
    row = max_distance - distance
    has_row = (row >= 0) & (row < rel_key.shape[-2])  # other pairs are invisible
    row = row.clamp(0, rel_key.shape[-2] - 1)[:, None].expand(batch, heads, -1, -1)

    visible = has_row[:, None]
    if call.query_rank is not None and call.key_rank is not None:
        sees = ranks_see(call.query_rank, call.key_rank, call.query_floor)
        if call.sees_self is not None:
            sees = sees | (own_key(position, memory, keys) & call.sees_self[:, :, None])
        visible = visible & sees[:, None]
    if call.mask is not None:
        visible = visible & call.mask
    visible = visible.expand(batch, heads, length, keys)

    # unread rows count as zero, because zero times NaN would be NaN, in gradients as well
    sees_any = visible.any(-1, keepdim=True)
    query, key = torch.where(sees_any, query, 0.0), _zero_unless(visible.any(2), key)
    rel_key = _zero_unless(_rows_read(rel_key, row, visible), rel_key)

    # (a) + (c): content and its global bias
    score = _plus(query, call.content_bias) @ key.mT

    # (b) + (d): position and its global bias, shifted so that column j holds distance(i, j)
    by_row = _plus(query, call.position_bias) @ rel_key.mT  # (B, H, L, P)
    score = score + by_row.gather(-1, row)

    # relative segment term
    if call.segment_embed is not None and call.query_ids is not None and call.key_ids is not None:
        by_kind = torch.einsum("bhld,shd->bhls", _plus(query, call.segment_bias), call.segment_embed)
        different = (call.query_ids[:, None, :, None] != call.key_ids[:, None, None, :]).expand_as(score)
        score = score + torch.where(different, by_kind[..., 1:], by_kind[..., :1])

    # softmax over the visible keys; a fully masked row gives zeros, zero gradients and lse = -inf
    score = torch.where(visible, score * call.scale, -torch.inf).masked_fill(~sees_any, 0.0)
    probability = score.softmax(-1).masked_fill(~visible, 0.0)
    lse = score.to(torch.promote_types(score.dtype, torch.float32)).logsumexp(-1)
    lse = lse.masked_fill(~sees_any[..., 0], -torch.inf)

    if call.dropout_state is not None:
        keep = keep_mask(call.dropout_state, batch, heads, length, keys, call.dropout_p)
        probability = probability * keep / (1 - call.dropout_p)
    return probability, lse, visible


def weighted_sum(probability: Tensor, call: Call, visible: Tensor) -> Tensor:
    """The output, from `attention_map`'s probabilities and visible pairs."""
    out = probability @ _zero_unless(visible.any(2), with_memory(call.memory_value, call.value))
    return torch.where(visible.any(-1, keepdim=True), out, 0.0)


def _plus(query: Tensor, bias: Tensor | None) -> Tensor:
    """Query rows plus a bias (H, D)."""
    return query if bias is None else query + bias[:, None]


def _zero_unless(read: Tensor, rows: Tensor) -> Tensor:
    """`rows` (..., D), zeros where `read` (...) is False."""
    return torch.where(read[..., None], rows, 0.0)


def _rows_read(rel_key: Tensor, row: Tensor, visible: Tensor) -> Tensor:
    """Mask (B, H, P) or (H, P) of the rows of rel_key read by visible pairs; `row`: each pair's row."""
    rows = rel_key.shape[-2]
    read = torch.zeros(*row.shape[:2], rows + 1, dtype=torch.bool, device=row.device)
    read = read.scatter(-1, torch.where(visible, row, rows).flatten(2), True)[..., :rows]
    return read.any(0) if rel_key.dim() == 3 else read
