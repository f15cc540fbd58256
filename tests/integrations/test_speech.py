"""Speech models of transformers, accelerated: the same outputs and gradients, restored exactly, and what is refused."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import ParakeetEncoder, ParakeetEncoderConfig, ParakeetForCTC, Wav2Vec2BertConfig, Wav2Vec2BertModel

import xlnet_kernels as xk
from tests.integrations.speech_cases import CASES, LIMITS, PARAKEET, WAV2VEC2, build, one_thread  # noqa: F401
from xlnet_kernels.integrations import _masks, parakeet
from xlnet_kernels.integrations.transformers import STAND_INS, accelerate, restore

LENGTH, SHORT = 13, 9  # frames of the two sequences of a batch


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
    """The mask of eager attention."""
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


@pytest.mark.parametrize("kind", ["causal", "window", "padding", "chunks", "fully masked"])
def test_spans_are_found(kind):
    places = torch.arange(7)
    padding = places >= torch.tensor([[7], [4]])
    masks = {
        "causal": xk.RankMask.causal(2, 7),
        "window": xk.RankMask.causal(2, 7, window=3),
        "padding": xk.RankMask.padding(padding),
        "chunks": xk.RankMask((places // 3 + 1)[None], (places // 3)[None], (places // 3 - 1)[None]),
        "fully masked": xk.RankMask(torch.where(padding, 0, 1), padding.long()),
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
