"""Modules with a forward of their own, hooks, wrappers and replacements, before and after accelerate."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers.models.xlnet import modeling_xlnet

import xlnet_kernels as xk
from tests.integrations.speech_cases import build, one_thread  # noqa: F401
from tests.integrations.toolkit_cases import make, run
from tests.integrations.wrappers import (
    WRAPPERS,
    by_attribute,
    by_closure,
    by_function,
    by_hook,
    encode,
    replace,
)
from tests.model.twins import assert_same, make_inputs, theirs
from xlnet_kernels.integrations import accelerated

pytestmark = pytest.mark.filterwarnings("ignore:xlnet_kernels", "ignore:.*deprecated")
TOOLKITS = ["nemo", "nemo-local", "espnet", "espnet-legacy", "speechbrain", "fairseq2"]
SPEECH = ["parakeet", "nemotron", "fastspeech2", "wav2vec2", "bert-key", "seamless"]


def parts(model) -> list[nn.Module]:
    """Modules whose forward accelerate replaces."""
    xk.accelerate(model)
    kinds = [(x, type(x), getattr(type(x), "_class_before_accelerate", type(x))) for x in model.modules()]
    xk.restore(model)
    return [x for x, new, old in kinds if new.forward is not old.forward]


def check_both_orders(model, wrap, infer, operator) -> None:
    wanted = infer(model)
    inner, plain = parts(model), {name: (type(x), dict(vars(x))) for name, x in model.named_modules()}
    for before in (True, False):
        seen: list[int] = []
        del operator[:]
        if before:
            for x in inner:
                wrap(x, seen)
        xk.accelerate(model)
        assert sum(accelerated(model).values()) >= len(inner)
        if not before:
            for x in inner:
                wrap(x, seen)
        everything = accelerated(model)
        for _ in range(2):
            assert_same(infer(model), wanted, 1e-5)
            xk.accelerate(model)
        count = len(operator)
        assert count and count % 2 == 0 and len(seen) == 2 * len(inner) and accelerated(model) == everything
        assert torch.equal(infer(xk.restore(model)), wanted) and accelerated(model) == {}
        assert len(operator) == count and len(seen) == 3 * len(inner)
        for name, x in model.named_modules():
            for added in ("forward", "forward_before", "_old_forward", "_hf_hook"):
                vars(x).pop(added, None)
            kind, attributes = plain[name]
            assert type(x) is kind and vars(x).keys() == attributes.keys(), name


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrappers_run_around_the_accelerated_forward(wrap, operator):
    check_both_orders(theirs("XLNetLMHeadModel"), wrap, encode, operator)


@pytest.mark.parametrize("wrap", [by_closure, by_function, by_hook])
@pytest.mark.parametrize("name", SPEECH)
def test_speech_encoders_with_wrappers(name, wrap, operator):
    check_both_orders(build(name).eval(), wrap, encode, operator)


@pytest.mark.parametrize("wrap", [by_closure, by_function, by_hook])
@pytest.mark.parametrize("name", TOOLKITS)
def test_toolkits_with_wrappers(name, wrap, small, operator):
    model = nn.Sequential(make(name, lambda toolkit: small)).eval()
    check_both_orders(model, wrap, lambda model: run(name, model[0])["out"].detach(), operator)


def test_torch_compiled_forwards(operator):
    model = theirs("XLNetModel")
    inputs = make_inputs()
    wanted = model(**inputs).last_hidden_state
    for layer in model.layer:
        layer.rel_attn.forward = torch.compile(layer.rel_attn.forward, backend="eager")
    with torch.no_grad():
        assert_same(xk.accelerate(model)(**inputs).last_hidden_state, wanted)
    assert accelerated(model)["transformers XLNetRelativeAttention"] == len(operator) == 2
    assert torch.equal(xk.restore(model)(**inputs).last_hidden_state, wanted) and len(operator) == 2


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_compiled_models_with_wrappers(wrap, operator):
    model = theirs("XLNetModel")
    inputs = make_inputs()
    wanted = model(**inputs).last_hidden_state
    wrap(model.layer[0].rel_attn, [])
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(xk.accelerate(model), backend="eager")(**inputs).last_hidden_state
    assert_same(found, wanted)
    assert accelerated(model)["transformers XLNetRelativeAttention"] == len(operator) == 2


def dressed(self, h, *others, **options):
    """A replacement that names the class's forward and does not call it."""
    return 2 * h, None


