"""Attention of NeMo, ESPnet, SpeechBrain and fairseq2, made and called: of the toolkits or of `conventions`."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, flex_attention

from tests.integrations import conventions
from tests.integrations.conventions import HEADS, WIDTH

LENGTH, SHORT = 13, 9  # frames of the two sequences of a batch
HIDDEN = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [SHORT]])  # where there is no frame
FILES = {
    "nemo": "nemo.collections.asr.parts.submodules.multi_head_attention",
    "espnet": "espnet.nets.pytorch_backend.transformer.attention",
    "speechbrain": "speechbrain.nnet.attention",
    "fairseq2": "fairseq2.models.transformer.sdpa.relative",
}


def real(toolkit: str):
    """The toolkit's own module."""
    if not any(importlib.util.find_spec(name) for name in (toolkit, f"{toolkit}2")):
        pytest.skip(f"{toolkit} is not installed")
    from lib.toolkits import leave_out_unneeded

    leave_out_unneeded(toolkit)
    if toolkit == "espnet" and importlib.util.find_spec("espnet") is None:  # from 202609 on
        return importlib.import_module(FILES["espnet"].replace("espnet.", "espnet2.legacy."))
    return importlib.import_module(FILES[toolkit])


def positions(rows: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, rows, WIDTH, dtype=torch.float64)


def nemo(source, cls="RelPositionMultiHeadAttention", dropout=0.0, **options):
    module = source("nemo")
    if module is conventions:
        attention = getattr(module, cls)(dropout)
        for name, value in options.items():
            setattr(attention, name, value)
        if options.get("global_attn_separate"):
            for name in ("global_q", "global_k", "global_v"):
                setattr(attention, name, nn.Linear(WIDTH, WIDTH))
        return attention
    return getattr(module, cls)(HEADS, WIDTH, dropout, None, None, **options)


def flex_attention_with_gradients(query, key, value, block_mask=None, score_mod=None):
    """FlexAttention has no backward on the CPU (torch 2.13): with gradients by its definition."""
    if not torch.is_grad_enabled():
        return flex_attention(query, key, value, block_mask=block_mask, score_mod=score_mod)
    places = (torch.arange(n) for n in (*query.shape[:3], key.shape[2]))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores if score_mod is None else score_mod(scores, *torch.meshgrid(*places, indexing="ij"))
    if block_mask is not None:
        batch, _, *lengths = block_mask.shape
        visible = create_mask(block_mask.mask_mod, batch, 1, *lengths, "cpu")
        sees_any = visible.any(-1, keepdim=True)  # rows that see nothing are zeros, as FlexAttention has them
        return scores.masked_fill(~visible & sees_any, -torch.inf).softmax(-1).masked_fill(~sees_any, 0.0) @ value
    return scores.softmax(-1) @ value


