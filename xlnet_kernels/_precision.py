"""Precision of float32 products by torch's switches."""

from __future__ import annotations

import functools
import logging

import torch

from . import _extension
from ._torch import constant_for_compilers

_LOGGER = logging.getLogger("xlnet_kernels")

# Float32Precision of csrc/inputs.h
IEEE, TF32, BF16 = 0, 1, 2


def float32_precision(device_type: str) -> int:
    """Precision of a device's float32 products by torch's switches: IEEE, TF32 or BF16."""
    if device_type == "cpu":
        return cpu_float32_precision()
    return TF32 if device_type == "cuda" and allows_tf32() else IEEE


# Constant, because compilers cannot trace these getters. They compile again after set_float32_matmul_precision, but
# keep a graph after a change of fp32_precision.
@constant_for_compilers
def cpu_float32_precision() -> int:
    """Precision of float32 products on the CPU: operands of bfloat16 (BF16), of two such numbers (TF32), or exact.

    Set by torch.set_float32_matmul_precision ("medium", "high", "highest") or
    torch.backends.mkldnn.matmul.fp32_precision ("bf16", "tf32", "ieee").
    """
    precision = {"bf16": BF16, "tf32": TF32}.get(cpu_precision(), IEEE)
    if precision != IEEE:
        _tell_products(precision)
    return precision


@constant_for_compilers
def allows_tf32() -> bool:
    """Whether the user allows TF32; torch 2.9 and newer refuse the old getter once the new setting is used."""
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


def cpu_precision() -> str:
    """Torch's switch for float32 products on the CPU: "none" and "ieee" (exact), "tf32" or "bf16"."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)  # since torch 2.9
    return getattr(matmul, "fp32_precision", "none")


# Cached, to log one line for each precision in each process.
@functools.cache
def _tell_products(precision: int) -> None:
    fact, allowed, calls, because = {
        BF16: (
            "cpu_bfloat16_products", "bfloat16 operands", "",
            "because this processor, or this build, has none of AMX-BF16, AVX512-BF16 and BFMMLA",
        ),
        TF32: (
            "cpu_products_of_parts", "operands of two bfloat16 numbers", " for 64 rows and 256 keys or more",
            "because only AMX-BF16 makes that faster",
        ),
    }[precision]  # fmt: skip
    products = getattr(_extension.module, fact, None)
    if products is None:
        _LOGGER.info("torch allows %s in float32 products on the CPU; attention stays exact, %s", allowed, because)
    else:
        told = f"attention takes {products}{calls}"
        _LOGGER.info("torch allows %s in float32 products on the CPU: %s", allowed, told)
