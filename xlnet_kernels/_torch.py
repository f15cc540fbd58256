"""All private torch names used by this package, each with its purpose and a replacement for when it goes.

torch has no public name for any of these. tests/packaging/test_private_names.py finds uses elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# The module that torch.export's documentation and messages name for registering classes, underscore and all.
# When it goes: torch.export will name another way to register a class, with the same three functions.
from torch.utils import _pytree

# For keeping tables between calls, see `in_dispatch_mode`.
from torch.utils._python_dispatch import _get_current_dispatch_mode


def constant_for_compilers(function: Callable) -> Callable:
    """Equivalent of torch.compiler.assume_constant_result, without importing torch's compiler and Triton.

    When `_dynamo_marked_constant` goes: call torch.compiler.assume_constant_result, and take the slower import.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# Constant, because a compiler traces inside the transforms and guards on them.
@constant_for_compilers
def transformed() -> bool:
    """Whether the call is inside grad, vmap or jvp of torch.func, or a dual level of forward-mode gradients.

    The kernels have first derivatives and no batching rule, so such calls go to the reference. When one of the names
    goes: drop its half. torch then raises an error of its own at the kernels' operator, and backend="reference" still
    works.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


@constant_for_compilers
def exports_to_onnx() -> bool:
    """Whether torch.onnx.export is tracing the call, which then may use torch's own operators only."""
    return torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export()


def is_free_in_onnx(size: int | torch.SymInt) -> bool:
    """Whether torch.onnx.export is making a file in which this size is free."""
    return exports_to_onnx() and not is_static(size)


def is_static(size: int | torch.SymInt) -> bool:
    """Whether the size is a number, not one that a compiler leaves free.

    `isinstance(size, int)` is not enough, because Dynamo's free sizes are instances of int. When the name goes: another
    function of symbolic_shapes that Dynamo supports.
    """
    if not torch.compiler.is_compiling():
        return True
    # Imported here, because it imports sympy.
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(size)


def fixed_size(size: int | torch.SymInt) -> int | None:
    """The size as an int, for functions that are `constant_for_compilers`; None where a compiler leaves it free."""
    if not torch.compiler.is_compiling():
        return int(size)
    # Not `int`, because Dynamo gives a symbol for that.
    return len(range(size)) if is_static(size) else None


def is_wrapped(values: Tensor) -> bool:
    """Whether a transform of torch.func has wrapped the tensor: its numbers cannot be read.

    When it goes: `transformed()` is true in the same calls, but for tensors that outlive their transform.
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(values)


def is_batch_of_gradients(gradient: Tensor) -> bool:
    """Whether torch.autograd.grad(is_grads_batched=True) made the gradient, whose shape is wrong for kernels, silently.

    When it goes, that option either goes too, or uses torch.func.vmap, which the operator refuses by itself.
    """
    if torch.compiler.is_compiling():  # compiled autograd traces no such question, and no batches
        return False
    return torch._C._functorch.is_legacy_batchedtensor(gradient)


def below_autograd(wanted: bool = True) -> AbstractContextManager:
    """A context in which operators skip their registered autograd functions.

    When it goes: a context that does nothing; a small call then takes 100 microseconds more.
    """
    is_traced = torch.compiler.is_compiling()  # by compiled autograd, which records the operators themselves
    return torch._C._AutoDispatchBelowAutograd() if wanted and not is_traced else nullcontext()


def own_gradients(results: Sequence[Tensor], leaves: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, ...]:
    """torch.autograd.grad in this thread, and without the user's compiled autograd.

    Otherwise a call from a thread that holds a lock, or is autograd's own, waits for itself. The switch of compiled
    autograd is that of all threads. When `_disable` goes:
    another switch of compiled autograd, which is off unless its module is loaded.
    """
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    switched_off = getattr(compiled_autograd, "_disable", nullcontext)
    with torch.autograd.set_multithreading_enabled(False), switched_off():
        return torch.autograd.grad(results, leaves, grads)


def in_dispatch_mode() -> bool:
    """Whether a fake mode, or another mode that intercepts operators, is on: results may not be real tensors.

    When it goes: never keep tables of positions between calls (`positions.kept_positions`); slower, and right.
    """
    return _get_current_dispatch_mode() is not None


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether the module has hooks or a replaced `forward`, so that it must be called.

    When one of the names goes: return True; the tied embedding then gets its gradient in three pieces.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    everywhere = (getattr(torch.nn.modules.module, f"_global{name}", True) for name in names)
    return "forward" in vars(module) or any(getattr(module, name, True) for name in names) or any(everywhere)


def has_onednn_linear() -> bool:
    """Whether this torch has `onednn_linear`."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """input @ weight.mT + bias by oneDNN, where torch's own linear takes MKL. No gradients.

    When it goes: `has_onednn_linear` says no, and `linear` is torch's.
    """
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


def register(cls: type) -> type:
    """Class decorator: register a dataclass with torch's pytrees. Exported programs take it, torch.load reads it.

    Fields with numbers or flags are part of the structure; the others are leaves or trees.
    """

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
        # Not __init__, because torch also puts other objects than tensors into trees.
        x: Any = object.__new__(cls)
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
    # Because an exported program is saved with its example inputs.
    torch.serialization.add_safe_globals([cls])
    return cls


def with_tensors_on(device: torch.device | str | None, tree: Any) -> Any:
    """Copy of a tree, registered classes included, with its tensors on `device`."""
    return _pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


def map_instances(cls: type, change: Callable, tree: Any) -> Any:
    """Copy of a tree, with every instance of `cls` changed."""
    return _pytree.tree_map_only(cls, change, tree)


def register_output(cls: type) -> None:
    """Register a class of dictionaries with torch's pytrees. Exported programs return it."""

    def flatten(x: Any) -> tuple[list[Any], list[str]]:
        return list(x.values()), list(x)

    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], list[str]]:
        return [(_pytree.MappingKey(name), value) for name, value in x.items()], list(x)

    def unflatten(values: Iterable[Any], context: list[str]) -> Any:
        x = cls()
        for name, value in zip(context, values, strict=True):
            # Without a check, because torch also puts None and objects of its own into trees.
            x[name] = value
        return x

    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__.partition('.')[0]}.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    torch.serialization.add_safe_globals([cls])


def autocasts(device_type: str) -> bool:
    """Whether autocast is on. The device types are listed here, because a query breaks the graphs of torch 2.6."""
    return device_type in ("cpu", "cuda", "mps", "xpu") and torch.is_autocast_enabled(device_type)
