"""Tells torch what is inside our dataclasses: exported programs take them as inputs, and torch.load reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch

# Underscored, and yet what torch.export's documentation and messages name for this.
from torch.utils import _pytree


def register(cls: type) -> type:
    """A class decorator: fields that are numbers or flags are part of the structure, the others are leaves or trees."""

    def flatten(x: Any) -> tuple[list[Any], list]:
        named = [(field.name, getattr(x, field.name)) for field in fields(cls)]
        fixed = [[name, value] for name, value in named if isinstance(value, (bool, int))]
        names = [name for name, value in named if not isinstance(value, (bool, int))]
        return [getattr(x, name) for name in names], [names, fixed]

    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], list]:
        values, context = flatten(x)
        return [(_pytree.GetAttrKey(name), value) for name, value in zip(context[0], values, strict=True)], context

    def unflatten(values: Iterable[Any], context: list) -> Any:
        names, fixed = context
        x: Any = object.__new__(cls)  # not __init__: torch also puts things into trees that are no tensors
        for name, value in (*zip(names, values, strict=True), *fixed):
            object.__setattr__(x, name, value)
        return x

    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"xlnet_kernels.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    torch.serialization.add_safe_globals([cls])  # an exported program is saved with its example inputs
    return cls


def register_output(cls: type) -> type:
    """For named tuples, which torch looks into unasked: the name under which exported programs are saved."""
    if hasattr(_pytree, "_register_namedtuple"):  # the first versions of torch that we work with cannot save them
        _pytree._register_namedtuple(cls, serialized_type_name=f"xlnet_kernels.{cls.__name__}")
    return cls
