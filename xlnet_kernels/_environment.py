"""This package's environment variables. An invalid value is reported once, as a warning, and ignored."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

INSTRUCTION_SETS = ("amx_bf16", "avx512_bf16", "avx512", "avx2", "neon_bf16", "neon", "generic", "emulated_bf16")
# Valid values of each variable. csrc/cpu/dispatch.cpp reads XLNET_KERNELS_CPU, build_backend those of the build.
TAKES = {
    "XLNET_KERNELS_BLOCK_BYTES": "a positive integer, a number of bytes",
    "XLNET_KERNELS_CPU": f"an instruction set that this processor has, of {', '.join(INSTRUCTION_SETS)}",
    "XLNET_KERNELS_FAST_PATH": "0 or 1",
    "XLNET_KERNELS_LINEAR": "mkl or onednn",
    "XLNET_KERNELS_SELF_CHECK": "0 or 1",
    "XLNET_KERNELS_SKIP_EXT": "0 or 1",
}
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton's own variable, which it reads at import too
OF_TESTS = (
    "XLNET_KERNELS_EVERY_CASE",
    "XLNET_KERNELS_MACHINE",
    "XLNET_KERNELS_POISON",
    "XLNET_KERNELS_RESUME",
    "XLNET_KERNELS_TRANSFORMERS",
)


def read(name: str, is_right: Callable[[str], bool]) -> str:
    """The value of a variable; "" where it is unset, or invalid by `is_right`, with a warning."""
    value = os.environ.get(name, "")
    if value and not is_right(value):
        leave_aside(name, value)
        return ""
    return value


@functools.cache
def leave_aside(name: str, value: str, instead: str = "it is left aside") -> None:
    """Warn once that a variable's value is ignored, with the behaviour `instead`."""
    warnings.warn(f"{name} must be {TAKES[name]}, got {value!r}: {instead}", RuntimeWarning, stacklevel=3)


def warn_of_names_and_instruction_set(extension: Any) -> None:
    """Warn of unknown variables with this package's prefix, and of an instruction set that `extension` lacks.

    extension: the compiled module, or None.
    """
    if extension is not None and extension.cpu_instruction_set is None:
        name = "XLNET_KERNELS_CPU"
        leave_aside(name, os.environ.get(name, ""), 'backend "torch" serves instead of "cpu"')
    for name in sorted(os.environ):
        if name.startswith("XLNET_KERNELS_") and name not in (*TAKES, *OF_TESTS):
            text = f"{name} is no variable of xlnet_kernels and is left aside; there are {', '.join(TAKES)}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