dressed.__wrapped__ = modeling_xlnet.XLNetRelativeAttention.forward


@pytest.mark.parametrize("place", ["transformer", "transformer.layer.1", "transformer.layer.0.rel_attn"])
def test_replaced_forwards_are_refused_and_nothing_is_changed(place):
    model = theirs("XLNetLMHeadModel")
    replace(model.get_submodule(place), dressed if place.endswith("attn") else lambda *inputs: None)
    with pytest.raises(
        ValueError, match=rf"must have the forward of transformers XLNet.* in '{place}', got .*, set in"
    ):
        xk.accelerate(model)
    assert accelerated(model) == {} and type(model) is modeling_xlnet.XLNetLMHeadModel


def test_heads_keep_a_replaced_forward():
    """Nothing of theirs is ours."""
    model = theirs("XLNetLMHeadModel")
    replace(model)
    assert accelerated(xk.accelerate(model))["transformers XLNetRelativeAttention"] == 2
    assert "forward" in vars(xk.restore(model))


def test_a_replaced_forward_of_the_model_itself_is_refused():
    model = build("parakeet").layers[0].self_attn
    replace(model)
    with pytest.raises(ValueError, match="forward of transformers ParakeetEncoderAttention in itself, got <lambda>"):
        xk.accelerate(model)


@pytest.mark.parametrize("place", ["layer.1", "layer.0.rel_attn", "layer.0.rel_attn in place"])
def test_what_is_replaced_later_gets_what_it_had(place, operator):
    """Masks of transformers, not ours; nothing of that model counts as accelerated then."""
    model, plain = theirs("XLNetModel"), theirs("XLNetModel")
    plain.load_state_dict(model.state_dict())
    xk.accelerate(model)

    def halved(original, self, *inputs, **options):
        h, *rest = original(self, *inputs, **options)
        return (h / 2, *rest)

    for x in (model, plain):
        part = x.get_submodule(place.split()[0])
        kind = next(cls for cls in type(part).__mro__ if "__init__" in vars(cls))
        if place.endswith("in place"):
            fresh = kind(x.config).eval()
            fresh.load_state_dict(part.state_dict())
            x.layer[0].rel_attn = fresh
        else:
            original = vars(kind)["forward"]
            replace(
                part, lambda self, *inputs, original=original, **options: halved(original, self, *inputs, **options)
            )
    inputs = make_inputs()
    assert_same(model(**inputs).last_hidden_state, plain(**inputs).last_hidden_state)
    assert not operator and accelerated(model) == {}


def test_a_layer_that_is_restored_alone_stays_so(operator):
    model = theirs("XLNetModel")
    inputs = make_inputs()
    wanted = model(**inputs).last_hidden_state
    xk.restore(xk.accelerate(model).layer[0])
    assert_same(model(**inputs).last_hidden_state, wanted, 0)
    assert not operator and accelerated(model) == {}
    assert_same(xk.accelerate(model)(**inputs).last_hidden_state, wanted)
    assert len(operator) == 2


def test_what_counts_as_accelerated_calls_the_operator(operator):
    """Each replaced speech layer is one less, in a model that goes on with the others."""
    model = xk.accelerate(build("parakeet").eval())
    x = torch.randn(1, 80, 16, dtype=torch.float64)
    replace(model.layers[0].self_attn, lambda self, hidden_states, *inputs, **options: (hidden_states, None))
    model(x)
    assert accelerated(model)["transformers ParakeetEncoderAttention"] == len(operator) == 1
    with pytest.raises(ValueError, match="in 'layers.0.self_attn', got test_what"):
        xk.accelerate(model)
    del model.layers[0].self_attn.forward
    model(x)
    assert accelerated(model)["transformers ParakeetEncoderAttention"] == 2 and len(operator) == 3


