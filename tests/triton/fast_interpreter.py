"""Makes Triton's interpreter several times faster on kernels of many small functions.

For every call of a jit function it patches `triton.language` anew, although once in a launch is enough. For every
tensor it makes and checks a type and a shape, although few of them differ. It looks for overflows and drops what it
finds. That alone is left out; where Triton's internals look different nothing is changed.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any


def install() -> None:
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    if {"_patch_lang", "GridExecutor"} <= vars(interpreter).keys():
        _patch_once_a_launch(interpreter)
    if {"block_type", "tensor", "constexpr"} <= vars(language.core).keys():
        _keep_types(language.core)
    if "_get_np_dtype" in vars(interpreter):
        _keep_numpy_types(interpreter)
    options = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    if hasattr(options, "sanitize_overflow") and not getattr(options, "debug", True):
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _patch_once_a_launch(interpreter: Any) -> None:
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules: dict[int, frozenset[int]] = {}  # that a function sees, by its globals
    done: set[frozenset[int]] = set()

    def patch_once(fn):
        seen = fn.__globals__
        if id(seen) not in modules:
            modules[id(seen)] = frozenset(id(value) for value in seen.values() if inspect.ismodule(value))
        if modules[id(seen)] in done:
            return None
        done.add(modules[id(seen)])
        return patch(fn)

    def launch_afresh(self, *args, **kwargs):
        modules.clear()
        done.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_afresh


def _keep_types(core: Any) -> None:
    """Types of blocks by element and sizes, and what a tensor has of its shape by that shape."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple, dict[str, Any]] = {}
    shapes: dict[tuple, tuple[Any, Any]] = {}

    def block_type(self, element_ty, shape):
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        # The type of each size too, because True and 1.0 equal 1
        key = (element_ty.name, getattr(element_ty, "address_space", None), *sizes, *map(type, sizes))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        else:
            vars(self).update(types[key])

    def tensor(self, handle, type):
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            make_tensor(self, handle, type)
            shapes[shape] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = shapes[shape]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _keep_numpy_types(interpreter: Any) -> None:
    find = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def numpy_type(type):
        if type.name not in found:
            found[type.name] = find(type)
        return found[type.name]

    interpreter._get_np_dtype = numpy_type
