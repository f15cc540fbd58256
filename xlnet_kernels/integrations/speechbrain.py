"""Stand-in for SpeechBrain's relative attention (speechbrain.nnet.attention.RelPosMHAXL).

Its scale is 1 / sqrt(embed_dim), the width of all heads. Its biases have shape (head_dim, heads) and are read as
(heads, head_dim), here too. Masks are True where a row may not attend; fully masked rows give zeros. `mask_pos_future`
has no effect in SpeechBrain, because it zeroes columns that are cut off, and none here.

SpeechBrain's layers request the attention map by default, and its models discard it. Without an explicit
``return_attn_weights=True`` in the call the map is None. With it, SpeechBrain's own code computes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dropout import in_force
from ..masks import RankMask
from ._masks import hide_keys, visible_ranks
from ._window import Window
from .adapter import Original, attend, check_forward, check_no_window, project_positions, shared, window_of


class RelPosMHAXL(Original):
    backend: str | None = None
    window: Window | None = None
    made_here = ("backend", "window", "kept")

    def check_accelerable(self) -> None:
        arguments = ("query", "key", "value", "pos_embs", "key_padding_mask", "attn_mask", "return_attn_weights")
        check_forward(self, "RelPosMHAXL", *arguments)
        if self.vdim != self.embed_dim:
            raise ValueError(
                f"RelPosMHAXL cannot be accelerated with vdim other than embed_dim ({self.embed_dim}), got {self.vdim}"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pos_embs: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        return_attn_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Attend as RelPosMHAXL does, with a map of None where `return_attn_weights` is not given."""
        keys = key.shape[1]
        soft = any(mask is not None and mask.dtype != torch.bool for mask in (attn_mask, key_padding_mask))
        window = window_of(self, query.shape[1], keys)
        if return_attn_weights or soft or query.shape[1] > keys or pos_embs.shape[1] != 2 * keys - 1:
            check_no_window(window, self)
            wanted = True if return_attn_weights is None else return_attn_weights
            return super().forward(query, key, value, pos_embs, key_padding_mask, attn_mask, wanted)
        mask = self._visible(key_padding_mask, attn_mask)
        rows = pos_embs if window is None else window.rows(pos_embs, keys)
        q, k, v = self._project(query, key, value)
        if self.vbias is not None:
            v = v + self.value_bias_weight.view(self.num_heads, 1, self.vhead_dim)
        out = attend(
            q,
            k,
            v,
            project_positions(self, shared(rows), self.linear_pos, self.head_dim),
            self.pos_bias_u.view(self.num_heads, self.head_dim),
            self.pos_bias_v.view(self.num_heads, self.head_dim),
            mask,
            window=window,
            backend=self.backend,
            dropout_p=in_force(self.dropout_att),
            scale=self.scale,
        )
        out = self.out_proj(out)
        return (out, None) if return_attn_weights is None else out

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Heads (B, H, L, D). The weight is ordered by heads where all three inputs are the same, else by input."""
        same = (query is key or torch.equal(query, key)) and (key is value or torch.equal(key, value))
        if same:
            heads = F.linear(query, self.in_proj_weight).unflatten(-1, (self.num_heads, -1)).chunk(3, -1)
        else:
            weights = self.in_proj_weight.chunk(3)
            inputs = zip((query, key, value), weights, strict=True)
            heads = tuple(F.linear(x, weight).unflatten(-1, (self.num_heads, -1)) for x, weight in inputs)
        return [x.transpose(1, 2) for x in heads]

    def _visible(self, padding: Tensor | None, attn_mask: Tensor | None) -> RankMask | Tensor | None:
        """Mask of padding (B, K) and a mask (L, K) or (B * H, L, K), both True where a row may not attend."""
        if attn_mask is None:
            return None if padding is None else RankMask.padding(attention_mask=~padding)
        if attn_mask.dim() == 3:
            visible = ~attn_mask.unflatten(0, (-1, self.num_heads))
        else:
            visible = visible_ranks(attn_mask, hidden=True)
        return visible if padding is None else hide_keys(visible, padding)
