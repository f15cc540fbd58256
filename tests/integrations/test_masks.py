"""Masks and positions of other libraries: each call follows their values, however these were written."""

from __future__ import annotations

import pytest
import torch

import xlnet_kernels as xk
from tests.integrations.speech_cases import build, one_thread  # noqa: F401
from xlnet_kernels.integrations import _masks, adapter
from xlnet_kernels.integrations._masks import layer_mask, padding_mask, visible_ranks


def in_place(x, index, value):
    x[index] = value


def by_data(x, index, value):
    x.data[index] = value


def by_numpy(x, index, value):
    x.detach().numpy()[index] = value


def in_inference_mode(x, index, value):
    with torch.inference_mode():
        x[index] = value


WRITERS = [in_place, by_data, by_numpy, in_inference_mode]
# name: the mask that hides nothing, the value that hides, and what is found
READERS = {
    "layer": (torch.ones(2, 1, 5, 5, dtype=torch.bool), False, layer_mask),
    "layer, added": (torch.zeros(2, 1, 5, 5), -torch.inf, layer_mask),
    "padding": (torch.ones(2, 1, 5), 0, padding_mask),
    "shown": (torch.ones(2, 5, 5, dtype=torch.long), 0, lambda mask: visible_ranks(mask, hidden=False)),
    "hidden": (torch.zeros(2, 5, 5, dtype=torch.bool), True, lambda mask: visible_ranks(mask, hidden=True)),
}


def dense(found) -> torch.Tensor:
    """(2, 5, 5) of what was found."""
    visible = found.visible if isinstance(found, _masks.LayerMask) else found
    visible = visible.to_bool() if isinstance(visible, xk.RankMask) else visible
    return torch.ones(2, 5, 5, dtype=torch.bool) if visible is None else visible.reshape(2, -1, 5).expand(2, 5, 5)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("reader", READERS)
def test_masks_follow_what_is_written_into_them(reader, write, mode):
    everything, hides, find = READERS[reader]
    with mode():
        mask = everything.clone()
        for index in (None, (1, ..., slice(3, None)), (0, ..., slice(2, None)), (0, ..., 1)):
            if index is not None:
                write(mask, index, hides)
            wanted = (mask != hides).view(2, -1, 5).expand(2, 5, 5)
            for _ in range(2):
                assert torch.equal(dense(find(mask)), wanted)


@pytest.mark.parametrize("reader", READERS)
def test_a_new_mask_at_the_old_address(reader):
    everything, hides, find = READERS[reader]
    values = everything.numpy().copy()
    assert dense(find(torch.from_numpy(values))).all()
    values[1, ..., 3:] = hides
    assert torch.equal(dense(find(torch.from_numpy(values)))[1, 0], torch.arange(5) < 3)


@pytest.mark.parametrize("reader", READERS)
def test_equal_masks_are_looked_at_once(reader, monkeypatch):
    everything, hides, find = READERS[reader]
    mask = everything.clone()
    mask[1, ..., 3:] = hides
    first = find(mask)
    monkeypatch.setattr(_masks, "spans", None)
    monkeypatch.setattr(_masks.RankMask, "padding", None)
    found = find(mask.clone())
    assert found is first or found.visible is first.visible


def test_masks_of_inference_serve_training_later():
    x, positions = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(2, 9, 32, dtype=torch.float64)
    layer = xk.accelerate(build("parakeet").layers[0].self_attn)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    with torch.inference_mode():
        wanted = layer(x, positions, mask)[0]
    found = layer(x, positions, mask)[0]
    found.sum().backward()
    assert torch.allclose(found, wanted, atol=1e-12) and layer.q_proj.weight.grad.any()


def test_masks_expanded_over_heads_cost_one():
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril().expand(2, 8, 5, 5)
    assert torch.equal(dense(layer_mask(mask[:, :1])), mask[:, 0]) and layer_mask(mask[:0]) is not None
    assert _masks._distinct(mask).shape == (2, 1, 5, 5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITERS)
def test_positions_follow_what_is_written_into_them(write, mode):
    with mode():
        positions = torch.ones(2, 5, 4)
        assert adapter.shared(positions).dim() == 2
        write(positions, (1, 3), 2)
        assert adapter.shared(positions) is positions
        write(positions, (0, 3), 2)
        assert adapter.shared(positions).dim() == 2
        assert adapter.shared(positions[:1].expand(3, -1, -1)).dim() == 2


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("name", ["parakeet", "fastspeech2"])
def test_layers_follow_masks(name, write):
    """One mask tensor in each step of a loop, as a loader that reuses its buffer gives it."""
    model = build(name).eval()
    layer = next(x for x in model.modules() if type(x).__name__.endswith("Attention"))
    x, positions = (
        torch.randn(2, 5, 32, dtype=torch.float64),
        torch.randn(1, 9, 32, dtype=torch.float64).expand(2, -1, -1),
    )
    mask = torch.ones((2, 1, 5, 5) if name == "parakeet" else (2, 1, 5), dtype=torch.bool)
    arguments = dict(position_embeddings=positions) if name == "parakeet" else dict(pos_emb=positions)
    xk.accelerate(layer)
    with torch.no_grad():
        for step in range(3):
            if step:
                write(mask, (step - 1, ..., slice(3, None)), False)
            found = layer(x, attention_mask=mask, **arguments)[0]
            wanted = xk.restore(layer)(x, attention_mask=mask, **arguments)[0]
            xk.accelerate(layer)
            assert torch.allclose(found, wanted, atol=1e-12)
