"""Attention as five speech and RL projects have it, written from the published formulas, and a stand-in for each.

Scores are gathered by distance (Dai et al. 2019, section 3.3), not shifted; in `Squeezeformer` and `Gtrxl` too, whose
projects shift.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.integrations.conventions import DIM, HEADS, WIDTH, Projections, by_distance, heads, whole
from xlnet_kernels.integrations import RelativeAttention

NOTHING = torch.zeros(0, 0, 0)


class CosyVoice(Projections):
    """ESPnet's table and masks; keys and values of a cache (B, H, M, 2 D) come before the current ones."""

    def forward(self, query, key, value, mask=NOTHING, pos_emb=NOTHING, cache=NOTHING):
        q, k, v = self.forward_qkv(query, key, value)
        if cache.numel():
            k, v = (torch.cat(pair, 2) for pair in zip(cache.chunk(2, -1), (k, v), strict=True))
        hidden = mask[:, None, :, : k.shape[2]] == 0 if mask.numel() else None
        return self.mix(self.scores(q, k, pos_emb, k.shape[2] - 1), hidden, v), torch.cat([k, v], -1)


class FusedCosyVoice(RelativeAttention):
    def forward(self, query, key, value, mask=NOTHING, pos_emb=NOTHING, cache=NOTHING):
        query, key, value = self.project_heads(query, key, value)
        if cache.numel():
            past_key, past_value = cache.chunk(2, -1)
            key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
        mask = mask[..., : key.shape[2]] if mask.numel() else None
        out = self.relative_attention(query, key, value, pos_emb, mask, dropout=self.dropout)
        return out, torch.cat([key, value], -1)


class FireRed(nn.Module):
    """Queries, keys and values have norms of their own before they are projected; the residual is inside."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("w_qs", "w_ks", "w_vs", "fc", "linear_pos"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        for name in "qkv":
            setattr(self, f"layer_norm_{name}", nn.LayerNorm(WIDTH))
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.randn(HEADS, DIM)) for _ in range(2))
        self.dropout = nn.Dropout(0.0)

    def forward(self, q, k, v, pos_emb, mask=None):
        residual = q
        q = heads(self.w_qs(self.layer_norm_q(q)))
        k = heads(self.w_ks(self.layer_norm_k(k)))
        v = heads(self.w_vs(self.layer_norm_v(v)))
        position = by_distance(
            q + self.pos_bias_v[:, None], heads(self.linear_pos(pos_emb)), k.shape[2], k.shape[2] - 1
        )
        scores = ((q + self.pos_bias_u[:, None]) @ k.mT + position) / DIM**0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, -torch.inf)
        weights = scores.softmax(-1)
        return self.dropout(self.fc(whole(weights @ v))) + residual, weights


class FusedFireRed(RelativeAttention):
    projection_names = "w_qs", "w_ks", "w_vs", "fc", "linear_pos"

    def forward(self, q, k, v, pos_emb, mask=None):
        query, key, value = self.project_heads(self.layer_norm_q(q), self.layer_norm_k(k), self.layer_norm_v(v))
        out = self.relative_attention(query, key, value, pos_emb, mask)
        return self.dropout(out) + q, None


class Icefall(nn.Module):
    """Time first; one projection for all three; the scale is on the query alone, before u and v are added."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_dim, self.dropout = DIM, dropout
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.linear_pos = nn.Linear(WIDTH, WIDTH, bias=False)
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.randn(HEADS, DIM)) for _ in range(2))

    def forward(self, query, key, value, pos_emb, key_padding_mask=None, need_weights=True, attn_mask=None):
        q, k, v = (heads(x) for x in self.in_proj(query.transpose(0, 1)).chunk(3, -1))
        q = q * self.head_dim**-0.5
        position = by_distance(
            q + self.pos_bias_v[:, None], heads(self.linear_pos(pos_emb)), k.shape[2], k.shape[2] - 1
        )
        scores = (q + self.pos_bias_u[:, None]) @ k.mT + position
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -torch.inf)
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask, -torch.inf)
        weights = scores.softmax(-1)
        out = nn.functional.dropout(weights, self.dropout, self.training) @ v
        return self.out_proj(whole(out)).transpose(0, 1), weights.mean(1) if need_weights else None


class FusedIcefall(RelativeAttention):
    projection_names = None, None, None, "out_proj", "linear_pos"
    mask_convention = "hidden"

    def forward(self, query, key, value, pos_emb, key_padding_mask=None, need_weights=True, attn_mask=None):
        if need_weights or attn_mask is not None:
            return super().forward(query, key, value, pos_emb, key_padding_mask, need_weights, attn_mask)
        q, k, v = (self.split_heads(x) for x in self.in_proj(query.transpose(0, 1)).chunk(3, -1))
        mask = None if key_padding_mask is None else key_padding_mask[:, None]
        out = self.relative_attention(q * self.head_dim**-0.5, k, v, pos_emb, mask, dropout=self.dropout, scale=1.0)
        return out.transpose(0, 1), None


