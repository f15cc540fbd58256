"""accelerate on what NeMo alone has: encoders with masks of their own, a cache, local attention."""

from __future__ import annotations

import importlib

import pytest
import torch

import xlnet_kernels as xk
from tests.integrations import conventions, conventions_flex
from tests.integrations.conventions import HEADS, WIDTH
from tests.integrations.toolkit_cases import (
    LENGTH,
    SHORT,
    assert_same,
    make,
    nemo_encoder,
    positions,
    real,
    run,
)
from xlnet_kernels.integrations import accelerated, nemo_transformer

pytestmark = pytest.mark.usefixtures("one_thread")


def test_nemo_streams_with_its_cache(toolkits, calls):
    """Chunks of 4 frames with 6 cached ones, of which the first sequence has none yet."""
    attention = make("nemo", toolkits)
    attention.cache_drop_size = 0
    torch.manual_seed(1)
    mask = torch.zeros(2, 4, 10, dtype=torch.bool)
    mask[0, :, :6] = True
    cache, table = torch.randn(2, 6, WIDTH, dtype=torch.float64), positions(19)
    chunks = torch.randn(3, 2, 4, WIDTH, dtype=torch.float64)

    def outputs():
        past = cache
        for chunk in chunks:
            out, past = attention(query=chunk, key=chunk, value=chunk, mask=mask, pos_emb=table, cache=past)
            yield from (out, past)

    wanted = list(outputs())
    xk.accelerate(attention)
    for one, other in zip(outputs(), wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert len(calls) == 3 and calls[0]["query_positions"].tolist() == [[6, 7, 8, 9]] * 2


STYLES = [
    ("regular", (-1, -1)),
    ("regular", (4, 1)),
    ("regular", (4, -1)),
    ("chunked_limited", (6, 2)),
    ("chunked_limited", (-1, 1)),
    ("chunked_limited", (-1, -1)),
    ("chunked_limited_with_rc", (4, 3, 2)),
    ("chunked_limited_with_rc", (-1, -1, -1)),
]


@pytest.mark.parametrize("offset", [None, torch.tensor([0, 3])], ids=["whole", "cached"])
@pytest.mark.parametrize("style, context", STYLES, ids=str)
def test_nemo_encoders_make_ranks(style, context, offset, toolkits):
    encoder = nemo_encoder(toolkits, style, context)
    arguments = list(context), torch.tensor([LENGTH, SHORT]), LENGTH, offset, torch.device("cpu")
    padding, hidden = encoder._create_masks(*arguments)
    xk.accelerate(encoder)
    same, ranks = encoder._create_masks(*arguments)
    if offset is not None:
        hidden, ranks = hidden[:, 5:], ranks[:, 5:]
    assert isinstance(ranks, xk.RankMask)
    assert torch.equal(same, padding) and torch.equal(ranks.to_bool(), ~hidden)
    xk.restore(encoder.layers[1])  # attention that takes tensors alone
    again = encoder._create_masks(*arguments)[1]
    assert torch.equal(again if offset is None else again[:, 5:], hidden)


def test_a_whole_nemo_encoder(toolkits, calls):
    encoder = nemo_encoder(toolkits, "regular", (6, 6)).eval()
    if toolkits("nemo") is conventions:
        inputs = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), torch.tensor([LENGTH, SHORT])
    else:
        inputs = torch.randn(2, 16, 2 * LENGTH, dtype=torch.float64), torch.tensor([2 * LENGTH, 2 * SHORT])

    def outputs():
        out = encoder(*inputs) if toolkits("nemo") is conventions else encoder(audio_signal=inputs[0], length=inputs[1])
        return out if isinstance(out, torch.Tensor) else out[0]

    wanted = outputs()
    xk.accelerate(encoder)
    assert (outputs() - wanted).abs().max() < 1e-11
    assert len(calls) == 2 and calls[0]["mask"].query_rank is calls[1]["mask"].query_rank
    assert torch.equal(xk.restore(encoder) and outputs(), wanted)


