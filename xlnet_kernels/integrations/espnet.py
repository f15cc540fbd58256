"""Stand-ins for ESPnet's relative attention (espnet.nets.pytorch_backend.transformer.attention).

Order of the table, score and scale are the operator's with ``max_distance = K - 1``. Masks are nonzero where a row may
attend; fully masked rows give zeros. With `zero_triu` keys ahead have no position scores: their rows of the table are
zeros, which is equivalent. The legacy class has a table that ends at distance 0. Without `zero_triu` its shift gives
keys ahead the scores of the next query; no table can express these, so it is refused.

ESPnet keeps each layer's map in `attn` and sometimes plots it. Here it is computed when read, from the last
call's queries, keys and table; pickles leave these out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dropout import in_force
from ._masks import visible_ranks
from ._window import Window
from .adapter import (
    Original,
    attend,
    attention_map,
    check_forward,
    check_no_window,
    project_positions,
    shared,
    window_of,
)

_ARGUMENTS = ("query", "key", "value", "pos_emb", "mask")


class RelPositionMultiHeadedAttention(Original):
    """Stand-in for attention with positions (1 or B, 2 K - 1, n_feat)."""

    backend: str | None = None
    window: Window | None = None
    made_here = ("backend", "window", "kept", "_last_call")

    def check_accelerable(self) -> None:
        check_forward(self, "RelPositionMultiHeadedAttention", *_ARGUMENTS)

    def _table(self, pos_emb: Tensor, keys: int) -> Tensor | None:
        """Table (H or B, P, D), row 0 for distance K - 1; None where the positions have another size."""
        if pos_emb.shape[1] != 2 * keys - 1:
            return None
        rel_key = project_positions(self, shared(pos_emb), self.linear_pos, self.d_k)
        return F.pad(rel_key[..., :keys, :], (0, 0, 0, keys - 1)) if self.zero_triu else rel_key

    def forward(self, query: Tensor, key: Tensor, value: Tensor, pos_emb: Tensor, mask: Tensor | None) -> Tensor:
        keys = key.shape[1]
        rel_key = self._table(pos_emb, keys) if query.shape[1] <= keys else None
        window = window_of(self, query.shape[1], keys)
        if rel_key is None:
            check_no_window(window, self)
            return super().forward(query, key, value, pos_emb, mask)
        rel_key = rel_key if window is None else window.rows(rel_key, keys)
        q, k, v = self.forward_qkv(query, key, value)
        visible = visible_ranks(mask, hidden=False)
        out = attend(
            q,
            k,
            v,
            rel_key,
            self.pos_bias_u,
            self.pos_bias_v,
            visible,
            window=window,
            backend=self.backend,
            dropout_p=in_force(self.dropout),
        )
        if not torch.compiler.is_compiling():
            self.attn = None
            biases = (bias.detach().clone() for bias in (self.pos_bias_u, self.pos_bias_v))
            self._last_call = q.detach(), k.detach(), rel_key.detach(), *biases, visible, window
        return self.linear_out(out)

    @property
    def attn(self) -> Tensor | None:
        """The map (B, H, L, K) of the last call, before dropout; None if there was no call."""
        kept = vars(self).get("_last_call")
        if vars(self)["attn"] is None and kept is not None:
            with torch.no_grad():
                vars(self)["attn"] = attention_map(*kept)
        return vars(self)["attn"]

    @attn.setter
    def attn(self, weights: Tensor | None) -> None:
        vars(self)["attn"] = weights
        vars(self)["_last_call"] = None

    def __getstate__(self) -> dict[str, Any]:
        """State for pickles and copies, without the last call's tensors."""
        # Looked up, because object has __getstate__ from Python 3.11 on only.
        own = getattr(super(), "__getstate__", None)
        state = vars(self) if own is None else own()
        return {name: value for name, value in state.items() if name != "_last_call"}


class LegacyRelPositionMultiHeadedAttention(RelPositionMultiHeadedAttention):
    """Stand-in for attention with positions (1 or B, K, n_feat)."""

    def check_accelerable(self) -> None:
        check_forward(self, "LegacyRelPositionMultiHeadedAttention", *_ARGUMENTS)
        if not self.zero_triu:
            raise ValueError(
                "LegacyRelPositionMultiHeadedAttention cannot be accelerated without zero_triu: keys ahead of a query "
                "get position scores of the next query, which are no function of the distance"
            )

    def _table(self, pos_emb: Tensor, keys: int) -> Tensor | None:
        if pos_emb.shape[1] != keys:
            return None
        rel_key = project_positions(self, shared(pos_emb), self.linear_pos, self.d_k)
        return F.pad(rel_key, (0, 0, 0, keys - 1))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, pos_emb: Tensor, mask: Tensor | None) -> Tensor:
        if query.shape[1] != key.shape[1]:  # another shift
            check_no_window(window_of(self, query.shape[1], key.shape[1]), self)
            return super(RelPositionMultiHeadedAttention, self).forward(query, key, value, pos_emb, mask)
        return super().forward(query, key, value, pos_emb, mask)
