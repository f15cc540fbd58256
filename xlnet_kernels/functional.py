"""rel_attention: the public signature, and the dispatch to a backend."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from . import dropout, fast_path
from ._checks import readable
from .backends import choose, first_calls
from .call import Call, collect, replace
from .call_checks import cast, check
from .distributed.tensors import is_distributed
from .masks import RankMask
from .segments import Segments
from .two_streams import RowPositions


# fmt: off
@overload
def rel_attention(
    query: Tensor, key: Tensor, value: Tensor, rel_key: Tensor, *, content_bias: Tensor | None = ...,
    position_bias: Tensor | None = ..., segments: Segments | None = ..., mask: RankMask | Tensor | None = ...,
    query_positions: Tensor | RowPositions | None = ..., max_distance: int | None = ...,
    memory: tuple[Tensor, Tensor] | None = ..., dropout_p: float = ..., scale: float | None = ...,
    return_lse: Literal[False] = ..., deterministic: bool | None = ..., backend: str | None = ...,
) -> Tensor: ...
@overload
def rel_attention(
    query: Tensor, key: Tensor, value: Tensor, rel_key: Tensor, *, content_bias: Tensor | None = ...,
    position_bias: Tensor | None = ..., segments: Segments | None = ..., mask: RankMask | Tensor | None = ...,
    query_positions: Tensor | RowPositions | None = ..., max_distance: int | None = ...,
    memory: tuple[Tensor, Tensor] | None = ..., dropout_p: float = ..., scale: float | None = ...,
    return_lse: Literal[True], deterministic: bool | None = ..., backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
# fmt: on


def rel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor,
    *,
    content_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    segments: Segments | None = None,
    mask: RankMask | Tensor | None = None,
    query_positions: Tensor | RowPositions | None = None,
    max_distance: int | None = None,
    memory: tuple[Tensor, Tensor] | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with Transformer-XL's relative-shift position term and XLNet's segment term and masks.

    Equivalent to (Dai et al. 2019, section 3.3; Yang et al. 2019, sections 2.4 and 2.5):

        score[i,j] = scale * ((q_i + u) . k_j + (q_i + v) . r[p] + (q_i + b) . s[segment_i != segment_j])
        out[i]     = sum_j dropout(softmax_j(score where visible))[i,j] v_j,    p = max_distance - (pos_i + M - j)

    with j over memory (0 .. M-1) and then the current segment (M .. M+K-1), and no L x (M + K) matrix in memory.
    A fully masked row gives zeros, zero gradients and a log-sum-exp of -inf.

    Args:
        query: (B, H, L, D) query rows: content rows, query-stream rows, or both stacked.
        key, value: (B, H, K, D), the current segment.
        rel_key: (H, P, D), shared by the batch, or (B, H, P, D); row p encodes distance ``max_distance - p``. A pair
            whose distance has no row is invisible. The rows reach down to -(K - 1), P = M + 2 K, or end at distance 0,
            P = M + K + 1: then keys ahead of the query are invisible. With max_distance, any
            1 <= P <= max_distance + K: a window. Each query sees `max_distance` keys before it and P - 1 - max_distance
            after it; time and memory are linear in L for a fixed P (NeMo's local attention: max_distance = left, P =
            left + right + 1).
        content_bias: u, (H, D) (XLNet ``r_w_bias``).
        position_bias: v, (H, D) (XLNet ``r_r_bias``).
        segments: the relative segment term, or None.
        mask: RankMask, or bool tensor broadcastable to (B, H, L, M + K), True = may attend.
        query_positions: (B, L) integers in [0, K), the position of each query row in the segment; default arange(L).
            Or RowPositions, sorted once for several calls that share them.
        max_distance: the distance of rel_key's row 0; default M + K (XLNet's order). M + K - 1 is the Conformer order.
        memory: (mem_key, mem_value), each (B, H, M, D), placed before `key` and `value`.
        dropout_p: probability of dropping an attention probability, in [0, 1).
        scale: default 1 / sqrt(D).
        return_lse: also return the log-sum-exp of the visible scores, differentiable.
        deterministic: gradients bit-equal from run to run; None follows torch.are_deterministic_algorithms_enabled().
        backend: None for the best available, or "reference", "torch", "cpu", "triton", "cuda".

    All floating tensors have one dtype (float16, bfloat16, float32 or float64; autocast casts them to its own) and
    all tensors one device. `query` may be a DTensor that is sharded over B or H: see `distributed/dtensor.py`.

    Returns:
        (B, H, L, D), or that and the log-sum-exp (B, H, L) in float32 (float64 for float64 input).

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value; the text names it.
        RuntimeError: the backend asked for by name cannot serve the call; the text says why.

    >>> q = k = v = torch.randn(1, 2, 5, 8)
    >>> rel_attention(q, k, v, torch.randn(2, 10, 8)).shape
    torch.Size([1, 2, 5, 8])
    """
    call = collect(
        query, key, value, rel_key, segments=segments, mask=mask, query_positions=query_positions, memory=memory,
        content_bias=content_bias, position_bias=position_bias, max_distance=max_distance, dropout_p=dropout_p,
        scale=scale, deterministic=deterministic,
    )  # fmt: skip
    found = fast_path.attend(call, backend)
    if found is None:
        found = attend(call, backend)
    return found if return_lse else found[0]


def attend(call: Call, backend: str | None) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of an unchecked call."""
    if is_distributed(call.query):
        from .distributed.dtensor import attend_on_shards

        return attend_on_shards(lambda own: attend(own, backend), call)
    call = check(cast(call))
    query = call.query
    kind = first_calls.kind_of(call) if _can_be_compared(query) and first_calls.is_wanted(query.device) else None
    module = choose(backend, query.device, query.dtype, query.shape[3], kind)
    return module.rel_attention(with_dropout_state(call))


def _can_be_compared(query: Tensor) -> bool:
    """Whether a small call could run now on the device of `query`: a graph's compiler runs it ahead of the graph."""
    if torch.compiler.is_compiling():
        return query.device.type != "meta"
    return readable(query) and not torch.jit.is_tracing()


def with_dropout_state(call: Call) -> Call:
    """The checked call with its dropout state."""
    return replace(call, dropout_state=dropout.new_state(call.query.device)) if call.dropout_p > 0 else call
