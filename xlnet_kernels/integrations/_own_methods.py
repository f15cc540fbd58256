"""Instance methods set by hooks and wrappers: whether they call their class's, and how to change the class below them.

Hooks of HF accelerate, the autocast of its Accelerator, torch.compile and many users put a wrapper into
``module.forward``. It overrides the class, and it keeps the forward of the module's class at that time: as a bound
method or as a function, in an attribute, a closure, a default, a partial or another object. When the class changes,
`rebind` exchanges the kept method, so that the wrapper wraps the new class's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._torch import constant_for_compilers
from ._accelerated_class import accelerated_class

Put = Callable[[Any], Any]
_NO_HOLDERS = (nn.Module, Tensor, type, ModuleType)


@functools.cache
def overridden(original: type, accelerated: type) -> dict[str, tuple[Any, Any]]:
    """The methods that differ between two classes: name -> both functions."""
    names = {name for base in original.__mro__ for name in vars(base) if not name.startswith("__")}
    pairs = {name: (getattr(original, name), getattr(accelerated, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] is not pair[1] and all(map(inspect.isfunction, pair))}


# Constant, because a compiler that traces the search through closures later fails in the wrapper's own.
@constant_for_compilers
def leads(module: nn.Module, name: str = "forward") -> bool:
    """Whether the instance has no own method of that name, or one that visibly calls its class's."""
    if name not in vars(module):
        return True
    own, function = vars(module)[name], getattr(type(module), name)
    # `__wrapped__` is left out, because functools.wraps sets it on functions that do not call it too.
    held = itertools.chain(
        [own], (held for held, _ in _held_below(own, module, type(module), name, skip="__wrapped__"))
    )
    return any(_is_method(one, module, function) for one in held)


def rebind(module: nn.Module, original: type, accelerated: type) -> None:
    """Replace the methods of either class kept in the module's attributes by those of its current class."""
    for name, pair in overridden(original, accelerated).items():
        old, new = pair if isinstance(module, accelerated) else pair[::-1]
        for held, put in _held_below(module, module, accelerated):
            if _is_method(held, module, old):
                bound = isinstance(held, MethodType)
                put(MethodType(new, module) if bound else _ByClass(original, accelerated, name, pair))


class _ByClass(NamedTuple):
    """Callable for the method of this name of its first argument's class.

    It replaces a function kept by a wrapper, because several modules may share the wrapper.
    """

    original: type
    accelerated: type
    name: str
    functions: tuple[Any, Any]  # of both classes

    def __reduce__(self) -> tuple:
        # By class and name, because pickle cannot find the accelerated class.
        return _by_class, (self.original, self.name)

    def function_of(self, cls: type) -> Any:
        return self.functions[issubclass(cls, self.accelerated)]

    def __call__(self, module: nn.Module, *args: Any, **options: Any) -> Any:
        return self.function_of(type(module))(module, *args, **options)


def _by_class(original: type, name: str) -> _ByClass:
    accelerated = accelerated_class(original)
    return _ByClass(original, accelerated, name, overridden(original, accelerated)[name])


def _is_method(held: Any, module: nn.Module, function: Any) -> bool:
    """Whether `held` is this function, plain or bound to the module."""
    if isinstance(held, MethodType) and held.__self__ is module:
        held = held.__func__
    return held is function or isinstance(held, _ByClass) and held.function_of(type(module)) is function


def _held_below(holder: Any, module: nn.Module, cls: type, name: str = "", skip: str = "") -> Iterator[tuple[Any, Put]]:
    """All objects kept by a callable of the module, directly or through others, each with a setter of its place.

    The search does not enter the class's own functions, because all its instances share them. With the name of a
    method, the search includes attributes of the module that a function reads, and the class's method if requested.
    """
    todo, known = [holder], {id(x): x for base in cls.__mro__ for x in vars(base).values()}
    while todo:
        holder = todo.pop()
        if isinstance(holder, MethodType) and isinstance(holder.__self__, nn.Module):
            parts: tuple = (holder.__func__,) if holder.__self__ is module else ()
        else:
            parts = (holder.__func__, holder.__self__) if isinstance(holder, MethodType) else (holder,)
        kept = [pair for part in parts for pair in _kept_by(part, skip)]
        if name and parts and isinstance(parts[0], FunctionType):
            read = parts[0].__code__.co_names
            kept += [(value, _leave) for attribute, value in vars(module).items() if attribute in read]
            if name in read and {"type", "__class__"} & {*read}:
                kept.append((getattr(type(module), name), _leave))
        for held, put in kept:
            yield held, put
            held = held.__func__ if isinstance(held, MethodType) and held.__self__ is module else held
            if id(held) not in known and callable(held) and not isinstance(held, _NO_HOLDERS):
                known[id(held)] = held
                todo.append(held)


def _kept_by(holder: Any, skip: str) -> Iterator[tuple[Any, Put]]:
    if isinstance(holder, functools.partial):
        yield holder.func, lambda new: _set_partial(holder, new, *holder.args)
        for index, value in enumerate(holder.args):
            yield value, functools.partial(_set_argument, holder, index)
        yield from _items(holder.keywords, skip)
    elif isinstance(holder, FunctionType):
        for cell in holder.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
        for index, value in enumerate(holder.__defaults__ or ()):
            yield value, functools.partial(_set_default, holder, index)
        yield from _items(holder.__kwdefaults__ or {}, skip)
    yield from _items(getattr(holder, "__dict__", {}), skip)


def _items(values: Any, skip: str) -> list[tuple[Any, Put]]:
    return [(value, functools.partial(values.__setitem__, key)) for key, value in values.items() if key != skip]


def _leave(new: Any) -> None:
    """Setter of a read-only object."""


def _set_partial(holder: functools.partial, function: Any, *args: Any) -> None:
    holder.__setstate__((function, args, holder.keywords, vars(holder)))  # type: ignore[attr-defined]


def _set_argument(holder: functools.partial, index: int, new: Any) -> None:
    _set_partial(holder, holder.func, *holder.args[:index], new, *holder.args[index + 1 :])


def _set_default(holder: FunctionType, index: int, new: Any) -> None:
    kept = holder.__defaults__ or ()
    holder.__defaults__ = (*kept[:index], new, *kept[index + 1 :])
