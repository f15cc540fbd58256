"""Fused CUDA C++ kernels for NVIDIA GPUs (csrc/cuda), called through the registered operator."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from .. import _extension, _first_use
from .._torch import constant_for_compilers
from ..ops import rel_attention
from . import gpus

__all__ = ["DEVICE", "DTYPES", "max_head_dim", "rel_attention", "unavailable"]

DEVICE = "cuda"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@constant_for_compilers
def max_head_dim(dtype: torch.dtype, device: torch.device | None = None) -> int:
    """The largest head_dim, limited because blocks of wide heads need much shared memory; default: current device."""
    return _max_head_dim(dtype, gpus.number(device))


@functools.cache
def _max_head_dim(dtype: torch.dtype, device: int | None) -> int:
    module: Any = _extension.module
    _say_where_the_driver_compiles(device)
    needed: dict[int, int] = {}  # bytes of shared memory, by head_dim
    for kernel in module.cuda_kernels():
        if kernel["dtype"] == str(dtype).removeprefix("torch."):
            needed[kernel["head_dim"]] = max(needed.get(kernel["head_dim"], 0), kernel["shared_bytes"])
    limit = module.cuda_shared_memory(device)
    return max((width for width, shared_bytes in needed.items() if shared_bytes <= limit), default=0)


@functools.cache
def _say_where_the_driver_compiles(device: int) -> None:
    module: Any = _extension.module
    major, minor = torch.cuda.get_device_capability(device)
    if _code_for(module.cuda_architectures, (major, minor)) == "PTX":
        _first_use.say(f"the CUDA kernels, each at its first call, for sm_{major}{minor} from PTX by CUDA's driver")


@constant_for_compilers
def unavailable(device: torch.device | None = None) -> str | None:
    """The reason why the kernels cannot be used on a device, default the current one; or None."""
    return _unavailable(gpus.number(device))


# Cached, because every call asks.
@functools.cache
def _unavailable(device: int | None) -> str | None:
    module = _extension.module
    if module is None:
        return f"the C++ extension is not loaded: {_extension.reason}"
    if module.cuda_version is None:
        decision = _extension.build_record().get("cuda", "there is no record of why").removeprefix("no, because ")
        return f"the extension was built without CUDA: {decision}"
    if device is None:
        return f"compiled for {_names(module.cuda_architectures)}, no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if _code_for(module.cuda_architectures, (major, minor)) is None:
        return f"compiled for {_names(module.cuda_architectures)}, this GPU has sm_{major}{minor}"
    return None


def _names(architectures: str) -> str:
    """ "8.0;9.0a;10.0+PTX" -> "sm_80, sm_90a, sm_100 and PTX"; words without a number are unchanged."""
    words = [name.removesuffix("+PTX") for name in architectures.split(";")]
    names = ", ".join("sm_" + word.replace(".", "") if word[:1].isdigit() else word for word in words)
    return f"{names} and PTX" if "+PTX" in architectures else names


def _code_for(architectures: str, device: tuple[int, int]) -> str | None:
    """Kind of code that runs on `device`: "code" of its major version, "PTX" of an older version, or None.

    A word without a number ("Hopper") is ignored, because other build systems than setup.py may write such words.
    """
    has_ptx = False
    for found in re.finditer(r"(?:^|;)(\d+)\.(\d)([af]?)(\+PTX)?(?=;|$)", architectures):
        built, suffix = (int(found[1]), int(found[2])), found[3]
        if suffix == "a":  # for this architecture only
            runs = built == device
        else:  # "f": for its family
            runs = built[0] == device[0] and built <= device
            has_ptx |= not suffix and found[4] is not None and built <= device
        if runs:
            return "code"
    return "PTX" if has_ptx else None
