"""Speech models of transformers, accelerated: the same outputs and gradients, restored exactly, and what is refused."""

from __future__ import annotations

import copy
import importlib
import inspect
import weakref

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import ParakeetEncoder, ParakeetEncoderConfig, ParakeetForCTC, Wav2Vec2BertConfig, Wav2Vec2BertModel

import xlnet_kernels as xk
from xlnet_kernels.integrations import _masks, parakeet
from xlnet_kernels.integrations.transformers import STAND_INS, accelerate, restore

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
LENGTH, SHORT = 13, 9  # frames of the two sequences of a batch


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


def run(name: str, model: torch.nn.Module, masked: bool, dtype: torch.dtype = torch.float64):
    """Outputs, and the gradients of some sum of them: of the input and of all parameters by name."""
    torch.manual_seed(1)
    seen = torch.arange(LENGTH) < torch.tensor([[LENGTH], [SHORT]])
    if name in ("parakeet", "nemotron"):  # 8 mel frames are one frame
        x, seen = torch.randn(2, 8 * LENGTH, 16, dtype=dtype), seen.repeat_interleave(8, 1)
    else:
        x = torch.randn(2, LENGTH, 32, dtype=dtype)
    if name == "fastspeech2":
        seen = seen[:, None].long()
    x.requires_grad_()
    out = model(x.clone(), seen if masked else None)
    out = out[0] if isinstance(out, tuple) else getattr(out, "last_hidden_state", out)
    named = {"input": x} | dict(model.named_parameters())
    gradients = torch.autograd.grad((out * torch.randn_like(out)).sum(), list(named.values()), allow_unused=True)
    return out, dict(zip(named, gradients, strict=True))


