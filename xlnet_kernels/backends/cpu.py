"""The fused C++ kernels for the CPU (csrc/cpu), reached through the registered operator."""

from __future__ import annotations

from .. import _extension
from ..ops import rel_attention

__all__ = ["DEVICE", "rel_attention", "unavailable"]

DEVICE = "cpu"


def unavailable() -> str | None:
    """Why the kernels cannot be used, or None."""
    return None if _extension.module is not None else f"the C++ extension is not loaded: {_extension.reason}"