def test_a_subclass_with_a_replaced_forward_is_refused(small):
    class Adapter(small.RelPositionMultiHeadAttention):
        def forward(self, *inputs, **options):
            return super().forward(*inputs, **options) * 2

    attention = Adapter()
    replace(attention)
    with pytest.raises(ValueError, match="must have the forward of NeMo Adapter"):
        xk.accelerate(attention)


def test_copies_of_wrapped_models(operator):
    """A closure is not copied: the copy's wrapper calls the other model, which is said."""
    model = theirs("XLNetModel")
    by_attribute(model.layer[0].rel_attn, [])
    inputs = make_inputs()
    fast = xk.accelerate(copy.deepcopy(model))
    assert_same(fast(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
    assert len(operator) == 2 and accelerated(model) == {}
    by_closure(model.layer[1].rel_attn, [])
    with pytest.raises(ValueError, match=r"in 'layer.1.rel_attn', got by_closure.<locals>.<lambda>"):
        xk.accelerate(copy.deepcopy(model))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_modules_that_keep_the_function_of_their_class(clone, operator):
    model = theirs("XLNetModel")
    for layer in model.layer:
        layer.rel_attn.forward = functools.partial(type(layer.rel_attn).forward, layer.rel_attn)
    inputs = make_inputs()
    wanted = model(**inputs).last_hidden_state
    fast = clone(xk.accelerate(model))
    assert_same(fast(**inputs).last_hidden_state, wanted)
    assert len(operator) == 2 and accelerated(fast) == accelerated(model)
    assert torch.equal(xk.restore(fast)(**inputs).last_hidden_state, wanted) and len(operator) == 2


def test_modules_that_share_a_wrapper_may_be_accelerated_alone(operator):
    kind = modeling_xlnet.XLNetRelativeAttention

    def shared(self, *args, original=kind.forward, **kwargs):
        return original(self, *args, **kwargs)

    models = [theirs("XLNetModel") for _ in range(2)]
    inputs = make_inputs()
    wanted = [model(**inputs).last_hidden_state for model in models]
    for model in models:
        for layer in model.layer:
            replace(layer.rel_attn, shared)
    for step, change in enumerate((xk.accelerate, xk.restore)):
        change(models[0])
        for model, out in zip(models, wanted, strict=True):
            assert_same(model(**inputs).last_hidden_state, out)
        assert len(operator) == 2, step


def test_hooks_may_be_removed_after(operator):
    hooks = pytest.importorskip("accelerate.hooks")
    model = theirs("XLNetModel")
    inputs = make_inputs()
    wanted = model(**inputs).last_hidden_state
    for x in model.modules():
        hooks.add_hook_to_module(x, hooks.ModelHook())
    xk.accelerate(model)
    hooks.remove_hook_from_module(model, recurse=True)
    assert_same(model(**inputs).last_hidden_state, wanted)
    assert len(operator) == 2 and accelerated(model)["transformers XLNetRelativeAttention"] == 2
    assert torch.equal(xk.restore(model)(**inputs).last_hidden_state, wanted) and len(operator) == 2


def test_linears_with_hooks(operator):
    """A Linear whose forward was replaced in the instance stays as it is."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = theirs("XLNetLMHeadModel")
    inputs = make_inputs()
    hooks.add_hook_to_module(model.transformer.layer[0].ff.layer_1, hooks.ModelHook())
    replaced = model.transformer.layer[1].ff.layer_1
    replace(replaced, lambda self, x: nn.functional.linear(x, self.weight, self.bias) * 2)
    wanted = model(**inputs).logits
    xk.accelerate(model, linears=True)
    assert accelerated(model)["Linear"] == sum(isinstance(x, nn.Linear) for x in model.modules()) - 1
    assert type(replaced) is nn.Linear
    assert_same(model(**inputs).logits, wanted)
