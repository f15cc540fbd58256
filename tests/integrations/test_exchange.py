"""Exchanged parts of a transformers XLNet, effects on others, and restore."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn
from transformers.models.xlnet import modeling_xlnet

import xlnet_kernels as xk
from tests.model.twins import SIZES, assert_same, make_inputs, theirs
from xlnet_kernels import attention

accelerate, restore = xk.integrations.transformers.accelerate, xk.integrations.transformers.restore
pytestmark = pytest.mark.filterwarnings("ignore:xlnet_kernels", "ignore:.*deprecated")


def test_restore_leaves_nothing_behind():
    model = theirs("XLNetLMHeadModel")
    before = {name: (type(x), dict(vars(x))) for name, x in model.named_modules()}
    parameters, state = dict(model.named_parameters()), list(model.state_dict())
    other = copy.deepcopy(model)
    assert accelerate(accelerate(model)) is model
    assert list(model.state_dict()) == state
    assert all(x is parameters[name] for name, x in model.named_parameters())
    assert isinstance(model.transformer.layer[0].rel_attn, attention.TwoStreamAttention)
    assert not isinstance(other.transformer.layer[0].rel_attn, attention.TwoStreamAttention)
    assert restore(restore(model)) is model
    assert {name: (type(x), dict(vars(x))) for name, x in model.named_modules()} == before


def test_copies_are_accelerated_and_folders_are_not(tmp_path):
    fast = accelerate(theirs("XLNetLMHeadModel"))
    inputs = make_inputs()
    wanted = fast(**inputs).logits
    torch.save(fast, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for x in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), loaded):
        assert type(x.transformer.layer[1].rel_attn) is type(fast.transformer.layer[1].rel_attn)
        assert torch.equal(x(**inputs).logits, wanted)
        assert type(restore(x)) is modeling_xlnet.XLNetLMHeadModel
    fast.save_pretrained(tmp_path)
    for cls in (modeling_xlnet.XLNetLMHeadModel, type(fast), transformers.AutoModelForCausalLM):
        loaded = cls.from_pretrained(tmp_path)
        assert type(loaded) is modeling_xlnet.XLNetLMHeadModel
        assert type(loaded.transformer.layer[1].rel_attn) is modeling_xlnet.XLNetRelativeAttention
    assert_same(loaded(**inputs).logits, wanted)


def test_hooks_see_what_they_saw():
    model = theirs("XLNetLMHeadModel")
    fast = accelerate(copy.deepcopy(model))
    inputs, seen = make_inputs(), {}
    for x in (model, fast):
        for name in ("word_embedding", "layer.0", "layer.0.rel_attn", "layer.1.ff"):
            module, kept = x.transformer.get_submodule(name), seen.setdefault((name, x is fast), [])
            module.register_forward_hook(lambda *call, kept=kept: kept.append(call[2]))
        x(**inputs)
    for name, is_fast in seen:
        assert seen[name, is_fast]
        assert_same(seen[name, True], seen[name, False])


class Doubled(modeling_xlnet.XLNetModel):
    """A subclass that adds to what the base class does."""

    def forward(self, *inputs, **options):
        output = super().forward(*inputs, **options)
        output.last_hidden_state = 2 * output.last_hidden_state
        return output


def test_subclasses_keep_what_they_add():
    model = Doubled(transformers.XLNetConfig(**SIZES)).eval()
    fast = accelerate(copy.deepcopy(model))
    inputs = make_inputs()
    assert_same(fast(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
    assert isinstance(fast.layer[0].rel_attn, attention.TwoStreamAttention)
    assert type(pickle.loads(pickle.dumps(fast))) is type(fast)
    assert type(restore(fast)) is Doubled


def test_import_alone_does_not_import_transformers():
    code = "import sys, xlnet_kernels as xk; xk.integrations.transformers; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_models_without_anything_to_accelerate_are_refused():
    with pytest.raises(ValueError, match="got Linear"):
        accelerate(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="got TwoStreamAttention"):
        accelerate(xk.XLNetModel(xk.XLNetConfig(**SIZES)))  # ours by the same name
    with pytest.raises(ValueError, match="must be a torch.nn.Module, got str"):
        accelerate("xlnet-base-cased")
    model = theirs("XLNetModel")
    with pytest.raises(ValueError, match="backend must be None or one of .*reference.* got 'gpu'"):
        accelerate(model, backend="gpu")
    assert type(model) is modeling_xlnet.XLNetModel


def test_restore_refuses_a_class_it_did_not_make():
    fast = accelerate(theirs("XLNetModel"))
    fast.__class__ = type("Sharded", (type(fast),), {})
    with pytest.raises(RuntimeError, match="Sharded whose class was changed"):
        restore(fast)
    assert isinstance(fast.layer[0].rel_attn, attention.TwoStreamAttention)