def nemo_transformer(source, qk_norm=False):
    if source("nemo") is conventions:
        return conventions.TransformerEncoderAttention(qk_norm)
    module = importlib.import_module("nemo.collections.asr.modules.transformer_encoder")
    if module.flex_attention is flex_attention:
        module.flex_attention = flex_attention_with_gradients
    config = module.TransformerEncoderConfig(d_model=WIDTH, n_heads=WIDTH // 16, qk_norm=qk_norm)  # heads of 16 or more
    return module.MultiHeadAttention(config)


def espnet(source, cls="RelPositionMultiHeadedAttention", dropout=0.0, zero_triu=False):
    module = source("espnet")
    if module is conventions:
        return getattr(module, cls)(zero_triu, dropout)
    return getattr(module, cls)(HEADS, WIDTH, dropout, zero_triu)


def fairseq2(source, bias="IdentityBias", *options):
    module = source("fairseq2")
    if module is conventions:
        kinds = encoding = module
        encoding = module.RelativePositionalEncoding()
    else:
        kinds = importlib.import_module("fairseq2.models.transformer.attention_bias")
        encoding = module.RelativePositionalEncoding(WIDTH, 50)
    return module.RelativePositionSDPA(WIDTH, HEADS, encoding, getattr(kinds, bias)(*options))


def fairseq2_shaw(source, bias="IdentityBias"):
    module = source("fairseq2")
    if module is conventions:
        return module.ShawRelativePositionSDPA(bias=getattr(module, bias)())
    kinds = importlib.import_module("fairseq2.models.transformer.attention_bias")
    shaw = importlib.import_module("fairseq2.models.transformer.sdpa.shaw")
    return shaw.ShawRelativePositionSDPA(WIDTH, HEADS, getattr(kinds, bias)(), 3, max_rhs_rel_pos=2)


def of_fairseq2(attention):
    """Its layouts and cache of biases."""
    if type(attention.bias).__module__ == conventions.__name__:
        return conventions.BatchLayout, conventions.AttentionBiasCache
    nn_module = importlib.import_module("fairseq2.nn")
    return nn_module.BatchLayout, importlib.import_module(
        "fairseq2.models.transformer.attention_bias"
    ).AttentionBiasCache


def call_nemo(attention, x, padded):
    mask = (HIDDEN[:, None] | HIDDEN[:, :, None]) if padded else None
    return attention(query=x, key=x, value=x, mask=mask, pos_emb=positions(2 * LENGTH - 1).to(x))


def call_nemo_transformer(attention, x, padded, causal=False):
    lengths = torch.tensor([LENGTH, SHORT])
    mask = block_mask([lambda b, h, q, k: k < lengths[b]] * padded + [lambda b, h, q, k: k <= q] * causal)
    return attention(x, block_mask=mask, pos_emb=positions(2 * LENGTH - 1).to(x))


def block_mask(parts):
    """FlexAttention's, of functions of places that all have to hold."""
    return create_block_mask(and_masks(*parts), 2, 1, LENGTH, LENGTH, device="cpu") if parts else None


def call_longformer(attention, x, padded):
    pad_mask = HIDDEN if padded else torch.zeros_like(HIDDEN)
    rows = sum(attention.att_context_size) + 1
    return attention(query=x, key=x, value=x, pad_mask=pad_mask, pos_emb=positions(rows).to(x))


def call_espnet(attention, x, padded):
    return attention(x, x, x, positions(2 * LENGTH - 1).to(x), ~HIDDEN[:, None] if padded else None)


def call_legacy(attention, x, padded):
    return attention(x, x, x, positions(LENGTH).to(x), (~HIDDEN)[:, None].long() if padded else None)


def call_speechbrain(attention, x, padded):
    out, weights = attention(x, x, x, positions(2 * LENGTH - 1).to(x), key_padding_mask=HIDDEN if padded else None)
    assert (weights is None) == hasattr(attention, "backend")
    return out


def call_fairseq2(attention, x, padded):
    layout, cache = of_fairseq2(attention)
    layout = layout((2, LENGTH), [LENGTH, SHORT] if padded else None)
    q, k, v = (f(x).unflatten(-1, (HEADS, -1)) for f in (torch.sin, torch.cos, torch.tanh))
    return attention(q, layout, k, layout, v, cache())[0].flatten(2)


# id: make, call, dtype (softmax is in float32 in SpeechBrain and fairseq2)
CASES = {
    "nemo": (nemo, call_nemo, torch.float64),
    "nemo-sdpa": (lambda s: nemo(s, use_pytorch_sdpa=True), call_nemo, torch.float64),
    "nemo-local": (
        lambda s: nemo(s, "RelPositionMultiHeadAttentionLongformer", att_context_size=[3, 3]),
        call_longformer,
        torch.float64,
    ),
    "nemo-local-wider-than-the-audio": (
        lambda s: nemo(s, "RelPositionMultiHeadAttentionLongformer", att_context_size=[2 * LENGTH, 2 * LENGTH]),
        call_longformer,
        torch.float64,
    ),
    "nemo-local-left": (lambda s: longformer(s, (4, 3)), call_longformer, torch.float64),
    "nemo-local-right": (lambda s: longformer(s, (1, 4)), call_longformer, torch.float64),
    "nemo-local-left-alone": (lambda s: longformer(s, (4, 0)), call_longformer, torch.float64),
    # The last global token of the shorter sequence is padding. In training mode NeMo has a softmax in float32.
    "nemo-global": (
        lambda s: longformer(s, global_tokens=3, global_tokens_spacing=5).eval(),
        call_longformer,
        torch.float64,
    ),
    "nemo-global-separate": (
        lambda s: longformer(s, (2, 3), global_tokens=2, global_attn_separate=True).eval(),
        call_longformer,
        torch.float64,
    ),
    "nemo-transformer": (nemo_transformer, call_nemo_transformer, torch.float64),
    "nemo-transformer-causal": (
        lambda s: nemo_transformer(s, qk_norm=True),
        lambda attention, x, padded: call_nemo_transformer(attention, x, padded, causal=True),
        torch.float64,
    ),
    "espnet": (espnet, call_espnet, torch.float64),
    "espnet-triu": (lambda s: espnet(s, zero_triu=True), call_espnet, torch.float64),
    "espnet-legacy": (
        lambda s: espnet(s, "LegacyRelPositionMultiHeadedAttention", zero_triu=True),
        call_legacy,
        torch.float64,
    ),
    "speechbrain": (lambda s: s("speechbrain").RelPosMHAXL(WIDTH, HEADS), call_speechbrain, torch.float32),
    "speechbrain-vbias": (
        lambda s: s("speechbrain").RelPosMHAXL(WIDTH, HEADS, vbias=True),
        call_speechbrain,
        torch.float32,
    ),
    "fairseq2": (fairseq2, call_fairseq2, torch.float32),
    "fairseq2-causal": (lambda s: fairseq2(s, "CausalAttentionBias"), call_fairseq2, torch.float32),
    "fairseq2-shaw": (fairseq2_shaw, call_fairseq2, torch.float32),
    "fairseq2-shaw-causal": (lambda s: fairseq2_shaw(s, "CausalAttentionBias"), call_fairseq2, torch.float32),
}


def make(name, source):
    """The attention of that case with weights of some size, biases included."""
    attention = CASES[name][0](source)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    return attention.to(CASES[name][2])


def run(name, attention, padded=False):
    """Outputs, and gradients of some sum of them: of the input and of all parameters by name."""
    torch.manual_seed(1)
    x = torch.randn(2, LENGTH, WIDTH, dtype=CASES[name][2], requires_grad=True)
    out = CASES[name][1](attention, x, padded)
    named = {"input": x} | dict(attention.named_parameters())
    gradients = torch.autograd.grad((out * torch.randn_like(out)).sum(), list(named.values()), allow_unused=True)
    return {"out": out} | dict(zip(named, gradients, strict=True))


def assert_same(found, wanted, dtype=torch.float64):
    """All sums differ in order alone; float32 as docs/validation.md has it."""
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    scale = max(x.abs().max() for x in wanted.values() if x is not None)
    for name, value in wanted.items():
        assert (value is None) == (found[name] is None), name
        if value is not None:
            assert (found[name] - value).abs().max() <= tolerance * scale, name


def nemo_encoder(source, style="regular", context=(-1, -1)):
    if source("nemo") is conventions:
        return conventions.ConformerEncoder(style, context).double()
    module = importlib.import_module("nemo.collections.asr.modules.conformer_encoder")
    if context == (-1, -1) and style == "chunked_limited":
        context = (6, 2)  # it has the other as one of several
    return module.ConformerEncoder(
        16, 2, WIDTH, n_heads=HEADS, att_context_style=style, att_context_size=list(context), subsampling_factor=2,
        subsampling="dw_striding", dropout=0.0, dropout_emb=0.0, dropout_pre_encoder=0.0, dropout_att=0.0,
        conv_kernel_size=5, causal_downsampling=False,
    ).double()  # fmt: skip


def longformer(source, att_context_size=(3, 3), **options):
    name = "RelPositionMultiHeadAttentionLongformer"
    return nemo(source, name, att_context_size=list(att_context_size), **options)
