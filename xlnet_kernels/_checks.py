"""Checks of arguments that several rooms share. Each raises ValueError with what came and what was needed."""

from __future__ import annotations

import torch
from torch import Tensor


def check_matrix(name: str, values: Tensor) -> None:
    """A tensor (batch, length)."""
    if not isinstance(values, Tensor) or values.dim() != 2:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name} must be a 2-dimensional tensor (batch, length), got {got}")


def check_range(name: str, values: Tensor, least: int, end: int) -> None:
    """Integers in [least, end), where reading them costs no synchronisation and no graph break, and fakes aside."""
    readable = type(values) is Tensor and values.device.type == "cpu" and not torch.compiler.is_compiling()
    if not readable or not values.numel():
        return
    low, high = (int(bound) for bound in values.aminmax())
    if low < least or high >= end:
        raise ValueError(f"{name} must lie in [{least}, {end}), got values from {low} to {high}")
