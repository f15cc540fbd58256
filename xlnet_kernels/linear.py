"""`linear`: torch's linear with the faster of torch's two matrix-product libraries on this processor.

torch sends float32 products on the CPU to MKL. On AMD's processors oneDNN, which is in the same wheel, is faster for
many shapes (docs/cpu.md). The choice depends on the processor and the number of rows alone, so that two runs of a
program round alike; XLNET_KERNELS_LINEAR=onednn or mkl fixes the choice.

Where torch allows bfloat16 in float32 products, oneDNN's take it with AMX-BF16 alone. With AVX512-BF16 `linear` rounds
the operands itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _environment, flops
from ._ops import add_op_namespace_prefix, ops
from ._precision import cpu_precision
from ._torch import (
    autocasts,
    constant_for_compilers,
    has_onednn_linear,
    is_batch_of_gradients,
    onednn_linear,
    transformed,
)

_SMALLEST = 2**21  # multiplications; in smaller products the overhead of a call exceeds the gain

_ROUNDED_ROWS = 192  # with fewer rows, rounding the weight takes longer than it saves

# Gradients use MKL, because their rows are weights or features.
_FEW = "onednn for few rows"
_FEW_ROWS = 192

# The faster library by processor (docs/cpu.md), and the text that explains the choice.
_FASTER = {
    "AMD with AVX-512": ("onednn", "MKL is slower on AMD processors with AVX-512"),
    "AMD": (_FEW, f"on AMD processors without AVX-512 MKL is as fast beyond {_FEW_ROWS} rows, and for gradients"),
    "other": ("mkl", "oneDNN is faster on AMD only"),
}

_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # since torch 2.7

_NAME = add_op_namespace_prefix("linear")
torch.library.define(_NAME, "(Tensor input, Tensor weight, Tensor? bias) -> Tensor")


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight.mT + bias, with gradients. Equivalent to:

        torch.nn.functional.linear(input, weight, bias)

    That function is called for everything but float32 on the CPU, for small products, where torch itself may round
    operands (torch.set_float32_matmul_precision), under autocast and inside torch.func transforms and torch.export.

    Args:
        input: (..., in_features).
        weight: (out_features, in_features), of any strides.
        bias: (out_features) or None.

    Returns:
        (..., out_features), equal to torch's within float32 rounding, or within bfloat16 rounding where torch allows
        it ("medium") and the processor has AVX512-BF16 and no AMX.

    >>> x, weight = torch.randn(4, 256, 128), torch.randn(96, 128)
    >>> torch.allclose(linear(x, weight), x @ weight.mT, atol=1e-4)
    True
    """
    return _choose(input, weight, bias)(input, weight, bias)


class Linear(nn.Linear):
    """torch.nn.Linear whose product is `linear`. Parameters, state dict and results are those of torch.nn.Linear."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


@constant_for_compilers
def library() -> str:
    """The library for float32 products on the CPU: "onednn", "mkl", or "onednn for few rows" and mkl for the rest.

    "mkl" means torch's own choice.
    """
    return choice()[0]


@functools.cache
def choice() -> tuple[str, str]:
    """`library`, and the reason for it."""
    wish = _wish()
    if wish == "onednn" and not has_onednn_linear():
        instead = "this torch has no oneDNN, its own products are taken"
        _environment.leave_aside("XLNET_KERNELS_LINEAR", wish, instead)
        wish = ""
    if wish:
        return wish, "XLNET_KERNELS_LINEAR says so"
    if not has_onednn_linear():
        return "mkl", "this torch has no oneDNN"
    if not torch.backends.mkl.is_available():
        return "mkl", "this torch has no MKL, and its own choice is taken"
    return _FASTER[_processor(_cpuinfo())]


def _wish() -> str:
    return _environment.read("XLNET_KERNELS_LINEAR", ("mkl", "onednn").__contains__)


@functools.cache
def can_round() -> bool:
    """Whether the processor has bfloat16 products that oneDNN's float32 products leave idle.

    oneDNN 3.12 takes them with AMX alone; with AVX512-BF16 its float32 products stay exact.
    """
    flags = _cpuinfo().split()
    return "avx512_bf16" in flags and "amx_bf16" not in flags and has_onednn_linear() and _wish() != "mkl"


@constant_for_compilers
def _rounds() -> bool:
    """Whether `linear` rounds the operands of float32 products."""
    return can_round() and cpu_precision() == "bf16"


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _processor(cpuinfo: str) -> str:
    """The processor's key in `_FASTER`."""
    if "AuthenticAMD" not in cpuinfo:
        return "other"
    return "AMD with AVX-512" if "avx512f" in cpuinfo.split() else "AMD"


def _choose(input: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor]:
    """The function that computes this product."""
    if not _is_large_and_plain(input, weight, bias):
        return F.linear
    if _rounds():
        return _rounded if input.numel() >= _ROUNDED_ROWS * input.shape[-1] else F.linear
    if library() == "mkl" or _may_be_rounded():
        return F.linear
    # Compiled graphs look at the rows when they run.
    return F.linear if not torch.compiler.is_compiling() and _is_mkls(input) else ops.linear


def _is_large_and_plain(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if input.dim() < 2 or weight.dim() != 2 or input.shape[-1] != weight.shape[1] or weight.shape[1] == 0:
        return False  # torch serves these, or raises the error
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != weight.shape[:1]):
        return False
    if input.device.type != "cpu" or input.dtype != torch.float32 or weight.dtype != torch.float32:
        return False
    if _is_exporting() or transformed() or autocasts("cpu"):
        return False
    if torch.compiler.is_compiling():  # sizes may be symbols
        return True
    if not all(type(tensor) in (Tensor, nn.Parameter) for tensor in (input, weight)):
        return False
    return input.numel() * weight.shape[0] >= _SMALLEST


def _rounded(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of operands rounded to bfloat16, rounded as well, and the bias added in float32."""
    product = F.linear(input.bfloat16(), weight.bfloat16()).float()
    return product if bias is None else product.add_(bias)


@constant_for_compilers
def _may_be_rounded() -> bool:
    """Whether torch rounds operands of float32 products on the CPU where the processor has instructions for that."""
    return cpu_precision() in ("bf16", "tf32")


def _is_mkls(input: Tensor) -> bool:
    """Whether the input has too many rows for oneDNN."""
    return library() == _FEW and input.numel() > _FEW_ROWS * input.shape[-1]


@torch.library.impl(_NAME, "CPU")
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Decided here for compiled graphs, because sizes are numbers here.
    if _is_mkls(input):
        rows = F.linear(input.reshape(-1, input.shape[-1]), weight, bias)
        return rows.view(*input.shape[:-1], weight.shape[0])
    return onednn_linear(input, weight, bias)


@torch.library.register_fake(_NAME)
def _fake(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _setup_context(ctx, inputs, output) -> None:
    input, weight, _ = inputs
    ctx.save_for_backward(input, weight)


def _backward(ctx, grad: Tensor):
    input, weight = ctx.saved_tensors
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad
    product = F.linear if is_batch_of_gradients(grad) or library() == _FEW else linear
    rows = grad.reshape(-1, grad.shape[-1])
    grad_input = product(grad, weight.mT) if needs_input else None
    grad_weight = product(rows.mT, input.reshape(-1, input.shape[-1]).mT) if needs_weight else None
    return grad_input, grad_weight, rows.sum(0) if needs_bias else None


flops.add(ops.linear, flops.linear_formula)
torch.library.register_autograd(_NAME, _backward, setup_context=_setup_context)
