"""Accelerated models whose weights are elsewhere or otherwise: offloaded, quantised, with adapters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import xlnet_kernels as xk
from tests.integrations.speech_cases import build, one_thread  # noqa: F401
from tests.integrations.wrappers import encode
from tests.model.twins import assert_same, make_inputs, theirs
from xlnet_kernels.integrations import accelerated

pytestmark = pytest.mark.filterwarnings(
    "ignore:xlnet_kernels", "ignore:.*deprecated", "ignore:The following device_map"
)
SPEECH = ["parakeet", "nemotron", "fastspeech2", "wav2vec2", "bert-key", "seamless"]

DISK = [
    {"": "disk"},
    {"transformer.layer": "disk"}
    | dict.fromkeys(("transformer.word_embedding", "transformer.mask_emb", "lm_loss"), "cpu"),
]


@pytest.mark.parametrize("devices", DISK, ids=["all", "layers"])
def test_weights_on_disk(devices, tmp_path, operator):
    pytest.importorskip("accelerate")
    model = theirs("XLNetLMHeadModel")
    inputs = make_inputs()
    wanted = model(**inputs).logits
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model", device_map=devices, offload_folder=tmp_path / "disk")
    assert loaded.transformer.layer[0].rel_attn.q.is_meta
    own = {name: dict(vars(x)) for name, x in loaded.named_modules()}
    for _ in range(2):
        assert_same(xk.accelerate(loaded)(**inputs).logits, wanted)
    assert len(operator) == 4 and accelerated(loaded)["transformers XLNetRelativeAttention"] == 2
    assert {name: dict(vars(x)) for name, x in xk.restore(loaded).named_modules()} == own
    assert_same(loaded(**inputs).logits, wanted, 0)
    assert len(operator) == 4


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload"])
@pytest.mark.parametrize("first", [True, False], ids=["accelerated first", "offloaded first"])
@pytest.mark.parametrize("name", ["xlnet", *SPEECH])
def test_offloaded_weights(name, first, how, tmp_path, operator):
    """Also those of tables and projections, which are on the meta device between their calls."""
    offload = getattr(pytest.importorskip("accelerate"), how)
    model = theirs("XLNetLMHeadModel") if name == "xlnet" else build(name).eval()
    wanted = encode(model).detach()
    folder = (tmp_path,) if how == "disk_offload" else ()
    with torch.no_grad():
        for step in (xk.accelerate, offload) if first else (offload, xk.accelerate):
            step(model, *folder) if step is offload else step(model)
        for _ in range(2):
            assert_same(encode(model), wanted, 1e-5)
        assert len(operator) == 4 and accelerated(model)
        assert_same(encode(xk.restore(model)), wanted, 1e-12 if name != "xlnet" else 1e-5)
    assert len(operator) == 4


def test_layers_on_several_devices_get_their_masks_there():
    """HF accelerate moves what has a method `to`."""
    model = xk.accelerate(theirs("XLNetModel"))
    seen = []
    model.layer[0].register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[2]))
    model(**make_inputs())
    moved = seen[0].to("meta")
    parts = [moved.mask, *moved.segment_rows, moved.positions.position, moved.positions.row]
    assert all(x.device.type == "meta" for x in parts)
    model(make_inputs()["input_ids"], attention_mask=make_inputs()["attention_mask"])
    assert seen[1].to("meta").mask.key_rank.is_meta and seen[1].to("meta").fully_masked is None


class Quantised(nn.Module):
    """As bitsandbytes': weights of bytes, flat, in a module that is no Linear, and only its call knows them."""

    def __init__(self, linear) -> None:
        super().__init__()
        self.scale, shape = linear.weight.detach().abs().max() / 127, linear.weight.shape
        weight = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight, self.shape = nn.Parameter(weight.flatten()[:, None], requires_grad=False), shape
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight.view(self.shape) * self.scale.to(x.dtype), self.bias)


class LowRank(nn.Module):
    """As PEFT's."""

    def __init__(self, linear) -> None:
        super().__init__()
        self.base_layer = linear
        self.a, self.b = (nn.Parameter(torch.randn(size, 2).to(linear.weight)) for size in linear.weight.shape)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + x @ self.b @ self.a.mT


@pytest.mark.parametrize("kind", [Quantised, LowRank])
@pytest.mark.parametrize("first", [True, False], ids=["accelerated first", "replaced first"])
@pytest.mark.parametrize("name", SPEECH)
def test_replaced_projections(name, first, kind, operator):
    model = build(name).eval()
    plain = copy.deepcopy(model)
    if first:
        xk.accelerate(model)
    for one in (plain, model):
        torch.manual_seed(0)
        for parent in [x for x in one.modules() if "Attention" in type(x).__name__]:
            for child, linear in list(parent.named_children()):
                if type(linear) is nn.Linear:
                    setattr(parent, child, kind(linear))
    xk.accelerate(model)
    with torch.no_grad():
        for _ in range(2):
            assert_same(encode(model), encode(plain), 1e-5)
    assert len(operator) == 4


def test_a_module_around_attention(operator):
    """As PEFT has for bare parameters."""

    class Around(nn.Module):
        def __init__(self, inner) -> None:
            super().__init__()
            self.base_layer = inner

        def forward(self, *inputs, **options):
            return self.base_layer(*inputs, **options)

    model = theirs("XLNetModel")
    inputs = make_inputs()
    wanted = model(**inputs).last_hidden_state
    model.layer[0].rel_attn = Around(model.layer[0].rel_attn)
    assert_same(xk.accelerate(model)(**inputs).last_hidden_state, wanted)
    assert len(operator) == 2
