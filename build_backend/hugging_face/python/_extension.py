"""Compiled library, loaded by kernel-builder's `_ops`, with the interface of the package's `_extension`."""

from __future__ import annotations

from ._compiled import describe
from ._environment import warn_of_names_and_instruction_set
from ._ops import ops

module = describe(ops, __file__)
if module.cuda_version is not None:  # CUDA_VERSION of cuda.h
    _version = int(module.cuda_version)
    module.cuda_version = f"{_version // 1000}.{_version % 1000 // 10}"
    module.cuda_architectures = "8.0;9.0;10.0"  # of build.toml
reason = None
warn_of_names_and_instruction_set(module)


def build_record() -> dict:
    return {}
