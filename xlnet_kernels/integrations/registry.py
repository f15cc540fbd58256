"""register: adds a checked stand-in for a user's class to the registry."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from .._checks import shortened
from ._libraries import REGISTERED
from .relative_attention import RelativeAttention


def register(cls: type[nn.Module], stand_in: type) -> None:
    """Make `accelerate` replace the methods of a user's class, and of its subclasses, by those of `stand_in`.

    A second call for the same class replaces the first; already accelerated models keep their stand-in. A process that
    loads a pickle of an accelerated model registers the class first.

    Args:
        cls: the class of the attention module, with relative positions and a `forward`.
        stand_in: a class that derives from `RelativeAttention`, or from `cls`, and has a `forward` with the arguments
            of ``cls.forward``. Its ``__init__`` never runs: the instance keeps the attributes that `cls` gave it.

    Raises:
        ValueError: an argument has another type, or `forward` takes other arguments; the text names it.

    >>> class Attention(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.qkv, self.out, self.pos = (torch.nn.Linear(8, width) for width in (24, 8, 8))
    ...         self.u, self.v = (torch.nn.Parameter(torch.randn(2, 4)) for _ in range(2))
    ...
    ...     def forward(self, x, pos_emb): ...
    >>> class Fused(RelativeAttention):
    ...     projection_names = None, None, None, "out", "pos"
    ...     bias_names = "u", "v"
    ...
    ...     def forward(self, x, pos_emb):
    ...         query, key, value = (self.split_heads(part) for part in self.qkv(x).chunk(3, -1))
    ...         return self.relative_attention(query, key, value, pos_emb)
    >>> register(Attention, Fused)
    >>> accelerate(Attention())(torch.randn(1, 5, 8), torch.randn(9, 8)).shape
    torch.Size([1, 5, 8])
    """
    _check_class(cls)
    _check_stand_in(cls, stand_in)
    REGISTERED[cls] = stand_in


def _check_class(cls: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        kind = f"{cls.__name__}, which is not" if isinstance(cls, type) else shortened(cls)
        raise ValueError(f"cls must be a class that derives from torch.nn.Module, got {kind}")
    if cls.__module__.partition(".")[0] == "torch":
        raise ValueError(f"cls must have relative positions, got torch's {cls.__name__}, which has none")
    if cls.forward is nn.Module.forward:
        raise ValueError(f"cls must have a forward, got {cls.__name__}, which has none")


def _check_stand_in(cls: type[nn.Module], stand_in: Any) -> None:
    wanted = f"stand_in must be a class that derives from RelativeAttention or from {cls.__name__}"
    if not isinstance(stand_in, type):
        raise ValueError(f"{wanted}, got {shortened(stand_in)}")
    if stand_in is cls or not issubclass(stand_in, (RelativeAttention, cls)):
        raise ValueError(
            f"{wanted}, got {stand_in.__name__}: accelerate changes the class of a module, and its attributes stay"
        )
    if "__init__" in vars(stand_in):
        raise ValueError(f"stand_in must have no __init__, which never runs, got {stand_in.__name__} with one")
    found: Any = getattr(stand_in, "forward", None)
    expected, given = _parameters(cls.forward), _parameters(found) if found is not None else None
    if given is None or not _accepts(given, expected):
        got = "no forward" if given is None else f"({', '.join(given)})"
        raise ValueError(
            f"stand_in must have a forward with the arguments of {cls.__name__}'s, ({', '.join(expected)}), got {got}"
        )


def _parameters(forward: Any) -> dict[str, inspect.Parameter]:
    return {name: kind for name, kind in inspect.signature(forward).parameters.items() if name != "self"}


def _accepts(given: dict[str, inspect.Parameter], expected: dict[str, inspect.Parameter]) -> bool:
    """Whether `given` accepts every call for `expected`, by position and by name."""
    kinds = {parameter.kind for parameter in given.values()}
    places, any_place = list(given), inspect.Parameter.VAR_POSITIONAL in kinds
    any_name = inspect.Parameter.VAR_KEYWORD in kinds
    for place, (name, parameter) in enumerate(expected.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        by_place = parameter.kind is parameter.KEYWORD_ONLY or any_place or places[place : place + 1] == [name]
        if not by_place or not (name in given or any_name):
            return False
    return True
