"""NeMo's TransformerEncoder, small: attention with a mask as a function of places, and the encoder that makes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from tests.integrations.scores import DIM, HEADS, WIDTH, by_distance, heads, whole


class TransformerEncoderAttention(nn.Module):
    """NeMo's TransformerEncoder: one projection, norms of heads, a mask as a function of places (FlexAttention's)."""

    self_attention_model = "rel_pos"

    def __init__(self, qk_norm: bool = False) -> None:
        super().__init__()
        self.n_heads, self.head_dim, self.qk_norm = HEADS, DIM, qk_norm
        self.w_qkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.linear_pos = nn.Linear(WIDTH, WIDTH, bias=False)
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.randn(HEADS, DIM)) for _ in range(2))
        if qk_norm:
            self.q_norm, self.k_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x, block_mask=None, pos_emb=None):
        q, k, v = (heads(part) for part in self.w_qkv(x).chunk(3, -1))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        position = by_distance(
            q + self.pos_bias_v[:, None], heads(self.linear_pos(pos_emb)), k.shape[2], k.shape[2] - 1
        )
        scores = ((q + self.pos_bias_u[:, None]) @ k.mT + position) / DIM**0.5
        if block_mask is None:
            return self.out_proj(whole(scores.softmax(-1) @ v))
        batch, _, *lengths = block_mask.shape
        hidden = ~create_mask(block_mask.mask_mod, batch, 1, *lengths, x.device)
        weights = scores.masked_fill(hidden, -10000.0).softmax(-1).masked_fill(hidden, 0)
        return self.out_proj(whole(weights @ v))


TransformerEncoderAttention.__name__ = TransformerEncoderAttention.__qualname__ = "MultiHeadAttention"


class TransformerEncoder(nn.Module):
    """Layers that only attend; a mask of padding, or of keys up to the query too."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal, self.layers = causal, nn.ModuleList()
        for _ in range(2):
            self.layers.append(nn.Module())
            self.layers[-1].attn = TransformerEncoderAttention()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.forward_internal(x, lengths)

    def forward_internal(self, x, lengths=None):
        def visible(b, h, q, k):
            return (k < lengths[b]) & (k <= q if self.causal else k >= 0)

        mask = create_block_mask(visible, B=x.shape[0], H=1, Q_LEN=x.shape[1], KV_LEN=x.shape[1], device=x.device)
        positions = torch.sin(torch.arange(2 * x.shape[1] - 1)[:, None] * torch.arange(WIDTH)).to(x)[None]
        for layer in self.layers:
            x = x + layer.attn(x, block_mask=mask, pos_emb=positions)
        return x
