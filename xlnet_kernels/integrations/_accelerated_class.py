"""Class of an accelerated module: the library's class with the stand-in's methods."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from ..linear import Linear
from ._libraries import known_bases, stand_in_of

ORIGINAL = "_class_before_accelerate"  # the attribute of an accelerated class with the library's class


def accelerated_class(cls: type) -> Any:
    """The accelerated form of a class, or the class itself if already accelerated; None without a stand-in."""
    if hasattr(cls, ORIGINAL):
        return cls
    if cls is nn.Linear:
        return _derive(cls, Linear)
    for base in known_bases(cls):
        stand_in = stand_in_of(base)
        return _derive(cls, stand_in if issubclass(stand_in, base) else _put_before(stand_in, base))
    return None


@cache
def _put_before(mixin: type, base: type) -> Any:
    """A class with the mixin's methods before those of the library's class."""
    return type(base)(base.__name__, (mixin, base), {"__module__": mixin.__module__})


@cache
def _derive(cls: type, stand_in: type) -> Any:
    """`cls` with the stand-in's methods, under its own name, because save_pretrained writes the name."""
    bases = (stand_in,) if issubclass(stand_in, cls) else (cls, stand_in)
    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__new__": _make,
        "__reduce_ex__": _reduce,
        ORIGINAL: cls,
    }
    return type(cls)(cls.__name__, bases, names)


def _make(cls: type, *args, **kwargs) -> nn.Module:
    """Make an instance of the original class, because only existing instances are accelerated (see from_pretrained)."""
    if args or kwargs:
        return getattr(cls, ORIGINAL)(*args, **kwargs)
    return object.__new__(cls)  # a shell, to be filled by pickle or torch.nn.parallel.replicate


def _reduce(self: nn.Module, protocol: int) -> tuple:
    """Reduce for copy and pickle, because they would find the original class under this name."""
    reduced: Any = object.__reduce_ex__(self, max(protocol, 2))  # a tuple from protocol 2 on
    original = vars(type(self)).get(ORIGINAL)
    return reduced if original is None else (_new, (original,), *reduced[2:])


def _new(original: type[nn.Module]) -> nn.Module:
    cls: Any = accelerated_class(original)
    if cls is None:
        raise ValueError(
            f"{original.__module__}.{original.__qualname__} has no stand-in in this process, and the pickle is of an "
            f"accelerated one: call xlnet_kernels.integrations.register before it is loaded"
        )
    return cls.__new__(cls)
