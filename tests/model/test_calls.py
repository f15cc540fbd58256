"""Whatever a module computes, it computes inside its own call, where hooks and wrappers are."""

from __future__ import annotations

import copy
from collections import Counter

import accelerate
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import xlnet_kernels as xk
from tests.model.twins import B, L, N, assert_same, make_inputs, make_mems, ours
from tests.processes import run_in_processes

GREEDY = dict(temperature=0, eos_token_id=())
pytestmark = pytest.mark.usefixtures("one_thread")


def _ids() -> torch.Tensor:
    return torch.arange(B * L).view(B, L)


def _trained(lm):
    lm.train()
    inputs = make_inputs()
    lm(**inputs, labels=inputs["input_ids"][:, :N]).loss.backward()


def _stepped(lm):
    memory = lm.transformer.project_mems(make_mems(lm.transformer))
    with torch.no_grad():
        for ids in _ids().split(3, 1):
            memory = lm(ids, mems=memory, use_mems=True).mems


# Uses of a language model, and the number of calls of each layer.
USES = {
    "content": (lambda lm: lm(_ids()), 1),
    "both streams": (lambda lm: lm(**make_inputs()), 1),
    "memory": (lambda lm: lm(_ids(), mems=make_mems(lm.transformer)), 1),
    "attention maps": (lambda lm: lm(_ids(), output_attentions=True), 1),
    "training": (_trained, 1),
    "projected memory": (_stepped, 1 + 3),
    "generate": (lambda lm: lm.generate(_ids(), 4, **GREEDY), 4),
    "generate from content": (lambda lm: lm.generate(_ids(), 4, stream="content", **GREEDY), 4),
    "fill": (lambda lm: lm.fill(_ids(), _ids() % L > 3, temperature=0), 3),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "inference"])
def test_hooks_see_every_call(use, grad):
    lm, seen = ours("XLNetLMHeadModel"), Counter()
    call, count = USES[use]
    for name, module in lm.named_modules():
        module.register_forward_hook(lambda module, inputs, output, name=name: seen.update([name]))
    with torch.set_grad_enabled(grad or use == "training"):
        call(lm)
    assert {seen[f"transformer.layer.{index}.rel_attn"] for index in range(2)} == {count}
    assert {seen[f"transformer.layer.{index}"] for index in range(2)} == {count}
    forwards = count - 1 if use == "projected memory" else count  # project_mems has keys and values alone
    assert seen[""] == seen["lm_loss"] == seen["transformer.layer.0.ff"] == forwards


def test_hooks_see_a_recomputed_layer():
    lm, seen = ours("XLNetLMHeadModel"), Counter()
    lm.gradient_checkpointing_enable()
    for layer in lm.transformer.layer:
        layer.rel_attn.register_forward_hook(lambda module, inputs, output: seen.update([module]))
    _trained(lm)
    assert list(seen.values()) == [2, 2]


@pytest.mark.parametrize(
    "name",
    [
        "XLNetModel",
        "XLNetLMHeadModel",
        "XLNetForTokenClassification",
        "XLNetForSequenceClassification",
        "XLNetForMultipleChoice",
        "XLNetForQuestionAnsweringSimple",
        "XLNetForQuestionAnswering",
    ],
)
def test_offloaded_parameters_are_there_in_calls(name):
    """HF accelerate keeps parameters on the meta device between calls of the modules that own them."""
    model = ours(name)

    def results():
        ids = _ids()
        if name == "XLNetForMultipleChoice":
            return [model(ids[:, None].expand(-1, 2, -1)).to_tuple()]
        found = [model(ids).to_tuple(), model(inputs_embeds=torch.ones(B, L, 32)).to_tuple()]
        if name == "XLNetModel":
            for mems in (None, make_mems(model)):
                found.append(model(ids, mems=model.project_mems(mems, batch=B)).last_hidden_state)
        if name == "XLNetLMHeadModel":
            found += [model.generate([[3, 4], [5]], 3, **GREEDY), model.generate(ids, 3, stream="content", **GREEDY)]
            found.append(model.fill(ids, ids % 2 > 0, temperature=0, token_type_ids=ids % 2))
        return found

    with torch.no_grad():
        torch.manual_seed(0)
        wanted = results()
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert all(parameter.is_meta for parameter in model.parameters())
        torch.manual_seed(0)
        assert_same(results(), wanted)


def test_an_offloaded_attention_computes():
    attn, h = xk.TwoStreamAttention(32, 4), torch.randn(2, 5, 32)
    wanted = attn(h)[0]
    assert_same(accelerate.cpu_offload(attn, execution_device=torch.device("cpu"))(h)[0], wanted)


@pytest.mark.parametrize("name", ["q", "k", "v", "o", "r", "r_w_bias", "seg_embed"])
def test_pruned_attention_trains_and_generates(name):
    lm = ours("XLNetLMHeadModel")
    for layer in lm.transformer.layer:
        prune.l1_unstructured(layer.rel_attn, name, amount=0.5)
    pruned = copy.deepcopy(lm.state_dict())[f"transformer.layer.0.rel_attn.{name}_mask"] == 0
    optimizer = torch.optim.SGD(lm.parameters(), 0.1)
    lm.generate(_ids(), 2, **GREEDY)  # without gradients, in between
    for _ in range(2):
        optimizer.zero_grad()
        _trained(lm)
        optimizer.step()
    attn = lm.transformer.layer[0].rel_attn
    assert (getattr(attn, f"{name}_orig").grad[pruned] == 0).all()
    lm.eval()
    with torch.no_grad():
        found = lm(_ids()).logits
        for layer in lm.transformer.layer:
            prune.remove(layer.rel_attn, name)
        assert_same(lm(_ids()).logits, found)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return 2 * weight


