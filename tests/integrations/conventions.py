"""Small attention modules with the names, arguments, masks and tables of speech toolkits, written from the equations.

They let the stand-ins be tested where the toolkits are not installed. Each score is gathered by its distance (Dai et
al. 2019, section 3.3), not shifted. `installed` puts them where the toolkits would be.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType

import torch
from torch import Tensor, nn

from tests.integrations.conventions_flex import TransformerEncoder, TransformerEncoderAttention
from tests.integrations.scores import DIM, HEADS, WIDTH, by_distance, heads, whole


class Projections(nn.Module):
    """Names of the parts of NeMo's and ESPnet's classes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.h, self.d_k = HEADS, DIM
        for name in ("q", "k", "v", "out"):
            setattr(self, f"linear_{name}", nn.Linear(WIDTH, WIDTH))
        self.linear_pos = nn.Linear(WIDTH, WIDTH, bias=False)
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.randn(HEADS, DIM)) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward_qkv(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return heads(self.linear_q(query)), heads(self.linear_k(key)), heads(self.linear_v(value))

    def scores(self, q: Tensor, k: Tensor, pos_emb: Tensor, first: int) -> Tensor:
        content = (q + self.pos_bias_u[:, None]) @ k.mT
        position = by_distance(q + self.pos_bias_v[:, None], heads(self.linear_pos(pos_emb)), k.shape[2], first)
        return (content + position) / DIM**0.5

    def mix(self, scores: Tensor, hidden: Tensor | None, v: Tensor) -> Tensor:
        """Softmax and values; fully masked rows are zeros."""
        if hidden is not None:
            scores = scores.masked_fill(hidden, -10000.0)
        weights = scores.softmax(-1)
        if hidden is not None:
            weights = weights.masked_fill(hidden, 0)
        self.attn = weights
        return self.linear_out(whole(self.dropout(weights) @ v))


class MultiHeadAttention(Projections):
    """NeMo: True hides; a cache of inputs comes before the keys."""

    cache_drop_size = 0

    def update_cache(self, key, value, query, cache):
        if cache is not None:
            kept = query.shape[1] - self.cache_drop_size
            key = value = torch.cat([cache, key], 1)
            cache = torch.cat([cache[:, kept:], query[:, :kept]], 1)
        return key, value, query, cache


class RelPositionMultiHeadAttention(MultiHeadAttention):
    def forward(self, query, key, value, mask, pos_emb, cache=None):
        key, value, query, cache = self.update_cache(key=key, value=value, query=query, cache=cache)
        q, k, v = self.forward_qkv(query, key, value)
        out = self.mix(self.scores(q, k, pos_emb, k.shape[2] - 1), None if mask is None else mask[:, None], v)
        return out if cache is None else (out, cache)


class RelPositionMultiHeadAttentionLongformer(RelPositionMultiHeadAttention):
    """Scores are columns -w .. w around each row, w the larger side; the table's begin and end where these do.

    Global keys, without positions and biases, are columns of their own. Global rows have queries of other heads and
    sequences where there are several.
    """

    att_context_size, global_tokens, global_tokens_spacing, global_attn_separate = [3, 3], 0, 1, False

    def forward(self, query, key, value, pad_mask, pos_emb, cache=None):
        q, k, v = self.forward_qkv(query, key, value)
        (left, right), frames = self.att_context_size, k.shape[2]
        wide = max(left, right)
        products = (q + self.pos_bias_v[:, None]) @ heads(self.linear_pos(pos_emb)).mT
        columns = torch.zeros(*q.shape[:3], 2 * wide + 1).to(q)
        columns[..., :left] += products[..., :left]
        columns[..., 2 * wide - right :] += products[..., left:]
        distance = torch.arange(frames)[:, None] - torch.arange(frames)
        scores = (q + self.pos_bias_u[:, None]) @ k.mT
        scores = scores + columns.gather(-1, (wide - distance).clamp(0, 2 * wide).expand_as(scores))
        scores = (scores / DIM**0.5).masked_fill((distance > left) | (distance < -right), -10000.0)
        scores = scores.masked_fill(pad_mask[:, None, None], -10000.0)
        chosen = slice(0, self.global_tokens * self.global_tokens_spacing, self.global_tokens_spacing)
        query, key, values = (q, k, v) if not self.global_attn_separate else self.global_heads(query, key, value)
        scores = torch.cat([query @ key[:, :, chosen].mT / DIM**0.5, scores], -1)
        weights = self.dropout(scores.softmax(-1).masked_fill(pad_mask[:, None, :, None], 0))
        out = weights @ torch.cat([v[:, :, chosen], v], 2)
        rows = query[:, :, chosen].transpose(1, 2).transpose(0, 1).reshape(*q.shape[:2], -1, DIM)
        hidden = pad_mask[:, None, None]
        out[:, :, chosen] = (rows @ key.mT / DIM**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ values
        return self.linear_out(whole(out))

    def global_heads(self, *inputs):
        return [
            heads(linear(x)) for linear, x in zip((self.global_q, self.global_k, self.global_v), inputs, strict=True)
        ]


class ConformerEncoder(nn.Module):
    """NeMo's masks, and layers that only attend."""

    def __init__(self, style: str = "regular", context: tuple[int, ...] = (-1, -1)) -> None:
        super().__init__()
        self.self_attention_model, self.att_context_style, self.context = "rel_pos", style, context
        self.layers = nn.ModuleList()
        for _ in range(2):
            self.layers.append(nn.Module())
            self.layers[-1].self_attn = RelPositionMultiHeadAttention()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        _, mask = self._create_masks(self.context, lengths, x.shape[1], None, x.device)
        positions = torch.sin(torch.arange(2 * x.shape[1] - 1)[:, None] * torch.arange(WIDTH)).to(x)[None]
        for layer in self.layers:
            x = x + layer.self_attn(x, x, x, mask, positions)
        return x

    def _create_masks(self, att_context_size, padding_length, max_audio_length, offset, device):
        frame = torch.arange(max_audio_length)
        distance = frame[:, None] - frame
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.att_context_style == "regular" or (len(att_context_size) == 2 and att_context_size[1] == -1):
            left, right = att_context_size
            visible &= (left < 0) | (distance <= left)
            visible &= (right < 0) | (distance >= -right)
        elif self.att_context_style == "chunked_limited":
            left, right = att_context_size
            behind = frame[:, None] // (right + 1) - frame // (right + 1)
            visible = (behind >= 0) & ((left < 0) | (behind <= left // (right + 1)))
        elif sum(att_context_size) != -3:
            left, chunk, right = att_context_size
            start = frame[:, None] // chunk * chunk
            visible = (frame >= start - left) & (frame < start + chunk + right)
        padding = frame >= padding_length[:, None]
        if offset is not None:
            padding = padding | (frame < offset[:, None])
        return padding, ~visible | padding[:, None] | padding[:, :, None]


class EspnetAttention(Projections):
    """Nonzero shows; the map is kept."""

    attn = None

    def __init__(self, zero_triu: bool = False, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.zero_triu = zero_triu
        self.attn = None

    def forward(self, query, key, value, pos_emb, mask):
        q, k, v = self.forward_qkv(query, key, value)
        keys = k.shape[2]
        pos_emb = pos_emb[:, :keys] if self.zero_triu else pos_emb
        hidden = None if mask is None else mask[:, None] == 0
        return self.mix(self.scores(q, k, pos_emb, keys - 1), hidden, v)


RelPositionMultiHeadedAttention = type("RelPositionMultiHeadedAttention", (EspnetAttention,), {})
LegacyRelPositionMultiHeadedAttention = type("LegacyRelPositionMultiHeadedAttention", (EspnetAttention,), {})


class RelPosMHAXL(nn.Module):
    """SpeechBrain: one weight, laid out by heads in self-attention; biases transposed; scale of the whole width."""

    def __init__(self, embed_dim=WIDTH, num_heads=HEADS, dropout=0.0, vbias=False) -> None:
        super().__init__()
        self.embed_dim = self.vdim = embed_dim
        self.num_heads, self.head_dim, self.vhead_dim = num_heads, DIM, DIM
        self.in_proj_weight = nn.Parameter(torch.randn(3 * embed_dim, embed_dim) / embed_dim**0.5)
        self.vbias = vbias or None
        if vbias:
            self.value_bias_weight = nn.Parameter(torch.randn(embed_dim))
        self.dropout_att = nn.Dropout(dropout)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.linear_pos = nn.Linear(embed_dim, embed_dim, bias=False)
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.randn(DIM, num_heads)) for _ in range(2))
        self.scale = embed_dim**-0.5

    def forward(self, query, key, value, pos_embs, key_padding_mask=None, attn_mask=None, return_attn_weights=True):
        weight, keys = self.in_proj_weight, key.shape[1]
        if torch.equal(query, key) and torch.equal(key, value):
            q, k, v = (query @ weight.T).unflatten(-1, (HEADS, 3 * DIM)).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = (heads(x @ w.T) for x, w in zip((query, key, value), weight.chunk(3), strict=True))
        if self.vbias:
            v = v + self.value_bias_weight.view(HEADS, 1, DIM)
        u, w = (bias.reshape(HEADS, 1, DIM) for bias in (self.pos_bias_u, self.pos_bias_v))
        scores = (q + u) @ k.mT + by_distance(q + w, heads(self.linear_pos(pos_embs)), keys, keys - 1)
        hidden = torch.zeros(len(q), 1, q.shape[2], keys, dtype=torch.bool)
        scores = scores * self.scale
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            scores = scores + attn_mask
        elif attn_mask is not None:
            hidden = hidden | (attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, HEADS)))
        if key_padding_mask is not None:
            hidden = hidden | key_padding_mask[:, None, None]
        weights = scores.masked_fill(hidden, -1e4).softmax(-1, dtype=torch.float32)
        weights = self.dropout_att(weights).masked_fill(hidden, 0)
        out = self.out_proj(whole(weights @ v))
        return (out, weights) if return_attn_weights else out


class BatchLayout:
    """fairseq2: lengths of the sequences of a batch."""

    def __init__(self, shape, seq_lens=None, packed=False) -> None:
        self.seq_lens, self.packed = list(seq_lens or [shape[1]] * shape[0]), packed
        self.padded = min(self.seq_lens) < shape[1]


class AttentionBiasCache:
    def __init__(self) -> None:
        self.found: dict = {}

    def maybe_get(self, bias, impl, kls):
        return self.found.get((bias, impl))

    def set(self, bias, impl, value) -> None:
        self.found[bias, impl] = value


class IdentityBias:
    def visible(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool)


class CausalAttentionBias:
    def visible(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril()


class SlopeBias:
    """More than a mask."""


def maybe_get_attention_bias_tensor(bias, q, q_layout, k_layout, bias_cache):
    keys = q.shape[1]
    if isinstance(bias, SlopeBias):
        return torch.arange(keys).to(q) / 9 + torch.zeros(keys, 1).to(q)
    if not k_layout.padded:
        return torch.zeros(keys, keys).to(q).masked_fill(~bias.visible(keys), -torch.inf)
    visible = torch.zeros(len(k_layout.seq_lens), 1, keys, keys, dtype=torch.bool)
    for one, length in zip(visible, k_layout.seq_lens, strict=True):
        one[0, :length, :length] = bias.visible(length)
        one[0, length:, length:] = True
    return torch.zeros(visible.shape).to(q).masked_fill(~visible, -torch.inf)


class RelativePositionalEncoding(nn.Module):
    def forward(self, seqs: Tensor) -> Tensor:
        return torch.sin(torch.arange(2 * seqs.shape[-2] - 1)[:, None] * torch.arange(WIDTH)).to(seqs)


class RelativePositionSDPA(nn.Module):
    def __init__(self, model_dim=WIDTH, num_heads=HEADS, pos_encoding=None, bias=None) -> None:
        super().__init__()
        self.model_dim, self.num_heads, self.bias = model_dim, num_heads, bias or IdentityBias()
        self.pos_encoding = pos_encoding or RelativePositionalEncoding()
        self.u_bias, self.v_bias = (nn.Parameter(torch.randn(HEADS, DIM)) for _ in range(2))
        self.r_proj = nn.Linear(model_dim, model_dim, bias=False)

    def forward(self, q, q_layout, k, k_layout, v, bias_cache, *, needs_weights=False):
        bias = maybe_get_attention_bias_tensor(self.bias, q, q_layout, k_layout, bias_cache)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        position = by_distance(
            q + self.v_bias[:, None], heads(self.r_proj(self.pos_encoding(k))), k.shape[2], k.shape[2] - 1
        )
        scores = ((q + self.u_bias[:, None]) @ k.mT + position) * DIM**-0.5 + bias
        weights = scores.softmax(-1, dtype=torch.float32).type_as(q)
        return (weights @ v).transpose(1, 2), weights if needs_weights else None


class ShawRelativePositionSDPA(nn.Module):
    def __init__(
        self,
        model_dim=WIDTH,
        num_heads=HEADS,
        bias=None,
        max_lhs_rel_pos=3,
        max_rhs_rel_pos=2,
        use_rel_pos_values=False,
    ) -> None:
        super().__init__()
        self.model_dim, self.num_heads, self.bias = model_dim, num_heads, bias or IdentityBias()
        self.max_lhs_rel_pos, self.max_rhs_rel_pos = max_lhs_rel_pos, max_rhs_rel_pos
        self.rel_k_embed = nn.Embedding(max_lhs_rel_pos + 1 + max_rhs_rel_pos, DIM)
        self.rel_v_embed = nn.Embedding(max_lhs_rel_pos + 1 + max_rhs_rel_pos, DIM) if use_rel_pos_values else None

    def forward(self, q, q_layout, k, k_layout, v, bias_cache, *, needs_weights=False):
        bias = maybe_get_attention_bias_tensor(self.bias, q, q_layout, k_layout, bias_cache)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        length, keys = q.shape[2], k.shape[2]
        ahead = torch.arange(keys) - torch.arange(keys - length, keys)[:, None]
        rows = self.rel_k_embed(ahead.clamp(-self.max_lhs_rel_pos, self.max_rhs_rel_pos) + self.max_lhs_rel_pos)
        scores = (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, rows)) * DIM**-0.5 + bias
        weights = scores.softmax(-1, dtype=torch.float32).type_as(q)
        return (weights @ v).transpose(1, 2), weights if needs_weights else None


MODULES = {
    "nemo": "3.0.0",
    "nemo.collections.asr.parts.submodules.multi_head_attention": (
        MultiHeadAttention,
        RelPositionMultiHeadAttention,
        RelPositionMultiHeadAttentionLongformer,
    ),
    "nemo.collections.asr.modules.conformer_encoder": (ConformerEncoder,),
    "nemo.collections.asr.modules.transformer_encoder": (TransformerEncoder, TransformerEncoderAttention),
    "espnet": "202511",
    "espnet.nets.pytorch_backend.transformer.attention": (
        RelPositionMultiHeadedAttention,
        LegacyRelPositionMultiHeadedAttention,
    ),
    "speechbrain": "1.1.2",
    "speechbrain.nnet.attention": (RelPosMHAXL,),
    "fairseq2": "0.8.1",
    "fairseq2.models.transformer.sdpa.relative": (RelativePositionSDPA, maybe_get_attention_bias_tensor),
    "fairseq2.models.transformer.sdpa.shaw": (ShawRelativePositionSDPA, maybe_get_attention_bias_tensor),
}


@contextlib.contextmanager
def installed():
    """These classes as if they were the toolkits'."""
    before = dict(sys.modules)
    own = {}
    for name, content in MODULES.items():
        module = sys.modules[name] = ModuleType(name)
        if isinstance(content, str):
            module.__version__ = content
            continue
        for thing in content:
            own.setdefault(thing, thing.__module__)
            thing.__module__ = name
            setattr(module, thing.__name__, thing)
    try:
        yield
    finally:
        for thing, name in own.items():
            thing.__module__ = name
        for name in MODULES:
            sys.modules.pop(name)
        sys.modules.update({name: before[name] for name in MODULES if name in before})
