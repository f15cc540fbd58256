"""Formulas for torch.utils.flop_counter, for all operators.

A pair of a query and a key costs three products of D multiplications and additions: content, position and value.
Backward takes eight: content and position again, the probability's gradient, two for the query's (of keys and of
rel_key), and one each for those of keys, values and rel_key. Work outside of pairs is not counted: biases, the segment
term, softmax. Tile sizes do not change the count.

A pair counts if rel_key has a row for its distance, because that is known from shapes. Masks and query_positions are
values: masked pairs count too, and with query_positions each row counts one key for each row of rel_key, at most all
keys.
"""

from __future__ import annotations

import importlib.abc
import math
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[Any, Callable[..., int]] = {}  # by operator


def add(operator: Any, formula: Callable[..., int]) -> None:
    """Register `formula`, which takes the operator's arguments, shapes in place of tensors, and `out_shape`.

    The counter imports Triton, so the formulas are added when a program imports the counter.
    """
    _formulas[operator] = formula
    if _COUNTER in sys.modules:
        # This import also waits for another thread that is importing the counter.
        from torch.utils import flop_counter

        _register(flop_counter)


def _register(counter: ModuleType) -> None:
    for operator, formula in _formulas.items():
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator)(formula)


class _WithFormulas(importlib.abc.Loader):
    """Loader of the counter, which registers the formulas after executing the module."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        # Because runpy and debuggers ask the loader for the code.
        return getattr(vars(self)["loader"], name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        # The original loader is restored, because it can be asked for sources and resources.
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        _register(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of the counter: asks the other finders, and wraps the loader they return.

    It stays in the list, because a finder that leaves hides the next one from another thread's import. Also, the
    counter may be looked for without being imported, fail to import, or be reloaded.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        for finder in [*sys.meta_path]:
            find = None if finder is self else getattr(finder, "find_spec", None)  # some have an older method
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _WithFormulas(spec.loader)
                return spec
        return None


sys.meta_path.insert(0, _Finder())


def attention_formulas(names: Sequence[str]) -> tuple[Callable[..., int], Callable[..., int]]:
    """Formulas of an attention operator and its backward, whose tensors have these `names`, in the schema's order."""
    count = len(names)

    def forward(*inputs: Any, out_shape: Any = None) -> int:
        return 3 * _product(dict(zip(names, inputs, strict=False)), inputs[count])

    def backward(*arguments: Any, out_shape: Any = None) -> int:
        needs, inputs = arguments[6], arguments[7:]
        needed = dict(zip(names, needs, strict=False))
        key, value = (needed[name] or needed[f"memory_{name}"] for name in ("key", "value"))
        products = 3 + 2 * needed["query"] + key + value + needed["rel_key"]
        return products * _product(dict(zip(names, inputs, strict=False)), inputs[count])

    return forward, backward


def _product(shapes: dict[str, Any], max_distance: int) -> int:
    """Operations of one product over all pairs."""
    batch, heads, length, width = shapes["query"]
    mem_len = shapes["memory_key"][2] if shapes["memory_key"] is not None else 0
    keys = mem_len + shapes["key"][2]
    distances = shapes["rel_key"][-2]
    if shapes["query_positions"] is not None:
        pairs = length * min(keys, distances)
    else:
        firsts = (row + mem_len - max_distance for row in range(length))  # the key that has rel_key's first row
        pairs = sum(max(0, min(keys, first + distances) - max(0, first)) for first in firsts)
    return 2 * batch * heads * pairs * width


def linear_formula(input: Any, weight: Any, bias: Any = None, *, out_shape: Any = None) -> int:
    """Operations of input @ weight.mT."""
    return 2 * math.prod(input) * weight[0]
