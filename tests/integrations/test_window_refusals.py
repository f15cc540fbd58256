"""Refusals of `accelerate` with a window, in one sentence each."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import xlnet_kernels as xk
from tests.integrations import own_modules, toolkit_cases
from tests.integrations import test_speech as speech
from tests.integrations.conventions import WIDTH
from tests.integrations.speech_cases import CASES, build
from tests.integrations.toolkit_cases import LENGTH, make, positions
from xlnet_kernels.integrations import _libraries, accelerated


def test_global_tokens_with_a_cache_are_refused(small):
    attention = xk.accelerate(make("nemo", lambda toolkit: small), window=(3, 1), global_tokens=2)
    cache, x, table = (torch.randn(2, n, WIDTH, dtype=torch.float64) for n in (6, 4, 19))
    with pytest.raises(ValueError, match="global_tokens must be 0 with a cache, got 2 and 4 queries of 10 keys"):
        attention(x, x, x, None, table[:1], cache)


BAD = [
    (dict(window=(0, 0)), r"window must show a query more than its own key, got \(0, 0\)"),
    (dict(window=(-1, 2)), r"window must be a pair \(left, right\) of integers of at least 0, got \(-1, 2\)"),
    (dict(window=(1.5, 2)), r"window must be a pair .* got \(1.5, 2\)"),
    (dict(window=(3,)), r"window must be a pair .* got \(3,\)"),
    (dict(window=128), "window must be a pair .* got 128"),
    (dict(window=(1, 1), window_over=-1), "window_over must be an integer of at least 0, got -1"),
    (dict(window=(1, 1), global_tokens=0.5), "global_tokens must be an integer of at least 0, got 0.5"),
    (dict(window_over=9), r"window_over needs window=\(left, right\), got window=None and window_over=9"),
    (dict(global_tokens=2), r"global_tokens needs window=\(left, right\), got window=None and global_tokens=2"),
]


@pytest.mark.parametrize("options, text", BAD, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_what_is_no_window_is_refused(options, text):
    layer = build("parakeet").layers[0].self_attn
    kind = type(layer)
    with pytest.raises(ValueError, match=text):
        xk.accelerate(layer, **options)
    assert type(layer) is kind


def test_models_with_masks_of_their_own_are_refused(small):
    config = transformers.XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=2, d_inner=8)
    model = transformers.XLNetModel(config)
    reason = "window must be None for transformers XLNetRelativeAttention: its memory and its query stream have masks"
    with pytest.raises(ValueError, match=reason):
        xk.accelerate(model, window=(2, 2))
    assert not accelerated(model)
    local = make("nemo-local", lambda toolkit: small)
    reason = "window must be None for NeMo RelPositionMultiHeadAttentionLongformer: it has a window of its own, att_con"
    with pytest.raises(ValueError, match=reason):
        xk.accelerate(local, window=(2, 2))
    assert accelerated(xk.accelerate(local))


def test_heads_without_relative_positions_are_refused():
    config = transformers.Wav2Vec2BertConfig(**speech.WAV2VEC2, position_embeddings_type="rotary")
    with pytest.raises(ValueError, match="got 'rotary': it has no relative term"):
        xk.accelerate(transformers.Wav2Vec2BertModel(config), window=(2, 2))
    with pytest.raises(ValueError, match=r"got MultiheadAttention \(torch's has no relative positions\)"):
        xk.accelerate(torch.nn.MultiheadAttention(8, 2), window=(2, 2))


TEXT = r"was called with options that only its library's code .* accelerate the model without window, got \(2, 1\)"


@pytest.mark.parametrize("name", ["parakeet", "nemotron", "fastspeech2", "bert", "wav2vec2"])
def test_attention_maps_of_a_window_are_refused(name):
    """The library's code computes them, and sees everything."""
    model = xk.accelerate(build(name), window=(2, 1))
    (layer, *_) = (x for x in model.modules() if type(x).__name__ == CASES[name][-1])
    x = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match=TEXT):
        layer(x, None, torch.randn(1, 9, WIDTH, dtype=torch.float64), output_attentions=True)


@pytest.mark.parametrize("name", ["nemo", "espnet", "espnet-legacy", "speechbrain", "fairseq2"])
def test_other_calls_of_the_library_are_refused(name, small):
    attention = xk.accelerate(make(name, lambda toolkit: small), window=(2, 1))
    x = torch.randn(1, 5, WIDTH, dtype=toolkit_cases.CASES[name][2])
    calls = {
        "nemo": lambda: attention(x, x, x, None, positions(7)),
        "espnet": lambda: attention(x, x, x, positions(7), None),
        "espnet-legacy": lambda: attention(x[:, :4], x, x, positions(5), None),
        "speechbrain": lambda: attention(x, x, x, positions(9).float(), return_attn_weights=True),
        "fairseq2": lambda: toolkit_cases.call_fairseq2(attention, x, False),
    }
    if name == "fairseq2":
        attention.bias = small.SlopeBias()
    with pytest.raises(ValueError, match=TEXT):
        calls[name]()


def test_tables_with_distances_of_their_own_are_refused(monkeypatch):
    monkeypatch.setitem(_libraries.REGISTERED, own_modules.CosyVoice, own_modules.FusedCosyVoice)
    module = xk.accelerate(own_modules.CosyVoice(), window=(2, 1))
    q = torch.randn(1, 4, LENGTH, 8)
    with pytest.raises(ValueError, match="max_distance must be None under a window of accelerate, got 5"):
        module.relative_attention(q, q, q, positions(7).float(), max_distance=5)
