"""The operator's registration in torch: schema, shapes without data (fake), gradients.

Every compiled backend has a pair of operators, forward and backward, with the same schema; `define` makes them. Besides
the output and the log-sum-exp, forward returns tensors for an exact backward (docs/math.md, *Gradients*):

    row_max, row_sum  (B, H, L), float32 (float64): the maximum subtracted before exponentials, in units of log 2 and
                      without the segment term of the same segment, and their sum; 0 in fully masked rows
    out_residual      like out: its rounding error in 16 bits; empty in other dtypes and where no gradient is wanted
                      (`needs_backward`)

query_positions[b, n] is the position of row query_order[b, n], ascending in n; without query_order it is that of row n,
and each pass sorts them.

torch.library.register_autograd serves compilers and direct calls of the operators. It reads the schema for every
argument of every call, which takes 100 microseconds. Calls of `rel_attention` outside of compilers therefore use
csrc/fast_path/autograd.cpp where built, else an autograd.Function (`_eager`).

"rel_attention" is implemented in csrc/cpu/register.cpp for the CPU and csrc/cuda/register.cpp for CUDA,
"rel_attention_triton" in backends/triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import _extension, flops
from ._ops import add_op_namespace_prefix, ops
from ._torch import below_autograd, is_batch_of_gradients
from .call import DIFFERENTIABLE, INPUT_NAMES, NUMBERS, ROWS, TENSORS, Call

_NUMBER_TYPES = {
    "max_distance": "SymInt",
    "dropout_p": "float",
    "scale": "float",
    "deterministic": "bool",
    "float32_precision": "int",
}


def _schema() -> str:
    """The operators' inputs, from the fields of `Call`."""
    tensors = [f"Tensor{'?' * (name in Call._field_defaults)} {name}" for name in TENSORS]
    return ", ".join(tensors + [f"{_NUMBER_TYPES[name]} {name}" for name in NUMBERS])


_INPUTS = _schema()


def define(name: str, has_residual: bool = True) -> Callable[[Call], tuple[Tensor, Tensor]]:
    """Define operator `name` and its backward; returns a backend's `rel_attention`, which calls it.

    has_residual: whether forward in 16 bits returns an out_residual for backward.
    """
    forward, backward = add_op_namespace_prefix(name), add_op_namespace_prefix(f"{name}_backward")
    torch.library.define(
        forward,
        f"({_INPUTS}, bool needs_backward) -> "
        "(Tensor out, Tensor lse, Tensor row_max, Tensor row_sum, Tensor out_residual)",
    )
    torch.library.define(
        backward,
        "(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor out_residual, Tensor row_max, Tensor row_sum, "
        f"bool[{DIFFERENTIABLE}] needs, {_INPUTS}) -> Tensor[]",
    )
    forward_op = getattr(ops, name)
    backward_op = getattr(ops, f"{name}_backward")

    def differentiate(ctx, grad_out, grad_lse, *_grads):
        """The gradients of forward's arguments; second derivatives are needed with create_graph only."""
        if any(is_batch_of_gradients(x) for x in (grad_out, grad_lse) if x is not None):
            raise RuntimeError(
                "rel_attention: its kernels take no batch of gradients (is_grads_batched, vectorize), "
                'backend="reference" does'
            )
        *tensors, out, row_max, row_sum, out_residual = ctx.saved_tensors
        needs = [bool(need) for need in ctx.needs_input_grad[:DIFFERENTIABLE]]
        rest = [None] * (len(ctx.needs_input_grad) - DIFFERENTIABLE)
        if grad_out is None:
            if grad_lse is None:
                return (*[None] * DIFFERENTIABLE, *rest)
            grad_out = torch.zeros_like(out)
        with below_autograd(not torch.is_grad_enabled()):
            gradients = backward_op(
                grad_out, grad_lse, out, out_residual, row_max, row_sum, needs, *tensors, *ctx.numbers
            )
        return (*[gradient if need else None for gradient, need in zip(gradients, needs, strict=True)], *rest)

    torch.library.register_fake(forward, functools.partial(_fake_forward, has_residual))
    torch.library.register_fake(backward, _fake_backward)
    register_autograd = getattr(_extension.module, "register_autograd", None)
    if register_autograd is not None:
        register_autograd(name)
    else:
        torch.library.register_autograd(forward, differentiate, setup_context=_setup_context)
        torch.library.register_autograd(backward, _no_second_derivatives)

    for operator, formula in zip((forward_op, backward_op), flops.attention_formulas(INPUT_NAMES), strict=True):
        flops.add(operator, formula)

    def rel_attention(call: Call) -> tuple[Tensor, Tensor]:
        out, lse, *_ = forward_op(*call, _needs_backward(call))
        return out, lse

    return rel_attention if register_autograd is not None else _eager(rel_attention, forward_op, differentiate)


