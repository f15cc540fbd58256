"""Precision of float32 products by torch's switches."""

from __future__ import annotations

import functools
import logging

import torch

from . import _extension
from ._torch import constant_for_compilers

_LOGGER = logging.getLogger("xlnet_kernels")


def float32_precision(device_type: str) -> int:
    """Precision of a device's float32 products by torch's switches, as `Float32Precision` of csrc/inputs.h.

    0 "ieee", 1 "tf32" on CUDA, 2 "bf16" on the CPU, where "tf32" is taken for "ieee".
    """
    if device_type == "cpu":
        return 2 * allows_bf16()
    return int(device_type == "cuda" and allows_tf32())


# Constant, because compilers cannot trace these getters. They compile again after set_float32_matmul_precision, but
# keep a graph after a change of fp32_precision.
@constant_for_compilers
def allows_bf16() -> bool:
    """Whether float32 products on the CPU may round their operands to bfloat16, as torch's own then do with oneDNN.

    Set by torch.set_float32_matmul_precision("medium") or torch.backends.mkldnn.matmul.fp32_precision = "bf16".
    """
    allowed = cpu_precision() == "bf16"
    if allowed:
        _tell_whether_products_are_rounded()
    return allowed


@constant_for_compilers
def allows_tf32() -> bool:
    """Whether the user allows TF32; torch 2.9 and newer refuse the old getter once the new setting is used."""
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


def cpu_precision() -> str:
    """Torch's switch for float32 products on the CPU: "none" and "ieee" (exact), "tf32" or "bf16"."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)  # since torch 2.9
    return getattr(matmul, "fp32_precision", "none")


# Cached, to log one line in each process.
@functools.cache
def _tell_whether_products_are_rounded() -> None:
    products = getattr(_extension.module, "cpu_bfloat16_products", None)
    if products is None:
        _LOGGER.info(
            "torch allows bfloat16 in float32 products on the CPU; attention stays exact, because this processor, or "
            "this build, has none of AMX-BF16, AVX512-BF16 and BFMMLA"
        )
    else:
        _LOGGER.info("torch allows bfloat16 in float32 products on the CPU: attention takes %s", products)
