"""The operator as torch sees it: schema, shapes without data (fake), gradients.

Compiled backends register their kernels for `xlnet_kernels::rel_attention` and `::rel_attention_backward` per dispatch
key (csrc/register.cpp for the CPU); what is here holds for all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masks import RankMask
from .segments import Segments

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor rel_key, Tensor? content_bias, Tensor? position_bias, "
    "Tensor? memory_key, Tensor? memory_value, Tensor? segment_embed, Tensor? segment_bias, "
    "Tensor? query_ids, Tensor? key_ids, Tensor? query_rank, Tensor? key_rank, Tensor? query_floor, "
    "Tensor? sees_self, Tensor? mask, Tensor? query_positions, Tensor? dropout_state, "
    "SymInt max_distance, float dropout_p, float scale, bool deterministic"
)
_DIFFERENTIABLE = 10  # the first ten inputs, query to segment_bias

torch.library.define("xlnet_kernels::rel_attention", f"({_INPUTS}) -> (Tensor out, Tensor lse)")
torch.library.define(
    "xlnet_kernels::rel_attention_backward",
    f"(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool[{_DIFFERENTIABLE}] needs, {_INPUTS})"
    " -> Tensor[]",
)


def rel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor,
    *,
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    segments: Segments | None,
    mask: RankMask | Tensor | None,
    query_positions: Tensor | None,
    max_distance: int,
    memory: tuple[Tensor, Tensor] | None,
    dropout_p: float,
    dropout_state: Tensor | None,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Call the registered operator; arguments as checked by `functional`."""
    memory_key, memory_value = memory or (None, None)
    segment_embed = segment_bias = query_ids = key_ids = None
    if segments is not None:
        segment_embed, segment_bias = segments.embed, segments.bias
        query_ids, key_ids = segments.query_ids, segments.key_ids
    query_rank = key_rank = query_floor = sees_self = None
    if isinstance(mask, RankMask):
        query_rank, key_rank, query_floor = mask.query_rank, mask.key_rank, mask.query_floor
        sees_self = mask.sees_self
        if isinstance(sees_self, bool):
            sees_self = torch.ones_like(query_rank, dtype=torch.bool) if sees_self else None
        mask = None
    return torch.ops.xlnet_kernels.rel_attention(
        query, key, value, rel_key, content_bias, position_bias, memory_key, memory_value, segment_embed, segment_bias,
        query_ids, key_ids, query_rank, key_rank, query_floor, sees_self, mask, query_positions, dropout_state,
        max_distance, dropout_p, scale, deterministic,
    )  # fmt: skip


def _rows_first(tensor: Tensor) -> Tensor:
    """An empty (B, H, L, D) tensor like `tensor` whose memory is laid out (B, L, H, D), as projections want it."""
    batch, heads, length, width = tensor.shape
    return tensor.new_empty(batch, length, heads, width).transpose(1, 2)


@torch.library.register_fake("xlnet_kernels::rel_attention")
def _(query, *_args):
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    return _rows_first(query), query.new_empty(query.shape[:3], dtype=lse_dtype)


@torch.library.register_fake("xlnet_kernels::rel_attention_backward")
def _(grad_out, grad_lse, out, lse, needs, *inputs):
    gradients = []
    for index, (needed, tensor) in enumerate(zip(needs, inputs[:_DIFFERENTIABLE], strict=True)):
        if not needed or tensor is None:
            gradients.append(out.new_empty(0))
        elif index in (0, 1, 2, 6, 7):  # query, key, value and the memory's
            gradients.append(_rows_first(tensor))
        else:
            gradients.append(tensor.new_empty(tensor.shape))
    return gradients


def _setup_context(ctx, inputs, output):
    tensors, numbers = inputs[:-4], inputs[-4:]
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers = numbers
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    *tensors, out, lse = ctx.saved_tensors
    needs = [bool(need) for need in ctx.needs_input_grad[:_DIFFERENTIABLE]]
    rest = [None] * (len(ctx.needs_input_grad) - _DIFFERENTIABLE)
    if grad_out is None:
        if grad_lse is None:
            return (*[None] * _DIFFERENTIABLE, *rest)
        grad_out = torch.zeros_like(out)
    gradients = torch.ops.xlnet_kernels.rel_attention_backward(
        grad_out, grad_lse, out, lse, needs, *tensors, *ctx.numbers
    )
    return (*[gradient if need else None for gradient, need in zip(gradients, needs, strict=True)], *rest)


torch.library.register_autograd("xlnet_kernels::rel_attention", _backward, setup_context=_setup_context)


def _no_second_derivatives(ctx, *_gradients):
    raise RuntimeError('rel_attention: its kernels have no second derivatives, backend="reference" has')


torch.library.register_autograd("xlnet_kernels::rel_attention_backward", _no_second_derivatives)
