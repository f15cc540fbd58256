"""Calls of a model: the arguments in its signature, and the effect of `return_dict` on its output."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, TypeVar

Forward = TypeVar("Forward", bound=Callable)


def model_call(encoder: Callable | None = None) -> Callable[[Forward], Forward]:
    """Decorator for `forward` of a model: adds `return_dict`, and the arguments passed to `encoder` to the signature.

    Needed because Trainer's remove_unused_columns, torch.export and PEFT read signatures, and ``*inputs, **options``
    has no names. return_dict=False gives a tuple of the existing entries; None follows the configuration, by default
    True.
    """

    def decorate(forward: Forward) -> Forward:
        @functools.wraps(forward)
        def call(self, *inputs: Any, return_dict: bool | None = None, **options: Any) -> Any:
            if encoder is not None:
                # For the encoder, because the head reads its output by name.
                options["return_dict"] = True
            output = forward(self, *inputs, **options)
            if return_dict is None:
                return_dict = self.config.extra.get("return_dict", True)
            return output if return_dict else output.to_tuple()

        vars(call)["__signature__"] = _signature(forward, encoder)
        return call  # type: ignore[return-value]

    return decorate


def _signature(forward: Callable, encoder: Callable | None) -> inspect.Signature:
    own = inspect.signature(forward)
    named = [x for x in own.parameters.values() if x.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    passed_on = [] if encoder is None else [*inspect.signature(encoder).parameters.values()]
    if len(named) == len(own.parameters) - 1:  # **options only: passed arguments have names
        passed_on = [x.replace(kind=Parameter.KEYWORD_ONLY) for x in passed_on]
    passed_on.append(Parameter("return_dict", Parameter.KEYWORD_ONLY, default=None, annotation="bool | None"))
    known = {x.name for x in named}
    unique = {x.name: x for x in passed_on if x.name not in known}
    return own.replace(parameters=sorted([*named, *unique.values()], key=lambda x: x.kind))
