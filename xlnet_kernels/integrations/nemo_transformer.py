"""Stand-ins for NeMo's TransformerEncoder (from 3.0 on) with self_attention_model "rel_pos", and for its attention.

NeMo calls FlexAttention, with position scores in a stored (B, H, T, T) tensor, which is not needed here. Its mask is a
function of indices (`BlockMask.mask_mod`). Applied to all indices at once it gives the padding as (B, 1, T), and with a
causal mask (B, T, T); both become ranks. Fully masked rows give zeros in FlexAttention, as in the operator.

The encoder makes a BlockMask of a mask (B, T, T) in every call. Where all its attention is accelerated, it keeps only
the function, so that memory for padding is linear in length too.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from ._masks import visible_ranks
from ._window import Window
from .adapter import Original, attend, check_forward, check_no_window, project_positions, shared, window_of


class MultiHeadAttention(Original):
    """Stand-in for attention with positions (1, P, d_model), P of at least 2 T - 1."""

    backend: str | None = None
    window: Window | None = None
    made_here = ("backend", "window", "kept")

    def check_accelerable(self) -> None:
        check_forward(self, "MultiHeadAttention", "x", "block_mask", "pos_emb")
        if self.self_attention_model != "rel_pos":
            raise ValueError(
                f'MultiHeadAttention must have self_attention_model "rel_pos" to be accelerated, got '
                f"{self.self_attention_model!r}: it has no relative term"
            )

    def forward(self, x: Tensor, block_mask: Any = None, pos_emb: Tensor | None = None) -> Tensor:
        length = x.shape[1]
        window = window_of(self, length, length)
        if (
            pos_emb is None
            or pos_emb.shape[1] < 2 * length - 1
            or (block_mask is not None and block_mask.shape[1] != 1)
        ):
            check_no_window(window, self)
            block_mask = block_mask.made() if isinstance(block_mask, _Places) else block_mask
            return super().forward(x, block_mask=block_mask, pos_emb=pos_emb)
        qkv = self.w_qkv(x).unflatten(-1, (3, -1, self.head_dim))  # (B, T, 3, H, D)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        if self.qk_norm:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        rows = shared(pos_emb[:, : 2 * length - 1])
        rows = rows if window is None else window.rows(rows, length)
        rel_key = project_positions(self, rows, self.linear_pos, self.head_dim)
        mask = visible_ranks(_visible(block_mask), hidden=False)
        biases = self.pos_bias_u, self.pos_bias_v
        return self.out_proj(attend(q, k, v, rel_key, *biases, mask, window=window, backend=self.backend))


def _visible(block_mask: Any) -> Tensor | None:
    """Mask (B, 1 or T, T), True where a row may attend."""
    if block_mask is None:
        return None
    batch, _, queries, keys = block_mask.shape
    device = block_mask.device if isinstance(block_mask, _Places) else block_mask.kv_num_blocks.device
    places = (torch.arange(n, device=device) for n in (batch, queries, keys))
    sample, query, key = (place.view(shape) for place, shape in zip(places, ((-1, 1, 1), (-1, 1), (-1,)), strict=True))
    visible = block_mask.mask_mod(sample, torch.zeros_like(sample), query, key)
    return visible.expand(batch, -1, keys) if visible.dim() == 3 else visible.expand(batch, queries, keys)


@dataclass
class _Places:
    """Arguments of `create_block_mask`, in place of its result."""

    mask_mod: Any
    B: int
    H: int
    Q_LEN: int
    KV_LEN: int
    device: Any

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.B, self.H, self.Q_LEN, self.KV_LEN

    def made(self) -> Any:
        """The BlockMask, for NeMo's own code."""
        return create_block_mask(**vars(self))


class TransformerEncoder(Original):
    """Stand-in for the encoder's method that makes masks."""

    made_here = ()

    def forward_internal(self, *inputs: Any, **options: Any) -> Any:
        own: Any = super().forward_internal  # type: ignore[misc]
        ours = all(isinstance(layer.attn, MultiHeadAttention) for layer in self.layers)
        if ours and not torch.compiler.is_compiling():
            # NeMo's code with another global name, because the module's own is shared by threads and other encoders.
            code = own.__func__
            names = code.__globals__ | {"create_block_mask": _Places}
            own = FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__).__get__(self)
        return own(*inputs, **options)
