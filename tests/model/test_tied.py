"""Tied words and logits: the gradient of their table in one piece, the same as in three."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import xlnet_kernels as xk
from tests.model.twins import B, L, N, assert_same, make_inputs, ours


def lm(**options):
    return ours("XLNetLMHeadModel", **options)


def loss_of(model, inputs):
    return model(**inputs, labels=torch.arange(B * N).view(B, N)).loss


def dense_backward(function) -> bool:
    """Whether autograd's own gradient of an embedding is computed in `function`."""
    with torch.profiler.profile() as profile:
        function()
    return any("embedding_dense_backward" in event.key for event in profile.key_averages())


def hooked(model):
    """A copy of the model whose embedding must be called."""
    model = copy.deepcopy(model)
    model.transformer.word_embedding.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("autocast", [False, True])
def test_the_gradient_is_autograds(autocast):
    model, inputs = lm(), make_inputs()
    inputs["input_ids"][0] = 7  # a word that comes often
    plain = hooked(model)
    for _ in range(2):  # the second adds to the first
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = loss_of(model, inputs), loss_of(plain, inputs)
        assert losses[0] == losses[1]
        assert not dense_backward(losses[0].backward) and dense_backward(losses[1].backward)
    for x, y in zip(model.parameters(), plain.parameters(), strict=True):
        assert x.grad is y.grad is None or (x.grad - y.grad).abs().max() <= 1e-5 * y.grad.abs().max()


@pytest.mark.parametrize("what", ["logits", "hidden"])
def test_either_half_alone(what):
    model, inputs = lm(), make_inputs()
    output = model(**inputs, output_hidden_states=True)
    loss = output.logits.square().sum() if what == "logits" else output.hidden_states[0].square().sum()
    table = model.lm_loss.weight
    (found,) = torch.autograd.grad(loss, table, retain_graph=True)
    (again,) = torch.autograd.grad(loss, table)  # the first has changed nothing that the second reads
    assert_same(again, found, 0)
    output = hooked(model)(**inputs, output_hidden_states=True)
    plain = hooked(model)
    output = plain(**inputs, output_hidden_states=True)
    loss = output.logits.square().sum() if what == "logits" else output.hidden_states[0].square().sum()
    (wanted,) = torch.autograd.grad(loss, plain.lm_loss.weight)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_frozen_words():
    model, inputs = lm(), make_inputs()
    model.lm_loss.weight.requires_grad_(False)
    loss_of(model, inputs).backward()
    assert model.lm_loss.weight.grad is None and model.lm_loss.bias.grad is not None


def test_second_derivatives_and_batches_of_gradients():
    model, inputs = lm(backend="reference", n_layer=1), make_inputs()
    table = model.lm_loss.weight

    def slope_of_slope(model):
        (slope,) = torch.autograd.grad(loss_of(model, inputs), model.lm_loss.weight, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), model.lm_loss.weight)[0]

    found, wanted = slope_of_slope(model), slope_of_slope(hooked(model))
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    logits = model(**inputs).logits
    grads = torch.randn(2, *logits.shape)
    (both,) = torch.autograd.grad(logits, table, grads, is_grads_batched=True, retain_graph=True)
    for grad, found in zip(grads, both, strict=True):
        (wanted,) = torch.autograd.grad(logits, table, grad, retain_graph=True)
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_modules_that_are_not_plain_are_called():
    inputs = make_inputs()
    for change in (
        lambda model: setattr(model, "lm_loss", copy.deepcopy(model.lm_loss)),  # no longer tied
        lambda model: model.lm_loss.register_forward_pre_hook(lambda *_: None),
        lambda model: setattr(model.lm_loss, "forward", type(model.lm_loss).forward.__get__(model.lm_loss)),
        lambda model: model.transformer.register_forward_pre_hook(lambda *_: None),
        lambda model: setattr(model.transformer.word_embedding, "padding_idx", 0),
        lambda model: nn.utils.parametrize.register_parametrization(model.lm_loss, "weight", nn.Identity()),
    ):
        model = lm()
        change(model)
        assert dense_backward(loss_of(model, inputs).backward)


def test_hooks_of_the_encoder_see_its_words_and_those_of_all_modules_every_call():
    model, ids, seen = lm(), make_inputs()["input_ids"], []
    with model.transformer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0])):
        model(ids)
    assert torch.equal(seen[0], ids)
    calls = []
    with nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(module)):
        model(ids)
    assert model.lm_loss in calls and model.transformer.word_embedding in calls


def test_words_may_be_given_by_place():
    """All eight arguments of the encoder, in the order of its signature."""
    model, ids = lm(), make_inputs()["input_ids"]
    wanted = model(ids)
    found = model(ids, *[None] * 7)
    assert_same(found.logits, wanted.logits, 0)
    assert not dense_backward(found.logits.sum().backward)
    words = model.transformer.word_embedding(ids)
    assert_same(model(None, *[None] * 6, words).logits, wanted.logits, 1e-6)
    with pytest.raises(ValueError, match="give either input_ids or inputs_embeds, got both"):
        model(ids, *[None] * 6, words)
    with pytest.raises(TypeError):
        model(ids, *[None] * 8)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("gradients", [True, False])
def test_a_trace_can_be_saved_and_follows_the_weights(gradients):
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = lm()

        def forward(self, ids):
            return self.lm(ids, use_mems=False).logits

    model, ids = Logits(), make_inputs()["input_ids"]
    with torch.set_grad_enabled(gradients):
        model(ids)  # positions are kept now
        traced = torch.jit.trace(model, (ids,), check_trace=False)
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        loaded = torch.jit.load(file)
        for program in (model, loaded):
            for weight in program.state_dict().values():
                weight.mul_(0.9)
        assert_same(loaded(ids), model(ids), 1e-5)


def test_bad_ids_are_named_as_by_the_encoder():
    with pytest.raises(ValueError, match=r"input_ids must lie in \[0, 50\), got values from 50 to 50"):
        lm()(torch.full((B, L), 50))
    with pytest.raises(ValueError, match="give either input_ids or inputs_embeds, got both"):
        lm()(torch.zeros(B, L).long(), inputs_embeds=torch.zeros(B, L, 32))
    with pytest.raises(ValueError, match="give either input_ids or inputs_embeds, got neither"):
        xk.XLNetLMHeadModel(xk.XLNetConfig(vocab_size=9, d_model=8, n_head=2, d_inner=8, n_layer=1))()
