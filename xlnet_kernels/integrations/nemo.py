"""Stand-ins for NeMo's relative attention, and for the encoder that makes its masks.

Order of the table, score and scale are the operator's with ``max_distance = K - 1``. Masks are True where a row may NOT
attend; fully masked rows give zeros. `update_cache` is NeMo's own: in streaming the keys of the cache come before.

The Longformer variant has a table of the distances left .. -right and sees those alone. It is served where left and
right are equal; where they are not, NeMo adds its position scores to other columns than those they are made for. Global
tokens attend, and are attended to, without positions: refused.

ConformerEncoder makes a mask (B, T, T) in every call. Accelerated, it makes vectors where all its attention is
accelerated too, so that memory for masks is linear in length as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..dropout import in_force
from ..masks import HIGHEST, LOWEST, RankMask
from ._masks import visible_ranks
from .adapter import Original, attend, check_forward, project_positions, shared


class RelPositionMultiHeadAttention(Original):
    """Positions (1 or B, P, n_feat), P of at least 2 K - 1."""

    backend: str | None = None
    made_here = ("backend", "kept")

    def check_accelerable(self) -> None:
        check_forward(self, "RelPositionMultiHeadAttention", "query", "key", "value", "mask", "pos_emb", "cache")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, pos_emb: Tensor, cache: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        keys = key.shape[1] + (0 if cache is None else cache.shape[1])
        if query.shape[1] > keys or pos_emb.shape[1] < 2 * keys - 1:
            return super().forward(query, key, value, mask, pos_emb, cache)
        key, value, query, cache = self.update_cache(key=key, value=value, query=query, cache=cache)
        out = self._attend(query, key, value, visible_ranks(mask, hidden=True), pos_emb[:, : 2 * keys - 1])
        return out if cache is None else (out, cache)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: RankMask | Tensor | None,
        pos_emb: Tensor,
        max_distance: int | None = None,
    ) -> Tensor:
        if torch.is_autocast_enabled():
            query, key, value = query.float(), key.float(), value.float()
        with self._precision():
            rel_key = project_positions(self, shared(pos_emb), self.linear_pos, self.d_k)
            q, k, v = self.forward_qkv(query, key, value)
            out = attend(
                q,
                k,
                v,
                rel_key,
                self.pos_bias_u,
                self.pos_bias_v,
                mask,
                max_distance=max_distance,
                backend=self.backend,
                dropout_p=in_force(self.dropout),
            )
            return self.linear_out(out)

    def _precision(self) -> AbstractContextManager:
        """NeMo's own: it computes attention in bfloat16 where autocast says float16."""
        for base in type(self).__mro__:
            own = getattr(sys.modules.get(base.__module__), "avoid_float16_autocast_context", None)
            if own is not None:
                return own()
        return nullcontext()


class RelPositionMultiHeadAttentionLongformer(RelPositionMultiHeadAttention):
    """Positions (1 or B, left + right + 1, n_feat), padding (B, T)."""

    def check_accelerable(self) -> None:
        name = "RelPositionMultiHeadAttentionLongformer"
        check_forward(self, name, "query", "key", "value", "pad_mask", "pos_emb", "cache")
        if self.global_tokens:
            raise ValueError(
                f"{name} cannot be accelerated with global tokens, which attend without positions, got global_tokens = "
                f"{self.global_tokens}"
            )
        left, right = self.att_context_size
        if left != right or left < 1:
            raise ValueError(
                f"{name} can be accelerated where it sees as much on the left as on the right, got att_context_size = "
                f"{[left, right]}: NeMo adds its position scores to other columns there"
            )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, pad_mask: Tensor, pos_emb: Tensor, cache: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        left, right = self.att_context_size
        changed = left != right or left < 1 or self.global_tokens  # since it was accelerated
        if changed or cache is not None or query.shape[1] != key.shape[1] or pos_emb.shape[1] != left + right + 1:
            own: Any = super(RelPositionMultiHeadAttention, self)  # NeMo's
            return own.forward(query, key, value, pad_mask, pos_emb, cache)
        frames = RankMask.padding(attention_mask=~pad_mask)
        mask = RankMask(frames.query_rank.masked_fill(pad_mask, LOWEST), frames.key_rank)
        reach = min(left, key.shape[1] - 1)  # the window may be wider than the audio is long
        return self._attend(query, key, value, mask, pos_emb[:, left - reach : left + reach + 1], max_distance=reach)


class ConformerEncoder(Original):
    """Of its methods, the one that makes masks."""

    made_here = ()

    def _create_masks(
        self, att_context_size: Any, padding_length: Tensor, max_audio_length: int, offset: Tensor | None, device: Any
    ) -> tuple[Tensor, Any]:
        """NeMo's padding (B, T), True where there is no frame, and what every frame sees, in ranks."""
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
    """A mask of cached frames too, whose rows NeMo cuts off by `mask[:, cache_len:]`."""

    def __init__(self, mask: RankMask) -> None:
        self.mask = mask

    def __getitem__(self, index: tuple[slice, slice]) -> RankMask:
        mask = self.mask
        assert mask.query_floor is not None, "ConformerEncoder gives one"
        return RankMask(mask.query_rank[index], mask.key_rank, mask.query_floor[index])


def _regular(frame: Tensor, left: int, right: int) -> tuple[Tensor, Tensor]:
    """The first frame that each sees, and the one after the last."""
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
