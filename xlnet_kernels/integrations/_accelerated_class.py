"""The class of an accelerated module: the library's, with the methods of our stand-in."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from ..linear import Linear
from ._libraries import known_bases, stand_in_of

ORIGINAL = "_class_before_accelerate"  # the attribute of an accelerated class that has the library's


def accelerated_class(cls: type) -> Any:
    """The accelerated form of a class, which may be that already; None for what we have nothing for."""
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
    """The mixin's methods on top of the library's class."""
    return type(base)(base.__name__, (mixin, base), {"__module__": mixin.__module__})


@cache
def _derive(cls: type, stand_in: type) -> Any:
    """`cls` with the stand-in's methods, under its own name, which save_pretrained writes down."""
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
    """Only instances that exist are accelerated: calling the class (as from_pretrained does) makes an original one."""
    if args or kwargs:
        return getattr(cls, ORIGINAL)(*args, **kwargs)
    return object.__new__(cls)  # a shell, to be filled by pickle or torch.nn.parallel.replicate


def _reduce(self: nn.Module, protocol: int) -> tuple:
    """For copy and pickle, which would look for the class under its name and find the original."""
    reduced: Any = object.__reduce_ex__(self, max(protocol, 2))  # from 2 on a tuple
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
