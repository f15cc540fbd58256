"""Checks of arguments that several rooms share. Each raises ValueError with what came and what was needed."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from ._torch import is_wrapped


def check_matrix(name: str, values: Tensor) -> None:
    """A tensor (batch, length)."""
    if not isinstance(values, Tensor) or values.dim() != 2:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name} must be a 2-dimensional tensor (batch, length), got {got}")


def check_range(name: str, values: Tensor, least: int, end: int) -> None:
    """Integers in [least, end), where reading them costs no synchronisation."""
    if not readable(values) or values.device.type != "cpu" or not values.numel():
        return
    low, high = (int(bound) for bound in values.aminmax())
    if low < least or high >= end:
        raise ValueError(f"{name} must lie in [{least}, {end}), got values from {low} to {high}")


def is_integer(value: object) -> TypeGuard[int]:
    """An int, or a size that torch.export keeps as a symbol."""
    return isinstance(value, (int, torch.SymInt))


def readable(values: Tensor) -> bool:
    """Whether the values are there to be looked at: not in a compiler, a fake mode, vmap or on the meta device."""
    if torch.compiler.is_compiling() or type(values) not in (Tensor, torch.nn.Parameter):
        return False
    return values.device.type != "meta" and not is_wrapped(values)