@pytest.mark.parametrize("name", ["q", "k", "v", "o", "r", "r_s_bias"])
def test_parametrized_attention_equals_its_weight(name):
    lm, wanted = ours("XLNetLMHeadModel"), ours("XLNetLMHeadModel")
    wanted.load_state_dict(lm.state_dict())
    inputs, doubled = make_inputs(), Doubled()
    with torch.no_grad():
        for index, layer in enumerate(wanted.transformer.layer):
            getattr(layer.rel_attn, name).mul_(2)
            parametrize.register_parametrization(lm.transformer.layer[index].rel_attn, name, doubled)
        doubled.count = 0
        for _ in range(2):  # the second time with kept positions
            assert_same(lm(**inputs).logits, wanted(**inputs).logits)
        assert doubled.count == 2 * len(wanted.transformer.layer)  # once a call
        assert torch.equal(lm.generate(_ids(), 3, **GREEDY), wanted.generate(_ids(), 3, **GREEDY))
    for model in (lm, wanted):
        model(**inputs).logits.square().mean().backward()
    original = lm.transformer.layer[0].rel_attn.parametrizations[name].original
    assert_same(original.grad, 2 * getattr(wanted.transformer.layer[0].rel_attn, name).grad)


class LowRank(nn.Module):
    """A module as adapters wrap it: it is called, and has no other attribute of what it wraps."""

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Parameter(torch.randn(32, 2)), nn.Parameter(torch.randn(2, width) / 9)

    def forward(self, x: torch.Tensor, *inputs, **options):
        if not x.is_floating_point():
            return self.base(x) + (self.a @ self.b)[0]
        if isinstance(self.base, xk.TwoStreamAttention):
            return self.base(x + x @ self.a @ self.b, *inputs, **options)
        return self.base(x) + x @ self.a @ self.b


@pytest.mark.parametrize("name", ["XLNetLMHeadModel", "XLNetForSequenceClassification"])
def test_adapters_around_modules_train(name):
    model = ours(name, tie_word_embeddings=False)
    before = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.requires_grad = False
    encoder = model.transformer
    encoder.word_embedding = LowRank(encoder.word_embedding, 32)
    for layer in encoder.layer:
        layer.rel_attn = LowRank(layer.rel_attn, 32)
    if name == "XLNetLMHeadModel":
        model.lm_loss = LowRank(model.lm_loss, 50)
    else:
        model.logits_proj = LowRank(model.logits_proj, model.config.num_labels)
        model.sequence_summary = LowRank(model.sequence_summary.summary, 32)  # of all rows, and then of the last
        model.logits_proj = nn.Sequential(model.logits_proj, Last())
    labels = _ids() if name == "XLNetLMHeadModel" else torch.tensor([0, 1])
    output = model.train()(_ids(), labels=labels)
    assert not torch.allclose(output.logits, before(_ids()).logits, atol=0.01)
    output.loss.backward()
    assert all((p.grad is not None) == (n.split(".")[-1] in ("a", "b")) for n, p in model.named_parameters())
    if name == "XLNetLMHeadModel":
        assert model.generate(_ids(), 2, **GREEDY).shape == (B, L + 2)


class Last(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, -1]


def test_layers_may_be_sharded_each(tmp_path):
    run_in_processes("from tests.model import test_calls as t; t.compare_sharded()", 1, tmp_path)


def compare_sharded() -> None:
    """fully_shard of attention, of layers, and of a model: two steps of training, then generation."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    inputs = make_inputs()

    def results(lm) -> list:
        optimizer = torch.optim.SGD(lm.train().parameters(), 0.01)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = lm(**inputs, labels=inputs["input_ids"][:, :N]).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        lm.eval()
        with torch.no_grad():
            memory = lm(_ids(), mems=lm.transformer.project_mems(batch=B), use_mems=True).mems
            logits = lm(**inputs).logits
        text, filled = lm.generate(_ids(), 3, **GREEDY), lm.fill(_ids(), _ids() % 2 > 0, temperature=0)
        return [losses, logits, memory.keys, text, filled]

    lm = ours("XLNetLMHeadModel", tie_word_embeddings=False)
    wanted = results(copy.deepcopy(lm))
    for parts in (lambda layer: [layer.rel_attn], lambda layer: [layer.rel_attn, layer.ff, layer], lambda layer: []):
        model = copy.deepcopy(lm)
        for layer in model.transformer.layer:
            for part in parts(layer):
                fully_shard(part)
        fully_shard(model.transformer)
        assert_same(results(fully_shard(model)), wanted)
    for layer in lm.transformer.layer:
        fully_shard(layer.rel_attn, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    fully_shard(lm.transformer, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    found = results(fully_shard(lm, mp_policy=MixedPrecisionPolicy(torch.bfloat16)))
    assert_same(found[0], wanted[0], 0.1)
