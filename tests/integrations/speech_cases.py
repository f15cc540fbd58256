"""The speech encoders of transformers that tests build small, with random weights."""

from __future__ import annotations

import importlib

import pytest
import torch
import transformers

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
STILL = dict(activation_dropout=0.0, attention_dropout=0.0, layerdrop=0.0)  # with dropout there is nothing to compare
PARAKEET = SIZES | STILL | dict(dropout=0.0, subsampling_conv_channels=8, num_mel_bins=16)
WAV2VEC2 = SIZES | STILL | dict(hidden_dropout=0.0, conformer_conv_dropout=0.0, conv_depthwise_kernel_size=5)
WAV2VEC2 |= dict(num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, apply_spec_augment=False)
SEAMLESS = dict(hidden_size=32, speech_encoder_layers=2, speech_encoder_attention_heads=4, conv_depthwise_kernel_size=5)
SEAMLESS |= dict(speech_encoder_intermediate_size=48, speech_encoder_dropout=0.0, speech_encoder_layerdrop=0.0)
LIMITS = dict(left_max_position_embeddings=6, right_max_position_embeddings=3)
FASTSPEECH2 = dict(layers=2, num_attention_heads=4, linear_units=48, kernel_size=7, normalize_before=False)
FASTSPEECH2 |= dict(concat_after=False, dropout_rate=0.0, positional_dropout_rate=0.0, attention_dropout_rate=0.0)

# id: folder of transformers, encoder, configuration, the class that is accelerated
CASES = {
    "parakeet": ("parakeet", "ParakeetEncoder", "ParakeetEncoderConfig", PARAKEET, "ParakeetEncoderAttention"),
    "nemotron": (
        "nemotron_asr_streaming",
        "NemotronAsrStreamingEncoder",
        "NemotronAsrStreamingEncoderConfig",
        PARAKEET | dict(sliding_window=5, default_num_lookahead_tokens=1),
        "NemotronAsrStreamingEncoderAttention",
    ),
    "fastspeech2": (
        "fastspeech2_conformer",
        "FastSpeech2ConformerEncoder",
        "FastSpeech2ConformerConfig",
        dict(hidden_size=32),
        "FastSpeech2ConformerAttention",
    ),
    "wav2vec2": (
        "wav2vec2_conformer",
        "Wav2Vec2ConformerEncoder",
        "Wav2Vec2ConformerConfig",
        WAV2VEC2 | dict(position_embeddings_type="relative"),
        "Wav2Vec2ConformerSelfAttention",
    ),
    "bert": (
        "wav2vec2_bert",
        "Wav2Vec2BertEncoder",
        "Wav2Vec2BertConfig",
        WAV2VEC2 | dict(position_embeddings_type="relative"),
        "Wav2Vec2BertSelfAttention",
    ),
    "bert-key": (
        "wav2vec2_bert",
        "Wav2Vec2BertEncoder",
        "Wav2Vec2BertConfig",
        WAV2VEC2 | LIMITS | dict(position_embeddings_type="relative_key"),
        "Wav2Vec2BertSelfAttention",
    ),
    "seamless": (
        "seamless_m4t",
        "SeamlessM4TConformerEncoder",
        "SeamlessM4TConfig",
        SEAMLESS | dict(position_embeddings_type="relative"),
        "SeamlessM4TConformerSelfAttention",
    ),
    "seamless2": (
        "seamless_m4t_v2",
        "SeamlessM4Tv2ConformerEncoder",
        "SeamlessM4Tv2Config",
        SEAMLESS | LIMITS | dict(speech_encoder_chunk_size=8, speech_encoder_left_chunk_num=1),
        "SeamlessM4Tv2ConformerSelfAttention",
    ),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Sizes are tiny, and waking threads would cost more than the work."""
    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """A small encoder with random weights, biases u and v included; batch statistics in training mode."""
    folder, encoder, config, sizes, _ = CASES[name]
    try:
        modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    except ImportError:
        pytest.skip(f"this transformers has no {folder}")
    configuration = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    settings = getattr(configuration, config)(**sizes)
    settings._attn_implementation = attention
    cls = getattr(modeling, encoder)
    model = cls(settings, FASTSPEECH2) if name == "fastspeech2" else cls(settings)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype)
