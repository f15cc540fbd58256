"""Ways to wrap or replace the forward of a module, as hooks, libraries and users do; and calls of small models."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from transformers.models.xlnet import modeling_xlnet

from tests.model.twins import make_inputs


class Caller:
    def __init__(self, inner, seen) -> None:
        self.inner, self.seen = inner, seen

    def __call__(self, *args, **kwargs):
        self.seen.append(1)
        return self.inner(*args, **kwargs)


def by_closure(module, seen):
    old = module.forward
    module.forward = lambda *args, **kwargs: (seen.append(1), old(*args, **kwargs))[1]


def by_attribute(module, seen):
    module.forward_before = module.forward

    def forward(self, *args, **kwargs):
        seen.append(1)
        return self.forward_before(*args, **kwargs)

    module.forward = types.MethodType(forward, module)


def by_default(module, seen):
    def forward(*args, old=module.forward, **kwargs):
        seen.append(1)
        return old(*args, **kwargs)

    module.forward = forward


def by_object(module, seen):
    module.forward = Caller(module.forward, seen)


def by_method_of_an_object(module, seen):
    module.forward = Caller(functools.partial(module.forward), seen).__call__


def by_partial(module, seen):
    def forward(old, *args, **kwargs):
        seen.append(1)
        return old(*args, **kwargs)

    module.forward = functools.partial(forward, module.forward)


def by_function(module, seen):
    """As Accelerator.prepare with mixed precision: it keeps the function of the class."""
    function = module.forward.__func__ if hasattr(module.forward, "__func__") else type(module).forward

    @functools.wraps(function)
    def forward(*args, **kwargs):
        seen.append(1)
        return function(*args, **kwargs)

    module.forward = types.MethodType(forward, module)


def by_class(module, seen):
    def forward(self, *args, **kwargs):
        seen.append(1)
        return type(self).forward(self, *args, **kwargs)

    module.forward = types.MethodType(forward, module)


def by_hook(module, seen):
    hooks = pytest.importorskip("accelerate.hooks")

    class Hook(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(1)
            return args, kwargs

    hooks.add_hook_to_module(module, Hook())
    hooks.add_hook_to_module(module, hooks.ModelHook(), append=True)


WRAPPERS = [
    by_closure,
    by_attribute,
    by_default,
    by_object,
    by_method_of_an_object,
    by_partial,
    by_function,
    by_class,
    by_hook,
]


def encode(model):
    torch.manual_seed(1)
    model.eval()
    if isinstance(model, modeling_xlnet.XLNetPreTrainedModel):
        inputs = make_inputs()
        return model(**inputs).logits
    name = type(model).__name__
    shape = (2, 80, 16) if name in ("ParakeetEncoder", "NemotronAsrStreamingEncoder") else (2, 13, 32)
    out = model(torch.randn(shape, dtype=torch.float64))
    return out[0]


def replace(module, forward=lambda self, *inputs, **options: torch.zeros(1)):
    module.forward = types.MethodType(forward, module)
