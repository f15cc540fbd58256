"""Low precision, autocast, gradient checkpointing, torch.compile, dropout, initialisation: in both streams."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch

import xlnet_kernels as xk
from tests.model.twins import SIZES, B, L, N, assert_same, make_inputs, make_mems, ours
from xlnet_kernels import attention

STREAMS = [False, True]


def _inputs(both: bool, **sizes):
    inputs = make_inputs(**sizes)
    mapping = inputs.pop("target_mapping")
    inputs.pop("attention_mask")
    if both:
        inputs["target_positions"] = mapping.argmax(-1)
    return inputs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("both", STREAMS, ids=["content", "both"])
def test_low_precision(dtype, both, backend):
    lm = ours("XLNetLMHeadModel", backend).to(dtype)
    inputs, mems = _inputs(both), [x.to(dtype) for x in make_mems(lm)]
    found = lm(**inputs, mems=mems)
    exact = copy.deepcopy(lm).double()
    wanted = exact(**inputs, mems=[x.double() for x in mems])
    assert found.logits.dtype == found.mems[0].dtype == dtype
    for f, w in ((found.logits, wanted.logits), (found.mems[1], wanted.mems[1])):
        assert (f.double() - w).abs().max() < 64 * torch.finfo(dtype).eps * w.abs().max()
    found.logits.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in lm.parameters() if p.grad is not None)
    mapping = make_inputs()["target_mapping"]  # float32, as transformers' users have it
    assert lm(inputs["input_ids"], target_mapping=mapping).logits.dtype == dtype
    assert lm(inputs["input_ids"], target_mapping=mapping, output_attentions=True).attentions[0][1].dtype == dtype


@pytest.mark.parametrize("both", STREAMS, ids=["content", "both"])
def test_autocast(both, backend):
    lm = ours("XLNetLMHeadModel", backend)
    inputs, mems = _inputs(both), make_mems(lm)
    wanted = lm(**inputs, mems=mems).logits
    with torch.autocast("cpu", torch.bfloat16):
        output = lm(**inputs, mems=mems, output_attentions=both)
        found = lm(**inputs, mems=output.mems).logits
        memory = lm.transformer.project_mems(mems)
        stepped = lm(**inputs, mems=memory)
        lm(**inputs, mems=stepped.mems)
    assert found.isfinite().all()
    assert_same(output.logits.float(), wanted, 0.05 * wanted.abs().max().item())
    assert_same(stepped.logits.float(), wanted, 0.05 * wanted.abs().max().item())
    output.logits.float().mean().backward()
    assert lm.transformer.layer[0].rel_attn.q.grad.dtype == torch.float32


@pytest.mark.parametrize("both", STREAMS, ids=["content", "both"])
def test_gradient_checkpointing_changes_no_gradient(both):
    plain = ours("XLNetLMHeadModel", dropout=0.3).train()
    saving = copy.deepcopy(plain)
    saving.gradient_checkpointing_enable()
    inputs, kept = _inputs(both), {}
    for name, lm in (("plain", plain), ("saving", saving)):
        torch.manual_seed(1)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x):
            loss = lm(**inputs, mems=make_mems(lm), use_mems=True).logits.square().mean()
        kept[name] = sum(saved)
        loss.backward()
    assert kept["saving"] < kept["plain"] / 2
    for p, s in zip(plain.parameters(), saving.parameters(), strict=True):
        assert (p.grad is None) == (s.grad is None)
        if p.grad is not None:
            assert_same(s.grad, p.grad, 1e-6)
    saving.gradient_checkpointing_enable(False)
    assert not saving.transformer.gradient_checkpointing


@pytest.mark.parametrize("name", ["activation", "gradient"])  # the latter before transformers 6
def test_checkpointing_as_trainer_asks_for_it(name):
    lm = ours("XLNetLMHeadModel")
    enable = getattr(lm, f"{name}_checkpointing_enable")
    enable(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})
    assert lm.transformer.gradient_checkpointing
    with pytest.raises(ValueError, match="use_reentrant"):
        enable(**{f"{name}_checkpointing_kwargs": {"use_reentrant": True}})
    with pytest.raises(ValueError, match="every_n_layers must be 1"):
        lm.activation_checkpointing_enable(every_n_layers=2)


@pytest.mark.parametrize("both", STREAMS, ids=["content", "both"])
def test_compiles_into_one_graph_for_all_lengths(both):
    torch._dynamo.reset()
    lm = ours("XLNetLMHeadModel", n_layer=1)
    # Symbolic sizes cost torch seconds a layer; that kernels compile is tested with the operator.
    compiled = torch.compile(lm, fullgraph=True, dynamic=True, backend="eager")
    for count, length in enumerate((7, 9)):
        inputs, mems = _inputs(both, length=length), make_mems(lm, length - 3)
        with torch._dynamo.config.patch(error_on_recompile=count > 0):
            found = compiled(**inputs, mems=mems)
        wanted = lm(**inputs, mems=mems)
        assert_same([found.logits, found.mems], [wanted.logits, wanted.mems], 1e-5)


def test_compiled_steps_with_projected_memory():
    torch._dynamo.reset()
    model = ours(attn_type="uni", n_layer=1, mem_len=None)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    found = wanted = model.project_mems(make_mems(model))
    with torch.no_grad():
        for step in range(5):
            ids = torch.randint(50, (B, 1))
            with torch._dynamo.config.patch(error_on_recompile=step > 1):  # the first step makes the tables
                output = compiled(ids, mems=found)
            expected = model(ids, mems=wanted)
            assert_same(output.last_hidden_state, expected.last_hidden_state, 1e-5)
            found, wanted = output.mems, expected.mems


def test_compiled_model_takes_rank_masks_dense_mappings_and_trains():
    torch._dynamo.reset()
    lm = ours("XLNetLMHeadModel", n_layer=1, dropout=0.1).train()
    compiled = torch.compile(lm, fullgraph=True, backend="aot_eager")
    ids, order = make_inputs()["input_ids"], torch.stack([torch.randperm(L) for _ in range(B)])
    targets, mask = order.argsort(1)[:, -N:], xk.RankMask.from_order(order)
    compiled(ids, mask=mask, target_positions=targets, labels=ids.gather(1, targets)).loss.backward()
    assert all(p.grad.isfinite().all() for p in lm.parameters() if p.grad is not None)
    lm.eval()
    mapping = torch.nn.functional.one_hot(targets, L).float()
    assert_same(
        compiled(ids, mask=mask, target_mapping=mapping).logits, lm(ids, mask=mask, target_mapping=mapping).logits
    )


def test_kept_positions_follow_the_weights(monkeypatch):
    """At inference positions are projected once for many calls, but never with weights that are gone."""
    model, ids = ours(), torch.randint(50, (B, L))
    weight, projected = model.layer[0].rel_attn.r, []
    project = xk.TwoStreamAttention._heads

    def counted(self, x, weight):
        if weight is self.r:
            projected.append(x.shape[-2])
        return project(self, x, weight)

    monkeypatch.setattr(xk.TwoStreamAttention, "_heads", counted)
    with torch.no_grad():
        first = model(ids).last_hidden_state
        assert torch.equal(model(ids).last_hidden_state, first)
        assert projected == [2 * L, 1] * 2 + [1] * 2  # one row to see whether the weights are the same
        weight.data.mul_(2)  # leaves no trace in weight._version
        changed = model(ids).last_hidden_state
        assert not torch.equal(changed, first)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(model(ids).last_hidden_state.float(), changed, 0.05 * changed.abs().max().item())
        assert torch.equal(model(ids).last_hidden_state, changed)
        assert torch.equal(copy.deepcopy(model)(ids).last_hidden_state, changed)
        weight.data = weight.data / 2
        assert_same(model(ids).last_hidden_state, first, 1e-6)
    assert_same(model(ids).last_hidden_state, first, 1e-6)
    model(ids).last_hidden_state.sum().backward()
    assert weight.grad.abs().sum() > 0
    assert model.state_dict().keys() == ours().state_dict().keys()


def test_dropout_where_it_belongs():
    """Training differs from call to call, by the seed alone; positions are dropped once for the batch."""
    model = ours(dropout=0.5).train()
    ids = torch.randint(50, (1, L)).expand(B, -1)
    torch.manual_seed(1)
    first = model(ids).last_hidden_state
    torch.manual_seed(1)
    assert torch.equal(model(ids).last_hidden_state, first)
    assert not torch.equal(model(ids).last_hidden_state, first)
    assert not torch.equal(first[0], first[1])
    assert (first == 0).any()  # the final dropout
    model.eval()
    assert torch.equal(model(ids).last_hidden_state, model(ids).last_hidden_state)


def test_dropout_has_a_mode_of_its_own():
    """As for Monte Carlo estimates, or to train without it; and it may be taken out."""
    layer, x = xk.TwoStreamAttention(16, 2, dropout=0.5), torch.randn(2, 9, 16)
    seen = []

    def spy(*inputs, **options):
        seen.append(options["dropout_p"])
        return xk.rel_attention(*inputs, **options)

    with mock.patch.object(attention, "rel_attention", spy):
        for training, own in ((True, True), (True, False), (False, True), (False, False)):
            layer.train(training).dropout.train(own)
            layer(x)
        layer.train().dropout = torch.nn.Identity()
        layer(x)
    assert seen == [0.5, 0.0, 0.5, 0.0, 0.0]


def test_initialisation():
    lm = xk.XLNetForQuestionAnswering(xk.XLNetConfig(**SIZES | dict(initializer_range=0.5, d_model=64, d_inner=256)))
    layer = lm.transformer.layer[0]
    for weight in (layer.rel_attn.q, layer.rel_attn.o, layer.ff.layer_1.weight, lm.end_logits.dense_0.weight):
        assert abs(weight.std().item() - 0.5) < 0.03
    assert abs(lm.transformer.mask_emb.std().item() - 0.5) < 0.2
    assert abs(lm.transformer.word_embedding.weight.std().item() - 0.5) < 0.05
    for module in lm.modules():
        if isinstance(module, torch.nn.LayerNorm):
            assert (module.weight == 1).all() and (module.bias == 0).all()
        elif isinstance(module, torch.nn.Linear) and module.bias is not None:
            assert (module.bias == 0).all()


def test_tied_weights_are_one_parameter():
    lm = ours("XLNetLMHeadModel")
    assert lm.lm_loss.weight is lm.transformer.word_embedding.weight
    untied = ours("XLNetLMHeadModel", tie_word_embeddings=False)
    assert untied.lm_loss.weight is not untied.transformer.word_embedding.weight


@pytest.mark.parametrize("ff_activation", ["gelu", "gelu_new", "relu", "silu", "tanh"])
def test_activations(ff_activation):
    wanted = {
        "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
        "gelu_new": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        "relu": lambda x: x.clamp(min=0),
        "silu": lambda x: x / (1 + (-x).exp()),
        "tanh": torch.tanh,
    }[ff_activation]
    x = torch.linspace(-4, 4, 50, dtype=torch.float64)
    assert_same(ours(ff_activation=ff_activation).layer[0].ff.activation(x), wanted(x), 1e-12)


def test_parameters_can_be_swapped_after_inference():
    """As torch.__future__.set_swap_module_params_on_conversion has it: a tensor that others refer to is refused."""
    model, ids = ours(), torch.randint(50, (B, L))
    with torch.no_grad():
        wanted = model(ids).last_hidden_state
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.double()
            assert_same(model(ids).last_hidden_state, wanted.double(), 1e-4)
            model.load_state_dict(ours().double().state_dict())
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert model(ids).last_hidden_state.dtype == torch.float64
