"""accelerate with skip_padding: Parakeet's layers compute frames alone, and give what transformers gives there."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import xlnet_kernels as xk
from tests.integrations.speech_cases import one_thread  # noqa: F401
from xlnet_kernels.integrations import _window, accelerated, adapter
from xlnet_kernels.integrations._packing import packed_row

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [400, 97, 200, 60, 8]  # steps of mel features, eight to a frame


def encoder(**options) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2, layerdrop=0.0)
    model = transformers.ParakeetEncoder(transformers.ParakeetEncoderConfig(**sizes | options)).double().eval()
    for name, parameter in model.named_parameters():
        if "bias_" in name:
            torch.nn.init.normal_(parameter)
    return model


def batch(lengths: list[int] = LENGTHS) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    flags = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_features": torch.randn(*flags.shape, 80, dtype=torch.float64), "attention_mask": flags}


def run(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The output at frames, and all gradients."""
    features = inputs["input_features"].clone().requires_grad_()
    found = model(**inputs | {"input_features": features}, output_attention_mask=True)
    is_frame = found.attention_mask.bool()
    out = found.last_hidden_state[is_frame]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    model.zero_grad()
    (out * weights).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"out": out.detach(), "features": features.grad} | grads


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-12 * max(1, value.abs().max().item())), name


@pytest.fixture
def rows(monkeypatch) -> list[int]:
    """The rows of queries of each call of the operator."""
    seen: list[int] = []

    def spy(query, *args, **kwargs):
        seen.append(query.shape[0] * query.shape[2])
        return xk.rel_attention(query, *args, **kwargs)

    for module in (adapter, _window):
        monkeypatch.setattr(module, "rel_attention", spy)
    return seen


@pytest.mark.parametrize("backend", [None, "torch", "reference"])
def test_frames_and_gradients_are_transformers(backend, rows):
    plain = encoder()
    model = xk.accelerate(copy.deepcopy(plain), backend, skip_padding=True)
    assert_same(run(model, batch()), run(plain, batch()))
    frames = 50 + 13 + 25 + 8 + 1
    assert rows == 2 * [frames + 4 * 4], "gaps of half a kernel of 9"


@pytest.mark.parametrize("window", [(3, 2), (40, 0), (0, 9), (100, 3)])
@pytest.mark.parametrize("lengths", [LENGTHS, [300, 80]], ids=str)
def test_window(window, lengths):
    plain = xk.accelerate(encoder(), window=window)
    model = xk.accelerate(copy.deepcopy(plain), window=window, skip_padding=True)
    assert_same(run(model, batch(lengths)), run(plain, batch(lengths)))


def test_window_over_counts_padded_frames():
    plain = xk.accelerate(encoder(), window=(2, 2), window_over=49)
    model = xk.accelerate(copy.deepcopy(plain), window=(2, 2), window_over=49, skip_padding=True)
    assert_same(run(model, batch()), run(plain, batch()))


def test_padding_is_zeros_and_nothing_in_it_counts():
    model = xk.accelerate(encoder(), skip_padding=True)
    out = model(**batch(), output_attention_mask=True)
    assert not out.last_hidden_state[out.attention_mask == 0].any()
    layer, row = model.layers[0], packed_row(out.attention_mask.bool(), 4)
    x = torch.randn(5, 50, 32, dtype=torch.float64).masked_fill(out.attention_mask[..., None] == 0, torch.nan)
    assert not row.pack(x).isnan().any() and layer.skip_padding


@pytest.mark.parametrize(
    ("flags", "longest"),
    [
        ([[1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 0]], 3),  # padding before
        ([[0, 1, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]], 3),  # a hole, and no frame at all
    ],
)
def test_any_flags_can_be_packed(flags, longest):
    flags = torch.tensor(flags, dtype=torch.bool)
    row = packed_row(flags, 1)
    assert row.longest == longest
    x = torch.randn(2, 8, 3) * flags[..., None]
    assert torch.equal(row.unpack(row.pack(x), 2, 8), x)
    visible = row.visible.to_bool()[0]
    sequence = torch.full((row.flags.shape[1],), -1)
    sequence[row.place] = (row.source // 8).where(flags.flatten()[row.source], -1)
    assert torch.equal(visible, (sequence[:, None] == sequence) & (sequence >= 0))


def test_nothing_to_skip(rows):
    """No padding, less padding than gaps, and no frames."""
    plain = encoder()
    model = xk.accelerate(copy.deepcopy(plain), skip_padding=True)
    for lengths in ([160, 160], [160, 153]):
        assert_same(run(model, batch(lengths)), run(plain, batch(lengths)))
        assert set(rows) == {40}
    assert packed_row(torch.zeros(2, 9, dtype=torch.bool), 1) is None


def test_attention_maps_and_dropped_positions_compute_padding(rows):
    plain = encoder(attn_implementation="eager")
    model = xk.accelerate(copy.deepcopy(plain), skip_padding=True)
    assert len(model(**batch(), output_attentions=True).attentions) == 2 and not rows
    model = xk.accelerate(encoder(dropout_positions=0.5), skip_padding=True).train()
    model(**batch())
    assert rows == 2 * [5 * 50]


def test_training_with_checkpoints_and_restore():
    plain = encoder()
    model = xk.accelerate(copy.deepcopy(plain), skip_padding=True)
    assert accelerated(model)["transformers ParakeetEncoderBlock"] == 2
    model.gradient_checkpointing_enable()
    for layer in model.layers:  # checkpoints are for training, dropout and BatchNorm are not compared here
        layer.training = True
    assert_same(run(model, batch()), run(plain, batch()))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.layers[0].skip_padding
    xk.accelerate(model)
    assert not model.layers[0].skip_padding
    xk.restore(model)
    assert type(model.layers[0]).__mro__ == type(plain.layers[0]).__mro__ and "skip_padding" not in vars(
        model.layers[0]
    )


def test_bad_input():
    model = encoder()
    with pytest.raises(ValueError, match="skip_padding must be a bool, got 1"):
        xk.accelerate(model, skip_padding=1)
    with pytest.raises(ValueError, match="global_tokens must be 0 with skip_padding, got 2"):
        xk.accelerate(model, window=(3, 3), global_tokens=2, skip_padding=True)
    other = transformers.XLNetModel(transformers.XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=2, d_inner=8))
    with pytest.raises(ValueError, match=r"skip_padding needs layers of transformers' ParakeetEncoder.*got XLNetModel"):
        xk.accelerate(other, skip_padding=True)
    assert not accelerated(model) and not accelerated(other)
