"""The definition of the maths: plain torch, any dtype and device, gradients by autograd, every map materialised.

    score[i,j] = scale * ((q_i + u).k_j + (q_i + v).r[p] + (q_i + b).s[different?(i,j)]),  p = max_distance - distance
    out_i      = sum_j dropout(softmax_j(score where visible))[i,j] v_j,                   distance = pos_i + M - j

Dai et al. 2019 (Transformer-XL), section 3.3; Yang et al. 2019 (XLNet), sections 2.4 and 2.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dropout import keep_mask
from ..masks import RankMask
from ..segments import Segments
from ..two_streams import RowPositions, position_of_rows

DEVICE = None  # any
DTYPES = None  # any


def max_head_dim(dtype: torch.dtype) -> None:
    """Any."""


def unavailable() -> None:
    """Always there."""


def rel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor,
    *,
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    segments: Segments | None,
    mask: RankMask | Tensor | None,
    query_positions: Tensor | RowPositions | None,
    max_distance: int,
    memory: tuple[Tensor, Tensor] | None,
    dropout_p: float,
    dropout_state: Tensor | None,
    scale: float,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, L, D) and log-sum-exp of the visible scores (B, H, L); arguments as checked by `functional`."""
    mem_len = 0
    if memory is not None:
        mem_len = memory[0].shape[2]
        key, value = torch.cat([memory[0], key], 2), torch.cat([memory[1], value], 2)
    probability, lse, visible = attention_map(
        query,
        key,
        rel_key,
        mem_len=mem_len,
        content_bias=content_bias,
        position_bias=position_bias,
        segments=segments,
        mask=mask,
        query_positions=query_positions,
        max_distance=max_distance,
        dropout_p=dropout_p,
        dropout_state=dropout_state,
        scale=scale,
    )
    return weighed_sum(probability, value, visible), lse


def attention_map(
    query: Tensor,
    key: Tensor,
    rel_key: Tensor,
    *,
    mem_len: int,
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    segments: Segments | None,
    mask: RankMask | Tensor | None,
    query_positions: Tensor | RowPositions | None,
    max_distance: int,
    dropout_p: float,
    dropout_state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities after dropout (B, H, L, M + K), log-sum-exp (B, H, L), and which pairs are visible, shaped as the
    first; `key` starts with mem_len of memory."""
    batch, heads, length, _ = query.shape
    keys = key.shape[2]

    # distance of each (query, key) pair, and the row of rel_key that encodes it
    position = position_of_rows(query_positions)
    if position is None:
        position = torch.arange(length, device=query.device)[None]
    distance = (position + mem_len)[:, :, None] - torch.arange(keys, device=query.device)  # (B or 1, L, M + K)
    row = max_distance - distance
    has_row = (row >= 0) & (row < rel_key.shape[-2])  # other pairs are invisible
    row = row.clamp(0, rel_key.shape[-2] - 1)[:, None].expand(batch, heads, -1, -1)

    visible = has_row[:, None]
    if isinstance(mask, RankMask):
        visible = visible & mask.to_bool(None, position, mem_len)[:, None]
    elif mask is not None:
        visible = visible & mask
    visible = visible.expand(batch, heads, length, keys)

    # what no pair reads counts as zero: zero times NaN would be NaN, in gradients as well
    sees_any = visible.any(-1, keepdim=True)
    query, key = torch.where(sees_any, query, 0.0), _zero_unless(visible.any(2), key)
    rel_key = _zero_unless(_rows_read(rel_key, row, visible), rel_key)

    # (a) + (c): content and its global bias
    score = (query if content_bias is None else query + content_bias[:, None]) @ key.mT

    # (b) + (d): position and its global bias, shifted so that column j holds distance(i, j)
    by_row = (query if position_bias is None else query + position_bias[:, None]) @ rel_key.mT  # (B, H, L, P)
    score = score + by_row.gather(-1, row)

    # relative segment term
    if segments is not None:
        query_s = query if segments.bias is None else query + segments.bias[:, None]
        by_kind = torch.einsum("bhld,shd->bhls", query_s, segments.embed)
        different = (segments.query_ids[:, None, :, None] != segments.key_ids[:, None, None, :]).expand_as(score)
        score = score + torch.where(different, by_kind[..., 1:], by_kind[..., :1])

    # softmax over the visible keys; a fully masked row gives zeros, zero gradients and lse = -inf
    score = torch.where(visible, score * scale, -torch.inf).masked_fill(~sees_any, 0.0)
    probability = score.softmax(-1).masked_fill(~visible, 0.0)
    lse = score.to(torch.promote_types(score.dtype, torch.float32)).logsumexp(-1)
    lse = lse.masked_fill(~sees_any[..., 0], -torch.inf)

    if dropout_state is not None:  # there is one where dropout_p > 0
        keep = keep_mask(dropout_state, batch, heads, length, keys, dropout_p)
        probability = probability * keep / (1 - dropout_p)
    return probability, lse, visible


def weighed_sum(probability: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """The output of `attention_map`'s probabilities and visible pairs."""
    out = probability @ _zero_unless(visible.any(2), value)
    return torch.where(visible.any(-1, keepdim=True), out, 0.0)


def _zero_unless(read: Tensor, rows: Tensor) -> Tensor:
    """`rows` (..., D), zeros where `read` (...) is False."""
    return torch.where(read[..., None], rows, 0.0)


def _rows_read(rel_key: Tensor, row: Tensor, visible: Tensor) -> Tensor:
    """Which rows of rel_key a visible pair reads, (B, H, P) or (H, P); `row` (B, H, L, M + K): that of each pair."""
    rows = rel_key.shape[-2]
    read = torch.zeros(*row.shape[:2], rows + 1, dtype=torch.bool, device=row.device)
    read = read.scatter(-1, torch.where(visible, row, rows).flatten(2), True)[..., :rows]
    return read.any(0) if rel_key.dim() == 3 else read