class Squeezeformer(Projections):
    """The input is scaled and shifted by learned vectors before its projections (Kim et al. 2022, section 3.3)."""

    def __init__(self, do_rel_shift: bool = True) -> None:
        super().__init__()
        self.do_rel_shift = do_rel_shift
        self.ada_scale, self.ada_bias = (nn.Parameter(torch.randn(1, 1, WIDTH)) for _ in range(2))

    def forward(self, query, key, value, mask=None, pos_emb=None):
        q, k, v = self.forward_qkv(*(self.ada_scale * x + self.ada_bias for x in (query, key, value)))
        return self.mix(self.scores(q, k, pos_emb, k.shape[2] - 1), None if mask is None else mask[:, None] == 0, v)


class FusedSqueezeformer(RelativeAttention):
    def check_accelerable(self) -> None:
        super().check_accelerable()
        if not self.do_rel_shift:
            raise ValueError("Squeezeformer cannot be accelerated without do_rel_shift: its rows are for keys")

    def forward(self, query, key, value, mask=None, pos_emb=None):
        query, key, value = (self.ada_scale * x + self.ada_bias for x in (query, key, value))
        return self.relative_attention(*self.project_heads(query, key, value), pos_emb, mask, dropout=self.dropout)


class GtrxlAttention(nn.Module):
    """Time first; keys of memory and input; rows end at distance 0; u and v come from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_kv, self.attention_q = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.project, self.project_pos = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head_dim = DIM
        self.dropout = nn.Dropout(0.0)

    def forward(self, inputs, pos_embedding, full_input, u, v, mask=None):
        q = heads(self.attention_q(inputs.transpose(0, 1)))
        key, value = (heads(x) for x in self.attention_kv(full_input.transpose(0, 1)).chunk(2, -1))
        keys = key.shape[2]
        table = heads(self.project_pos(pos_embedding.transpose(0, 1)))
        scores = ((q + u[:, None]) @ key.mT + by_distance(q + v[:, None], table, keys, keys - 1)) * DIM**-0.5
        if mask is not None:
            scores = scores.masked_fill(mask[..., 0], -torch.inf)
        return self.project(whole(self.dropout(scores.softmax(-1)) @ value)).transpose(0, 1)


class FusedGtrxl(RelativeAttention):
    projection_names = "attention_q", None, None, "project", "project_pos"
    bias_names, head_dim_name = None, "head_dim"
    mask_convention = "hidden"

    def forward(self, inputs, pos_embedding, full_input, u, v, mask=None):
        query = self.split_heads(self.attention_q(inputs.transpose(0, 1)))
        key, value = (self.split_heads(x) for x in self.attention_kv(full_input.transpose(0, 1)).chunk(2, -1))
        mask = None if mask is None else mask[..., 0]
        rows = pos_embedding.transpose(0, 1)
        out = self.relative_attention(
            query, key, value, rows, mask, content_bias=u, position_bias=v, dropout=self.dropout
        )
        return out.transpose(0, 1)


class Gate(nn.Module):
    """A gated recurrent unit in the place of a residual connection (Parisotto et al. 2020, section 3.2)."""

    def __init__(self) -> None:
        super().__init__()
        self.of_output, self.of_input = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH)
        self.candidate = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        (reset, update), output = self.of_input(x).chunk(2, -1), self.of_output(y).chunk(3, -1)
        reset, update = torch.sigmoid(output[0] + reset), torch.sigmoid(output[1] + update - 2)
        return (1 - update) * x + update * torch.tanh(output[2] + self.candidate(reset * x))


class Gtrxl(nn.Module):
    """Two layers with memory, norms before their parts, and gates; gives the output and the next memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attention": GtrxlAttention(), "norm": nn.LayerNorm(WIDTH), "gate": Gate()})
            for _ in range(2)
        )
        self.u, self.v = (nn.Parameter(torch.randn(HEADS, DIM)) for _ in range(2))

    def forward(self, x: Tensor, memory: list[Tensor], positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        length, keys = x.shape[0], memory[0].shape[0] + x.shape[0]
        ahead = torch.ones(length, keys, dtype=torch.bool).triu(keys - length + 1)[..., None]
        kept = []
        for layer, past in zip(self.layers, memory, strict=True):
            kept.append(torch.cat([past, x])[-len(past) :].detach())
            full = layer["norm"](torch.cat([past, x]))
            out = layer["attention"](full[-length:], positions, full, self.u, self.v, mask=ahead)
            x = layer["gate"](x, torch.relu(out))
        return x, kept
