"""Arguments of accelerated speech models: caches, masks of their own, arguments that are not known."""

from __future__ import annotations

import inspect

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import ParakeetEncoderConfig, ParakeetForCTC

from tests.integrations.speech_cases import CASES, PARAKEET, build, one_thread  # noqa: F401
from xlnet_kernels.integrations import _masks
from xlnet_kernels.integrations.transformers import accelerate


def test_streaming_with_cached_keys(calls):
    model = build("nemotron").eval()
    chunks = torch.randn(2, 9 + 4 * 16, 16, dtype=torch.float64).split([9, 16, 16, 16, 16], 1)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24

    def outputs():
        cache = padding = None
        for chunk in chunks:
            with torch.no_grad():
                found = model(chunk, padding_cache=padding, use_cache=True, **{name: cache})
            cache, padding = getattr(found, name), found.padding_cache
            yield found.last_hidden_state

    wanted = list(outputs())
    accelerate(model)
    torch.testing.assert_close(list(outputs()), wanted, rtol=0, atol=1e-12)
    # The first chunk has none before it; the last ones have the window.
    assert calls[0]["query_positions"] is None and calls[-1]["query_positions"].tolist() == [[4, 5], [4, 5]]


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_caches_have_either_name(name, calls):
    """The first is transformers' from 5.24 on."""
    layer = accelerate(build("nemotron").layers[0].self_attn)
    x, positions = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(1, 9, 32, dtype=torch.float64)
    cache = transformers.DynamicCache()
    layer(x[:, :3], positions[:, 2:7], **{name: cache})
    layer(x[:, 3:], positions, **{name: cache})
    assert cache.get_seq_length() == 5 and calls[1]["query_positions"].tolist() == [[3, 4], [3, 4]]


def test_caches_are_not_heeded_where_they_are_not_there(calls):
    layer = accelerate(build("parakeet").layers[0].self_attn)
    x, positions = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(2, 9, 32, dtype=torch.float64)
    cache = transformers.DynamicCache()
    for _ in range(2):
        layer(x, positions, cache=cache)
    assert cache.get_seq_length() == 0 and len(calls) == 2


@pytest.mark.parametrize("name", ["parakeet", "nemotron", "wav2vec2", "bert"])
def test_what_is_not_known_goes_to_the_original(name, calls):
    """A later transformers may pass more. What Trainer passes for the loss is known."""
    layer = build(name).layers[0].self_attn
    x, positions = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(1, 9, 32, dtype=torch.float64)
    arguments = (x, None, positions) if name in ("wav2vec2", "bert") else (x, positions.expand(2, -1, -1))
    wanted = layer(*arguments)[0]
    accelerate(layer)
    with pytest.warns(UserWarning, match="called with novelty:"):
        found = layer(*arguments, novelty=torch.ones(1), use_cache=True)[0]
    assert torch.equal(found, wanted) and not calls
    found = layer(*arguments, use_cache=True, cu_seq_lens_q=None, num_items_in_batch=torch.tensor(7))[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    assert len(calls) == 1


def test_masks_of_flex_attention_go_to_the_original():
    from torch.nn.attention.flex_attention import create_block_mask

    assert _masks.layer_mask(create_block_mask(lambda b, h, i, j: j <= i, None, None, 5, 5, device="cpu")) is None


def test_trainer_calls_the_operator(tmp_path, calls):
    """It gives the number of items of a batch to all layers."""
    pytest.importorskip("accelerate")
    encoder = ParakeetEncoderConfig(**PARAKEET)
    config = transformers.ParakeetCTCConfig(vocab_size=20, pad_token_id=0, encoder_config=encoder)
    model = accelerate(ParakeetForCTC(config))
    seen = torch.ones(80, dtype=torch.bool)
    item = dict(input_features=torch.randn(80, 16), attention_mask=seen, labels=torch.randint(1, 20, (3,)))
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    transformers.Trainer(model, arguments, train_dataset=[item, item]).train()
    assert len(calls) == 2  # of two layers


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_traces_follow_values_and_masks(name, calls):
    """For the length they were made for."""
    model = accelerate(build(name).eval())
    mel = name in ("parakeet", "nemotron")

    def inputs(short: int):
        seen = torch.arange(13) < torch.tensor([[13], [short]])
        x = torch.randn(2, 8 * 13, 16) if mel else torch.randn(2, 13, 32)
        if name == "nemotron":  # which cannot be traced with a mask, accelerated or not
            return (x.double(),)
        return x.double(), seen.repeat_interleave(8, 1) if mel else seen[:, None].long() if "fast" in name else seen

    def encode(*given):
        out = model(*given)
        return out if isinstance(out, torch.Tensor) else out[0] if isinstance(out, tuple) else out.last_hidden_state

    for parameter in model.parameters():
        parameter.requires_grad_(False)  # a function is traced, and they become constants
    model(*inputs(13))
    traced = torch.jit.trace(encode, inputs(9), check_trace=False)
    assert len(calls) == 4
    for short in (9, 4, 13):
        given = inputs(short)
        torch.testing.assert_close(traced(*given), encode(*given), rtol=0, atol=1e-11)
