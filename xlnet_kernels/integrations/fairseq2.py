"""Stand-ins for fairseq2's relative attention, which takes heads (B, L, H, D) and makes the table itself.

ShawRelativePositionSDPA has u = v = 0, and rel_key is a learned table shared by all heads. Distances beyond its limits
share its first or last row. With `use_rel_pos_values` the output has a second sum, over a table of values: refused.

Its masks are layouts (lengths) with an `AttentionBias`. Padding alone becomes ranks; other biases are made dense by
fairseq2's code and become ranks where possible. The result is kept in fairseq2's cache of biases, by the lengths. A
padded row sees the padded keys, as in fairseq2.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ..masks import RankMask
from ._masks import EVERYTHING, LayerMask, layer_mask
from ._window import Window
from .adapter import Original, attend, check_forward, check_no_window, clipped_rows, project_positions, window_of


class RelativePositionSDPA(Original):
    backend: str | None = None
    window: Window | None = None
    made_here = ("backend", "window", "kept")

    def check_accelerable(self) -> None:
        check_forward(
            self, "RelativePositionSDPA", "q", "q_layout", "k", "k_layout", "v", "bias_cache", "needs_weights"
        )

    def forward(
        self, q: Tensor, q_layout: Any, k: Tensor, k_layout: Any, v: Tensor, bias_cache: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as fairseq2 does; attention maps and packed layouts are computed by fairseq2."""
        served = q.dim() == 4 and q.shape[1] <= k.shape[1] and not (q_layout.packed or k_layout.packed)
        served = served and not options.get("needs_weights")
        mask = self._find_mask(q, q_layout, k, k_layout, bias_cache) if served else None
        window = window_of(self, q.shape[1], k.shape[1]) if q.dim() == 4 else None
        if mask is None:
            check_no_window(window, self)
            return super().forward(q, q_layout, k, k_layout, v, bias_cache, **options)
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        terms = self._rel_key(query, key, window), *self._biases()
        out = attend(query, key, value, *terms, mask.visible, window=window, backend=self.backend)
        return out.unflatten(-1, (self.num_heads, -1)), None

    def _rel_key(self, query: Tensor, key: Tensor, window: Window | None) -> Tensor:
        rows = self.pos_encoding(key)
        rows = rows if window is None else window.rows(rows, key.shape[2])
        return project_positions(self, rows, self.r_proj, query.shape[-1])

    def _biases(self) -> tuple[Tensor | None, Tensor | None]:
        return self.u_bias, self.v_bias

    def _find_mask(self, q: Tensor, q_layout: Any, k: Tensor, k_layout: Any, bias_cache: Any) -> LayerMask | None:
        # The key has the layouts, because fairseq2 caches no full masks, so one cache may serve several layouts.
        name = f"xlnet_kernels {q.shape[1]} {q_layout.seq_lens} {k.shape[1]} {k_layout.seq_lens}"
        found = bias_cache.maybe_get(self.bias, name, LayerMask)
        if found is None:
            found = self._make_mask(q, q_layout, k, k_layout, bias_cache)
            if found is not EVERYTHING:
                bias_cache.set(self.bias, name, found)
        return None if found is _SOFT else found

    def _make_mask(self, q: Tensor, q_layout: Any, k: Tensor, k_layout: Any, bias_cache: Any) -> LayerMask:
        if type(self.bias).__name__ == "IdentityBias":
            if not q_layout.padded and not k_layout.padded:
                return EVERYTHING
            if q.shape[1] == k.shape[1] and q_layout.seq_lens == k_layout.seq_lens:
                lengths = torch.tensor(k_layout.seq_lens, device=k.device)[:, None]
                # two documents: the frames, and the padding
                return LayerMask(RankMask.packed((torch.arange(k.shape[1], device=k.device) < lengths).int()))
        module = sys.modules[type(self).__module__]
        bias = module.maybe_get_attention_bias_tensor(self.bias, q, q_layout, k_layout, bias_cache)
        while bias is not None and bias.dim() < 4:
            bias = bias[None]
        return layer_mask(bias) or _SOFT


_SOFT = LayerMask(None)  # a bias that is more than a mask


class ShawRelativePositionSDPA(RelativePositionSDPA):
    def check_accelerable(self) -> None:
        name = "ShawRelativePositionSDPA"
        check_forward(self, name, "q", "q_layout", "k", "k_layout", "v", "bias_cache", "needs_weights")
        if self.rel_v_embed is not None:
            raise ValueError(f"{name} cannot be accelerated with use_rel_pos_values: values have positions too then")

    def _rel_key(self, query: Tensor, key: Tensor, window: Window | None) -> Tensor:
        limits = self.max_lhs_rel_pos, self.max_rhs_rel_pos
        rows = self.rel_k_embed(clipped_rows(key.shape[2], window, *limits, key.device))
        return rows.to(query.dtype).expand(query.shape[1], -1, -1)

    def _biases(self) -> tuple[None, None]:
        return None, None
