"""The compiled extension, loaded by kernel-builder's `_ops`, as the package's modules ask for it."""

from __future__ import annotations

from types import SimpleNamespace

from ._environment import warn_of_names_and_instruction_set
from ._ops import ops

_SIZES = ("head_dim", "block_m", "block_n", "threads", "shared_bytes")


def _cuda_kernels() -> list[dict]:
    rows = [line.split() for line in ops.cuda_kernels().splitlines()]
    return [
        {"kernel": kernel, "dtype": dtype} | dict(zip(_SIZES, map(int, sizes), strict=True))
        for kernel, dtype, *sizes in rows
    ]


_version = ops.cuda_version()
module = SimpleNamespace(
    cpu_instruction_set=ops.cpu_instruction_set() or None,
    cuda_version=f"{_version // 1000}.{_version % 1000 // 10}" if _version else None,
    cuda_architectures="8.0;9.0;10.0",  # of build.toml
    cuda_kernels=_cuda_kernels,
    cuda_shared_memory=ops.cuda_shared_memory,
    register_autograd=ops.register_autograd,
)
reason = None
warn_of_names_and_instruction_set(module)


def build_record() -> dict:
    return {}
