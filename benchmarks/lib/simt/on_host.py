"""The CUDA backend's kernels and glue, compiled for the host and executed there, as a backend of its own.

Compiled by the first call; every call runs under another schedule of its threads.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools

import torch

from lib.simt import simt_build
from xlnet_kernels import _extension, ops
from xlnet_kernels._precision import float32_precision
from xlnet_kernels.call import Call, replace

NAME = "cuda-on-host"
DEVICE = "cpu"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = True
# Not the warpgroup kernels of csrc/cuda/sm90: the machine (lib/machine) alone has wgmma.
CSRC = simt_build.ROOT / "csrc"
SOURCES = [path for pattern in ("*.cu", "instances/*.cu", "*.cpp") for path in (CSRC / "cuda").glob(pattern)]
SOURCES += [CSRC / "call.cpp", CSRC / "stable" / "tensor.cpp"]
FLAGS = ("-std=c++20", "-O1", "-Wno-unknown-pragmas", "-DXLNET_KERNELS_LOOKS_AT_VALUES=false")

_operator = ops.define("rel_attention_simt")
_seeds = itertools.count()


def max_head_dim(dtype: torch.dtype, device: torch.device | None = None) -> int:
    return max(sizes["head_dim"] for sizes in _extension.module.cuda_kernels())


def unavailable(device: torch.device | None = None) -> str | None:
    if torch.cuda.is_available():
        return "there is a GPU for them"
    return simt_build.NO_COMPILER if simt_build.COMPILER is None else _extension.reason


@functools.cache
def library(*extra_flags: str) -> ctypes.CDLL:
    """The compiled kernels, their operator known to torch."""
    path = str(simt_build.extension(SOURCES, "rel_attention_simt", (*FLAGS, *extra_flags)))
    torch.ops.load_library(path)
    return ctypes.CDLL(path)


def rel_attention(call: Call, seed: int | None = None):
    library().set_schedule(ctypes.c_uint64(next(_seeds) if seed is None else seed))
    return _operator(replace(call, float32_precision=float32_precision("cuda")))


def install() -> None:
    """Makes it one of the package's backends, the last to be chosen."""
    backends = importlib.import_module("xlnet_kernels.backends")
    backends._BACKENDS[NAME] = importlib.import_module(__name__)