def _eager(rel_attention, forward_op, differentiate) -> Callable[[Call], tuple[Tensor, Tensor]]:
    """`rel_attention` with its gradients wired up by an autograd.Function outside of compilers."""

    class RelAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            with below_autograd():
                outputs = forward_op(*inputs)
            _setup_context(ctx, inputs, outputs)
            return outputs

        backward = staticmethod(differentiate)

    def eager(call: Call) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return rel_attention(call)
        if _needs_backward(call):
            out, lse, *_ = RelAttention.apply(*call, True)
        else:
            with below_autograd():
                out, lse, *_ = forward_op(*call, False)
        return out, lse

    return eager


def _needs_backward(inputs: Call) -> bool:
    # A list, because torch 2.6 does not compile slices of named tuples.
    leaves = list(inputs)[:DIFFERENTIABLE]
    return torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def check_segments_are_whole(tensors: dict[str, Tensor | None]) -> None:
    """Raise ValueError where an operator gets only a part of the segment term."""
    for name in ("key_ids", "segment_embed"):
        if (tensors["query_ids"] is None) != (tensors[name] is None):
            raise ValueError(f"query_ids and {name} must come together")
    if tensors["segment_embed"] is None and tensors["segment_bias"] is not None:
        raise ValueError("segment_bias must come with segment_embed")


def rows_first(tensor: Tensor) -> Tensor:
    """An empty (B, H, L, D) tensor like `tensor` with memory layout (B, L, H, D), the layout of projections."""
    batch, heads, length, width = tensor.shape
    return tensor.new_empty_strided(tensor.shape, (length * heads * width, width, heads * width, 1))


def _fake_forward(has_residual, query, *inputs):
    rows_dtype = torch.promote_types(query.dtype, torch.float32)
    lse, row_max, row_sum = (query.new_empty(query.shape[:3], dtype=rows_dtype) for _ in range(3))
    has_residual = has_residual and inputs[-1] and query.dtype.itemsize == 2
    return rows_first(query), lse, row_max, row_sum, rows_first(query) if has_residual else query.new_empty(0)


def _fake_backward(grad_out, grad_lse, out, out_residual, row_max, row_sum, needs, *inputs):
    gradients = []
    for name, needed, tensor in zip(INPUT_NAMES[:DIFFERENTIABLE], needs, inputs[:DIFFERENTIABLE], strict=True):
        if not needed or tensor is None:
            gradients.append(out.new_empty(0))
        elif name in ROWS:
            gradients.append(rows_first(tensor))
        else:
            gradients.append(tensor.new_empty(tensor.shape))
    return gradients


def _setup_context(ctx, inputs, output):
    out, _, row_max, row_sum, out_residual = output
    ctx.save_for_backward(*inputs[: len(INPUT_NAMES)], out, row_max, row_sum, out_residual)
    ctx.numbers = inputs[len(INPUT_NAMES) : -1]
    ctx.mark_non_differentiable(row_max, row_sum, out_residual)
    ctx.set_materialize_grads(False)


def _no_second_derivatives(ctx, *_gradients):
    raise RuntimeError('rel_attention: its kernels have no second derivatives, backend="reference" has')


rel_attention = define("rel_attention")
