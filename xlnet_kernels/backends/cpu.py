"""The fused C++ kernels for the CPU (csrc/cpu), reached through the registered operator."""

from __future__ import annotations

import torch

from .. import _extension
from ..ops import rel_attention

__all__ = ["DEVICE", "DTYPES", "max_head_dim", "rel_attention", "unavailable"]

DEVICE = "cpu"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def max_head_dim(dtype: torch.dtype) -> None:
    """Any."""


def unavailable() -> str | None:
    """Why the kernels cannot be used, or None."""
    return None if _extension.module is not None else f"the C++ extension is not loaded: {_extension.reason}"