def assert_same(found, wanted, tolerance: float) -> None:
    assert torch.allclose(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    scale = max(gradient.abs().max() for gradient in wanted[1].values() if gradient is not None)
    for name, gradient in wanted[1].items():
        assert (gradient is None) == (found[1][name] is None), name
        if gradient is not None:
            assert (found[1][name] - gradient).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_the_same(name, masked, calls):
    model = build(name)
    before = {key: value.data_ptr() for key, value in model.state_dict().items()}
    wanted = run(name, model, masked)
    assert accelerate(model) is model
    # All sums differ in order alone.
    assert_same(run(name, model, masked), wanted, 1e-12)
    assert len(calls) == 2
    masks = [call["mask"] for call in calls]
    if masked:  # ranks, not a map
        assert all(isinstance(mask, xk.RankMask) for mask in masks) and masks[0] is masks[1]
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == before
    restore(model)
    again = run(name, model, masked)
    assert len(calls) == 2 and torch.equal(again[0], wanted[0])
    kind = CASES[name][-1]
    layers = [module for module in model.modules() if type(module).__name__ == kind]
    assert len(layers) >= 2 and all(type(layer).__module__.startswith("transformers.") for layer in layers)
    assert not any("backend" in vars(layer) for layer in layers)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_float32(attention):
    """Eager attention has its softmax in float32 whatever the model is, so it is only compared here."""
    model = build("parakeet", attention, torch.float32)
    wanted = run("parakeet", model, True, torch.float32)
    assert_same(run("parakeet", accelerate(model), True, torch.float32), wanted, 2e-5)


@pytest.mark.parametrize("name", ["bert", "seamless"])
def test_masks_that_are_added_to_scores(name, calls):
    """What eager attention gets."""
    model = build(name, "eager")
    wanted = run(name, model, True)
    assert_same(run(name, accelerate(model), True), wanted, 1e-12)
    assert isinstance(calls[0]["mask"], xk.RankMask)


@pytest.mark.parametrize("name", ["parakeet", "bert"])
def test_attention_maps_come_from_the_original(name, calls):
    model = build(name, "eager", torch.float32).eval()
    if name == "bert":
        config = model.config
        model = Wav2Vec2BertModel(copy.deepcopy(config)).eval()
        x = torch.randn(1, 7, config.feature_projection_input_dim)
    else:
        x = torch.randn(1, 56, 16)
    wanted = model(x, output_attentions=True).attentions
    found = accelerate(model)(x, output_attentions=True).attentions
    assert len(found) == len(wanted) == 2 and not calls
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


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
    with pytest.warns(UserWarning, match="novelty"):
        found = layer(*arguments, novelty=torch.ones(1))[0]
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


def test_dropped_positions_are_projected_for_each_sequence(calls):
    layer = build("parakeet").layers[0].self_attn
    x, positions = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(2, 9, 32, dtype=torch.float64)
    mask = torch.rand(2, 4, 5, 5) < 0.7  # of every head
    mask[..., 0] = True
    wanted = layer(x, positions, mask)[0]
    accelerate(layer)
    assert torch.allclose(layer(x, positions, mask)[0], wanted, atol=1e-13)
    assert torch.equal(calls[0]["mask"], mask)
    with torch.no_grad():
        positions[1] = positions[0]  # found out anew where a tensor has changed
        mask[:] = True
    restore(layer)
    wanted = layer(x, positions, mask)[0]
    assert torch.allclose(accelerate(layer)(x, positions, mask)[0], wanted, atol=1e-13)


def test_a_mask_that_hides_nothing_is_none(calls):
    layer = accelerate(build("parakeet").layers[0].self_attn)
    x, positions = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(2, 9, 32, dtype=torch.float64)
    out = layer(x, positions, torch.ones(2, 1, 5, 5, dtype=torch.bool))[0]
    assert calls[0]["mask"] is None and torch.equal(out, layer(x, positions)[0])


def test_soft_masks_go_to_the_original(calls):
    layer = build("bert", "eager").layers[0].self_attn
    x, positions = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(1, 9, 32, dtype=torch.float64)
    soft = torch.randn(2, 1, 5, 5, dtype=torch.float64)
    wanted = layer(x, soft, positions)[0]
    assert torch.equal(accelerate(layer)(x, soft, positions)[0], wanted) and not calls


def test_gradient_checkpointing_and_inference_mode():
    model = build("parakeet").train()
    for layer in model.layers:
        layer.conv.norm.momentum = 0.0  # computing forward twice must not move the statistics
    wanted = run("parakeet", model, True)
    getattr(accelerate(model), "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert_same(run("parakeet", model, True), wanted, 1e-12)
    x = torch.randn(1, 80, 16, dtype=torch.float64)
    with torch.inference_mode():
        found = model.eval()(x, torch.ones(1, 80, dtype=torch.bool)).last_hidden_state
    assert torch.allclose(found, restore(model)(x).last_hidden_state, atol=1e-12)


def test_positions_are_projected_once_at_inference(monkeypatch):
    """A shorter audio's are the middle rows of a longer one's; what is kept is gone where it is no longer right."""
    model = build("parakeet")
    plain = copy.deepcopy(model)
    layer = accelerate(model).layers[0].self_attn
    projection, projected = layer.relative_k_proj, []
    kind, forward = type(projection), type(projection).forward  # one of the instance's own would be heeded

    def counted(self, x):
        if self is projection:
            projected.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(kind, "forward", counted)
    with torch.no_grad():
        for length in (9, 9, 5, 11):
            x = torch.randn(2, length, 32, dtype=torch.float64)
            call = (x, model.encode_positions(x), None)
            wanted = plain.layers[0].self_attn(*call)[0]
            assert torch.allclose(layer(*call)[0], wanted, atol=1e-12)
        assert projected == [17, 1, 1, 1, 21, 1]
        projection.weight.data.mul_(2)
        assert not torch.allclose(layer(*call)[0], wanted, atol=1e-3)
        projection.weight.data.div_(2)
        positions = call[1].mul_(2)
        assert torch.allclose(layer(*call)[0], plain.layers[0].self_attn(x, positions, None)[0], atol=1e-12)
    projected.clear()
    layer(*call)[0].sum().backward()
    assert projected == [21] and projection.weight.grad is not None
    assert "kept" in vars(layer) and "kept" not in vars(restore(model).layers[0].self_attn)


def test_a_layer_compiles():
    """In one graph, for any length: masks stay maps there, and positions are projected for each sequence."""
    model = build("parakeet")
    layer, other = (block.self_attn for block in model.layers)
    other.load_state_dict(layer.state_dict())
    compiled = torch.compile(accelerate(other), fullgraph=True, dynamic=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (7, 9):
            x, mask = torch.randn(2, length, 32, dtype=torch.float64), torch.rand(2, 1, length, length) < 0.5
            mask[1, 0, 3] = False
            positions = model.encode_positions(x)
            assert torch.allclose(compiled(x, positions, mask)[0], layer(x, positions, mask)[0], atol=1e-12)


def test_what_was_found_does_not_keep_a_mask_alive():
    layer = accelerate(build("parakeet").layers[0].self_attn)
    x, positions = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(2, 9, 32, dtype=torch.float64)
    for heads in (4, 1):
        visible = torch.rand(2, heads, 5, 5) < 0.5
        known = weakref.ref(visible)
        layer(x, positions, visible)
        del visible
        assert known() is None


def test_a_model_with_a_head_saves_and_loads(tmp_path, calls):
    torch.manual_seed(0)
    config = transformers.ParakeetCTCConfig(vocab_size=10, pad_token_id=9, encoder_config=PARAKEET)
    model = accelerate(ParakeetForCTC(config)).eval()
    inputs = dict(input_features=torch.randn(2, 80, 16), attention_mask=torch.arange(80) < torch.tensor([[80], [50]]))
    labels = torch.randint(9, (2, 2))
    wanted = model(**inputs, labels=labels)
    model.save_pretrained(tmp_path)
    loaded = ParakeetForCTC.from_pretrained(tmp_path)
    found = loaded(**inputs, labels=labels)
    assert len(calls) == 2  # what is loaded is transformers' own
    assert torch.isfinite(wanted.loss) and torch.allclose(found.loss, wanted.loss, rtol=1e-5)
    assert torch.allclose(found.logits, wanted.logits, atol=1e-5)
    assert torch.equal(accelerate(copy.deepcopy(loaded)).generate(**inputs), loaded.generate(**inputs))


def test_a_backend_can_be_asked_for(calls):
    model = accelerate(build("parakeet"), backend="reference")
    run("parakeet", model, False)
    assert [call["backend"] for call in calls] == ["reference", "reference"]


def test_adapters_without_positions_stay_as_they_are(calls):
    torch.manual_seed(0)
    sizes = WAV2VEC2 | dict(feature_projection_input_dim=16, add_adapter=True, num_adapter_layers=1)
    model = Wav2Vec2BertModel(Wav2Vec2BertConfig(**sizes, **LIMITS, position_embeddings_type="relative_key")).eval()
    x = torch.randn(2, 20, 16)
    wanted = model(x).last_hidden_state
    assert torch.allclose(accelerate(model)(x).last_hidden_state, wanted, atol=1e-5) and len(calls) == 2


@pytest.mark.parametrize("kind", ["rotary", None])
def test_other_positions_are_refused(kind):
    model = Wav2Vec2BertModel(Wav2Vec2BertConfig(**WAV2VEC2, position_embeddings_type=kind))
    with pytest.raises(ValueError, match=f"position_embeddings_type.*got {kind!r}: it has no relative term"):
        accelerate(model)


def test_heads_that_share_keys_are_refused():
    model = ParakeetEncoder(ParakeetEncoderConfig(**PARAKEET))
    model.layers[1].self_attn.num_key_value_groups = 2
    with pytest.raises(ValueError, match="num_key_value_groups = 2"):
        accelerate(model)
    assert type(model.layers[0].self_attn).__module__.startswith("transformers.")  # nothing was changed


def test_every_stand_in_is_registered():
    assert {name for name, module in STAND_INS.items() if module == "parakeet"} == parakeet._CLASSES.keys()
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        parakeet.Nothing  # noqa: B018


@pytest.mark.parametrize("kind", ["causal", "window", "padding", "chunks", "blind"])
def test_spans_are_found(kind):
    places = torch.arange(7)
    padding = places >= torch.tensor([[7], [4]])
    masks = {
        "causal": xk.RankMask.causal(2, 7),
        "window": xk.RankMask.causal(2, 7, window=3),
        "padding": xk.RankMask.padding(padding),
        "chunks": xk.RankMask((places // 3 + 1)[None], (places // 3)[None], (places // 3 - 1)[None]),
        "blind": xk.RankMask(torch.where(padding, 0, 1), padding.long()),
    }
    visible = masks[kind].to_bool()
    assert torch.equal(_masks.spans(visible).to_bool(), visible)
    assert torch.equal(_masks.spans(visible.mT.contiguous().mT).to_bool(), visible)  # any strides


def test_what_is_no_span_is_none():
    visible = torch.ones(1, 3, 4, dtype=torch.bool)
    visible[0, 1, 2] = False  # a hole in the middle of one row
    assert _masks.spans(visible) is None


def test_positions_of_another_length_are_refused_and_not_taken_for_a_window():
    model = accelerate(ParakeetEncoder(ParakeetEncoderConfig(**PARAKEET)).eval())
    x = torch.randn(1, 9, 32)
    with pytest.raises(ValueError, match="position embeddings of 9 keys must have 17 rows, got 15"):
        model.layers[0].self_attn(x, position_embeddings=torch.randn(1, 15, 32), attention_mask=None)