@pytest.mark.slow
def test_a_streaming_nemo_encoder(scripts, calls):
    """NeMo's own cache-aware encoder, chunk after chunk, from an empty cache on; one sequence is shorter."""
    real("nemo")
    encoder = importlib.import_module("nemo.collections.asr.modules.conformer_encoder").ConformerEncoder(
        16, 2, WIDTH, n_heads=HEADS, att_context_style="chunked_limited", att_context_size=[6, 2],
        subsampling_factor=4, subsampling="dw_striding", causal_downsampling=True, conv_context_size="causal",
        conv_kernel_size=5, conv_norm_type="layer_norm",
    ).double().eval()  # fmt: skip
    encoder.setup_streaming_params()
    config = encoder.streaming_cfg
    first, other = config.chunk_size[0], config.chunk_size[1] + config.pre_encode_cache_size[1]
    chunks = [torch.randn(2, 16, size, dtype=torch.float64) for size in (first, other, other, other)]

    @torch.no_grad()
    def outputs():
        state = encoder.get_initial_cache_state(2, dtype=torch.float64, device=torch.device("cpu"))
        for chunk in chunks:
            names = ("cache_last_channel", "cache_last_time", "cache_last_channel_len")
            lengths = torch.tensor([chunk.shape[2], chunk.shape[2] - 4])
            given = dict(zip(names, state, strict=True))
            out, _, *state = encoder.cache_aware_stream_step(chunk, lengths, **given, keep_all_outputs=True)
            yield from (out, *state)

    wanted = list(outputs())
    xk.accelerate(encoder)
    for one, same in zip(outputs(), wanted, strict=True):
        assert torch.allclose(one, same, rtol=0, atol=1e-12)
    assert len(calls) == 8 and all(isinstance(call["mask"], xk.RankMask) for call in calls)


@pytest.mark.parametrize("name, value", [("att_context_size", [4, 2]), ("global_tokens", 1)])
def test_longformer_settings_may_change_later(name, value, small):
    attention = make("nemo-local", lambda toolkit: small)
    setattr(attention, name, value)
    wanted = run("nemo-local", attention)
    delattr(attention, name)
    setattr(xk.accelerate(attention), name, value)
    assert_same(run("nemo-local", attention), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "causal"])
def test_a_whole_transformer_encoder(mode, scripts, calls, monkeypatch):
    """From mel features on, by FlexAttention itself, which has no backward on the CPU."""
    real("nemo")
    module = pytest.importorskip("nemo.collections.asr.modules.transformer_encoder")
    encoder = module.TransformerEncoder(16, 32, 2, 2, subsampling_factor=2, attn_mode=mode).double().eval()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, lengths = torch.randn(2, 16, 26, dtype=torch.float64), torch.tensor([26, 18])
    with torch.no_grad():
        wanted = encoder(audio_signal=x, length=lengths)
        assert accelerated(xk.accelerate(encoder))["NeMo MultiHeadAttention"] == 2
        monkeypatch.setattr(module, "create_block_mask", None)
        found = encoder(audio_signal=x, length=lengths)
    assert_same({"out": found[0]}, {"out": wanted[0]})
    assert torch.equal(found[1], wanted[1])
    assert len(calls) == 2 and all(isinstance(call["mask"], xk.RankMask) for call in calls)


@pytest.mark.parametrize("causal", [False, True])
def test_a_transformer_encoder_makes_no_block_mask(causal, small, calls, monkeypatch):
    encoder, lengths = conventions.TransformerEncoder(causal).double(), torch.tensor([LENGTH, SHORT])
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    wanted = encoder(x, lengths)
    xk.accelerate(encoder)
    own = encoder.layers[1].attn
    xk.restore(own)  # with a layer of NeMo's own, its mask is made
    assert_same({"out": encoder(x, lengths)}, {"out": wanted})
    xk.accelerate(own)
    monkeypatch.setattr(conventions_flex, "create_block_mask", None)
    assert_same({"out": encoder(x, lengths)}, {"out": wanted})
    assert len(calls) == 3 and all(isinstance(call["mask"], xk.RankMask) for call in calls)


def test_places_become_a_block_mask_for_nemo(small, calls):
    """Where its own code computes a call, here one with too few positions."""
    attention = xk.accelerate(make("nemo-transformer", lambda toolkit: small))
    places = nemo_transformer._Places(lambda b, h, q, k: k <= q, 2, 1, LENGTH, LENGTH, "cpu")
    masks = []
    with pytest.MonkeyPatch.context() as patch:
        base = conventions.TransformerEncoderAttention
        patch.setattr(base, "forward", lambda self, x, block_mask=None, pos_emb=None: masks.append(block_mask))
        attention(torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), places, positions(5))
    assert not calls and type(masks[0]).__name__ == "BlockMask"
    assert masks[0].shape == places.shape
