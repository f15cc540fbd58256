"""Stand-ins for NeMo's relative attention and for its encoder, which makes the masks.

Order of the table, score and scale are the operator's with ``max_distance = K - 1``. Masks are True where a row may NOT
attend; fully masked rows give zeros. `update_cache` is NeMo's own: in streaming the cached keys come first.

The Longformer variant has a table of the distances left .. -right and sees only those. Results are NeMo's: attention
under that window where left and right are equal and there are no global tokens. Otherwise position scores go to other
distances (`_by_distance`), and global tokens have none (`_add_global_tokens`).

ConformerEncoder makes a mask (B, T, T) in every call. Accelerated, it makes vectors where all its attention is
accelerated too, so that memory for masks is linear in length as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import is_free_in_onnx
from ..dropout import in_force
from ..masks import HIGHEST, LOWEST, RankMask
from ..merging import merge
from ._masks import visible_ranks
from ._window import Window
from .adapter import (
    Original,
    attend,
    attend_with_lse,
    check_forward,
    check_no_window,
    project_positions,
    shared,
    split,
    window_of,
)


class RelPositionMultiHeadAttention(Original):
    """Stand-in for attention with positions (1 or B, P, n_feat), P of at least 2 K - 1."""

    backend: str | None = None
    window: Window | None = None
    made_here = ("backend", "window", "kept")

    def check_accelerable(self) -> None:
        check_forward(self, "RelPositionMultiHeadAttention", "query", "key", "value", "mask", "pos_emb", "cache")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, pos_emb: Tensor, cache: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        keys = key.shape[1] + (0 if cache is None else cache.shape[1])
        window = window_of(self, query.shape[1], keys)
        if query.shape[1] > keys or pos_emb.shape[1] < 2 * keys - 1:
            check_no_window(window, self)
            return super().forward(query, key, value, mask, pos_emb, cache)
        key, value, query, cache = self.update_cache(key=key, value=value, query=query, cache=cache)
        mask, dropout_p = visible_ranks(mask, hidden=True), in_force(self.dropout)
        rows = pos_emb[:, : 2 * keys - 1]
        with self._precision():
            q, k, v = self.forward_qkv(*_in_float32(query, key, value))
            rel_key = self._table(rows if window is None else window.rows(rows, keys))
            biases = self.pos_bias_u, self.pos_bias_v
            out = attend(q, k, v, rel_key, *biases, mask, window=window, backend=self.backend, dropout_p=dropout_p)
            out = self.linear_out(out)
        return out if cache is None else (out, cache)

    def _table(self, pos_emb: Tensor) -> Tensor:
        return project_positions(self, shared(pos_emb), self.linear_pos, self.d_k)

    def _precision(self) -> AbstractContextManager:
        """NeMo's precision context, which computes attention in bfloat16 under float16 autocast."""
        for base in type(self).__mro__:
            own = getattr(sys.modules.get(base.__module__), "avoid_float16_autocast_context", None)
            if own is not None:
                return own()
        return nullcontext()


class RelPositionMultiHeadAttentionLongformer(RelPositionMultiHeadAttention):
    """Stand-in for attention with positions (1 or B, left + right + 1, n_feat) and padding (B, T)."""

    no_window = "it has a window of its own, att_context_size"

    def check_accelerable(self) -> None:
        name = "RelPositionMultiHeadAttentionLongformer"
        check_forward(self, name, "query", "key", "value", "pad_mask", "pos_emb", "cache")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, pad_mask: Tensor, pos_emb: Tensor, cache: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        left, right = self.att_context_size
        frames = key.shape[1]
        served = cache is None and query.shape[1] == frames and min(left, right) >= 0 and max(left, right) > 0
        if not served or pos_emb.shape[1] != left + right + 1:
            own: Any = super(RelPositionMultiHeadAttention, self)  # NeMo's
            return own.forward(query, key, value, pad_mask, pos_emb, cache)
        ranks = RankMask.padding(attention_mask=~pad_mask)
        mask = RankMask(ranks.query_rank.masked_fill(pad_mask, LOWEST), ranks.key_rank)
        window = Window(left, right)
        # Because the window may be wider than the audio is long.
        if not is_free_in_onnx(frames):
            window = Window(min(left, frames - 1), min(right, frames - 1))
        biases, dropout_p = (self.pos_bias_u, self.pos_bias_v), in_force(self.dropout)
        with self._precision():
            inputs = _in_float32(query, key, value)
            q, k, v = self.forward_qkv(*inputs)
            rel_key = _by_distance(self._table(pos_emb), left, right)
            rel_key = rel_key[..., left - window.left : left + window.right + 1, :]
            options: dict[str, Any] = dict(backend=self.backend, dropout_p=dropout_p)
            out, lse = attend_with_lse(q, k, v, rel_key, *biases, mask, window, **options)
            if self.global_tokens:
                out = self._add_global_tokens(out, lse, inputs, (q, k, v), pad_mask)
            return self.linear_out(out.transpose(1, 2).flatten(2))

    def _add_global_tokens(
        self, out: Tensor, lse: Tensor, inputs: tuple[Tensor, ...], heads: tuple[Tensor, ...], pad_mask: Tensor
    ) -> Tensor:
        """The window's output (B, H, T, D) with the global keys added, and the rows of the global queries.

        These scores are q.k only. A global key inside of a window counts twice, and padding is visible as a global key.
        """
        spacing = self.global_tokens_spacing
        index = torch.arange(out.shape[2], device=out.device)[: self.global_tokens * spacing : spacing]
        query, key, value = heads
        if self.global_attn_separate:
            projections = self.global_q, self.global_k, self.global_v
            pairs = zip(projections, inputs, strict=True)
            query, key, value = (split(projection(x), self.d_k) for projection, x in pairs)
        scores = query @ key[:, :, index].mT * self.d_k**-0.5
        of_global = F.dropout(scores.softmax(-1), in_force(self.dropout)) @ heads[2][:, :, index]
        out, _ = merge([out, of_global.to(out.dtype)], [lse, scores.logsumexp(-1).to(lse.dtype)])
        out = out.masked_fill(pad_mask[:, None, :, None], 0.0)
        # NeMo reads its global queries (tokens, B, H, D) as (B, H, tokens, D): if there are several, they belong to
        # other heads and sequences.
        rows = query[:, :, index].permute(2, 0, 1, 3).reshape(*query.shape[:2], len(index), -1)
        seen = ~pad_mask[:, None, None]
        rows = F.scaled_dot_product_attention(rows, key, value, seen, dropout_p=in_force(self.dropout))
        return out.index_copy(2, index, rows.to(out.dtype))


