"""Fused C++ kernels for the CPU (csrc/cpu), called through the registered operator."""

from __future__ import annotations

import os
from typing import Any

import torch

from .. import _extension
from ..ops import rel_attention

__all__ = ["DEVICE", "DTYPES", "max_head_dim", "rel_attention", "unavailable"]

UNKNOWN_SET = "XLNET_KERNELS_CPU names no instruction set that this processor has"  # also the operator's error
DEVICE = "cpu"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def max_head_dim(dtype: torch.dtype, device: torch.device | None = None) -> None:
    """No limit."""


def unavailable(device: torch.device | None = None) -> str | None:
    """The reason why the kernels cannot be used, or None."""
    module: Any = _extension.module
    if module is None:
        return f"the C++ extension is not loaded: {_extension.reason}"
    if module.cpu_instruction_set is None:
        return f"{UNKNOWN_SET}: {os.environ.get('XLNET_KERNELS_CPU')}"
    return None
