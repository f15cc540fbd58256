"""Triton kernels for NVIDIA GPUs. Triton is imported by the first call, not by importing this package.

With TRITON_INTERPRET=1 in the environment the same kernels run on the CPU in Triton's interpreter: slow, for tests.
"""

from __future__ import annotations

import functools
from importlib import metadata

import torch

from ..._environment import INTERPRETED
from ..._ops import add_op_namespace_prefix
from ..._torch import constant_for_compilers
from ...ops import define
from .. import gpus
from . import features

__all__ = ["DEVICE", "DTYPES", "max_head_dim", "rel_attention", "unavailable"]

DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter lacks bfloat16, because it computes with numpy
DTYPES = (torch.float16, torch.float32) if INTERPRETED else (torch.float16, torch.bfloat16, torch.float32)

rel_attention = define("rel_attention_triton")


@constant_for_compilers
def max_head_dim(dtype: torch.dtype, device: torch.device | None = None) -> int:
    """The largest head_dim on a device, default the current one."""
    return _max_head_dim(None if INTERPRETED else gpus.number(device))


# Cached, because every call asks.
@functools.cache
def _max_head_dim(device: int | None) -> int:
    return features.max_head_dim(None if device is None else torch.cuda.get_device_capability(device))


@constant_for_compilers
def unavailable(device: torch.device | None = None) -> str | None:
    """The reason why the kernels cannot be used on a device, default the current one; or None."""
    return _unavailable(None if INTERPRETED else gpus.number(device))


# Cached, because every call asks.
@functools.cache
def _unavailable(device: int | None) -> str | None:
    try:
        reason = features.refusal()
    except metadata.PackageNotFoundError:
        return "Triton is not installed"
    if INTERPRETED or reason is not None:
        return reason
    if device is None:
        return "no CUDA device"
    if torch.version.hip is not None:
        return "its tiles are chosen for NVIDIA GPUs, this torch is built for ROCm"
    return features.refusal(torch.cuda.get_device_capability(device))


@torch.library.impl(add_op_namespace_prefix("rel_attention_triton"), (DEVICE,))
def _forward(*inputs):
    from . import launch

    return launch.forward(*inputs)


@torch.library.impl(add_op_namespace_prefix("rel_attention_triton_backward"), (DEVICE,))
def _backward(*inputs):
    from . import launch

    return launch.backward(*inputs)