def _in_float32(*inputs: Tensor) -> tuple[Tensor, ...]:
    """The inputs in float32, as in NeMo under autocast."""
    return tuple(x.float() for x in inputs) if torch.is_autocast_enabled() else inputs


def _by_distance(rel_key: Tensor, left: int, right: int) -> Tensor:
    """The table (..., left + right + 1, D) in the order of distances left .. -right, with NeMo's assignment of scores.

    NeMo adds the first `left` columns to the first of 2 max(left, right) + 1 and the others to the last. With unequal
    sides these are other distances, and some distances have no position score.
    """
    if left == right:
        return rel_key
    wide, last = max(left, right), left + right
    column = torch.arange(wide - left, wide + right + 1, device=rel_key.device)
    row = column.where(column < left, column - 2 * wide + last).where(
        (column < left) | (column >= 2 * wide - right), last + 1
    )
    return F.pad(rel_key, (0, 0, 0, 1)).index_select(-2, row)


class ConformerEncoder(Original):
    """Stand-in for the encoder's method that makes masks."""

    made_here = ()

    def _create_masks(
        self, att_context_size: Any, padding_length: Tensor, max_audio_length: int, offset: Tensor | None, device: Any
    ) -> tuple[Tensor, Any]:
        """NeMo's padding (B, T), True where there is no frame, and the attention mask in ranks."""
        ours = all(isinstance(x, RelPositionMultiHeadAttention) for x in self.layers.modules() if _takes_mask(x))
        style = getattr(self, "att_context_style", None)
        if not ours or self.self_attention_model != "rel_pos" or style not in _STYLES:
            return super()._create_masks(  # type: ignore[misc]
                att_context_size, padding_length, max_audio_length, offset, device
            )
        frame = torch.arange(max_audio_length, device=device)
        padding = frame >= padding_length[:, None]
        if offset is not None:
            padding = padding | (frame < offset[:, None])
        first, end = _STYLES[style](frame, *att_context_size)
        ranks = [row.expand(padding.shape) for row in (end, frame, first)]
        mask = RankMask(ranks[0].masked_fill(padding, LOWEST), ranks[1].masked_fill(padding, HIGHEST), ranks[2])
        return padding, mask if offset is None else _OfAllRows(mask)


def _takes_mask(module: nn.Module) -> bool:
    return any(base.__name__ == "MultiHeadAttention" for base in type(module).__mro__)


class _OfAllRows:
    """Mask that includes cached frames, whose rows NeMo cuts off by `mask[:, cache_len:]`."""

    def __init__(self, mask: RankMask) -> None:
        self.mask = mask

    def __getitem__(self, index: tuple[slice, slice]) -> RankMask:
        mask = self.mask
        assert mask.query_floor is not None, "ConformerEncoder gives one"
        return RankMask(mask.query_rank[index], mask.key_rank, mask.query_floor[index])


def _regular(frame: Tensor, left: int, right: int) -> tuple[Tensor, Tensor]:
    """The first visible frame of each frame, and the end of its visible frames."""
    first = frame - left if left >= 0 else torch.zeros_like(frame)
    end = frame + right + 1 if right >= 0 else torch.full_like(frame, frame.shape[0])
    return first, end


def _chunked(frame: Tensor, left: int, right: int) -> tuple[Tensor, Tensor]:
    if right == -1:
        return _regular(frame, left, right)
    chunk = right + 1
    own = frame.div(chunk, rounding_mode="floor")
    before = left // chunk if left >= 0 else 10000  # NeMo's "all of them"
    return (own - before) * chunk, (own + 1) * chunk


def _chunked_with_look_ahead(frame: Tensor, left: int, chunk: int, right: int) -> tuple[Tensor, Tensor]:
    if left + chunk + right == -3:
        return _regular(frame, -1, -1)
    start = frame.div(chunk, rounding_mode="floor") * chunk
    return start - left, start + chunk + right


_STYLES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "regular": _regular,
    "chunked_limited": _chunked,
    "chunked_limited_with_rc": _chunked_with_look_ahead,
}
