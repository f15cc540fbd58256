"""rel_attention: checks the arguments, fills in the defaults and picks the backend."""

from __future__ import annotations

import math
from typing import Literal, TypeVar, overload

import torch
from torch import Tensor

from . import dropout
from ._checks import as_python, check_dense_mask, check_not_nested, check_range, check_rank, is_integer, readable
from .backends import choose
from .distributed.tensors import is_distributed
from .fast_path import attend_plainly
from .masks import RankMask
from .segments import Segments
from .two_streams import RowPositions, position_of_rows

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


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
            P = M + K + 1: then keys ahead of the query are invisible. With max_distance, any 1 <= P <= max_distance
            + K: a window. Each query sees from `max_distance` keys before it to P - 1 - max_distance after it; time
            and memory are linear in L for a fixed P (NeMo's local attention: max_distance = left,
            P = left + right + 1).
        content_bias: u, (H, D) (XLNet ``r_w_bias``).
        position_bias: v, (H, D) (XLNet ``r_r_bias``).
        segments: the relative segment term, or None.
        mask: RankMask, or bool tensor broadcastable to (B, H, L, M + K), True = may attend.
        query_positions: (B, L) integers in [0, K), the position of each query row in the segment; default arange(L).
            Or RowPositions, where several calls share them: they are sorted once.
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
    if type(dropout_p) is float and dropout_p == 0 and backend in (None, "cpu", "cuda"):
        plain = attend_plainly(
            query, key, value, rel_key, content_bias, position_bias, segments, mask, query_positions, max_distance,
            memory, scale, deterministic, backend,
        )  # fmt: skip
        if plain is not None:
            return plain if return_lse else plain[0]
    max_distance, dropout_p, scale, deterministic = map(as_python, (max_distance, dropout_p, scale, deterministic))
    if segments is not None and not isinstance(segments, Segments):
        raise ValueError(f"segments must be xlnet_kernels.Segments or None, got {type(segments).__name__}")
    if memory is not None and (not isinstance(memory, (tuple, list)) or len(memory) != 2):
        raise ValueError(f"memory must be a pair (mem_key, mem_value), got {type(memory).__name__}")
    if isinstance(query, Tensor) and is_distributed(query):
        from .distributed.dtensor import attend_on_shards

        return attend_on_shards(
            rel_attention,
            query,
            key,
            value,
            rel_key,
            content_bias=content_bias,
            position_bias=position_bias,
            segments=segments,
            mask=mask,
            query_positions=query_positions,
            max_distance=max_distance,
            memory=memory,
            dropout_p=dropout_p,
            scale=scale,
            return_lse=return_lse,
            deterministic=deterministic,
            backend=backend,
        )
    if isinstance(query, Tensor) and autocasts(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value, rel_key = (_cast(tensor, dtype) for tensor in (query, key, value, rel_key))
        content_bias, position_bias = (_cast(tensor, dtype) for tensor in (content_bias, position_bias))
        if segments is not None:
            segments = Segments(
                segments.query_ids, segments.key_ids, _cast(segments.embed, dtype), _cast(segments.bias, dtype)
            )
        if memory is not None:
            memory = (_cast(memory[0], dtype), _cast(memory[1], dtype))

    batch, heads, length, width = check_rank("query", query, 4)
    if query.dtype not in _DTYPES:
        raise ValueError(f"query must be float16, bfloat16, float32 or float64, got {query.dtype}")
    if width == 0:
        raise ValueError(f"query must have a head_dim D of at least 1, got shape {tuple(query.shape)}")
    key_len = check_rank("key", key, 4)[2]
    _check("key", key, query, (batch, heads, key_len, width))
    _check("value", value, query, (batch, heads, key_len, width))
    mem_len = 0
    if memory is not None:
        mem_len = check_rank("memory[0]", memory[0], 4)[2]
        for index in (0, 1):
            _check(f"memory[{index}]", memory[index], query, (batch, heads, mem_len, width))
        memory = (memory[0], memory[1])
    max_distance = _check_positions(query, key_len, mem_len, rel_key, max_distance, position_of_rows(query_positions))
    for name, bias in (("content_bias", content_bias), ("position_bias", position_bias)):
        if bias is not None:
            _check(name, bias, query, (heads, width))
    if segments is not None:
        _check_segments(segments, query, mem_len + key_len)
    mask = _check_mask(mask, query, mem_len + key_len)

    if scale is None:
        scale = (int(width) if torch.jit.is_tracing() else width) ** -0.5  # a traced size has a root in 32 bits
    elif not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    if not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p!r}")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    elif not isinstance(deterministic, bool):
        raise ValueError(f"deterministic must be a bool or None, got {deterministic!r}")

    if torch.jit.is_tracing():  # max_distance is a constant there: with other lengths it would make a window
        key, rel_key = (x.unflatten(-2, (int(x.shape[-2]),)) for x in (key, rel_key))
        memory = memory and (memory[0].unflatten(-2, (int(memory[0].shape[-2]),)), memory[1])

    check_on = query.device if readable(query) else None
    out, lse = choose(backend, query.device.type, query.dtype, width, check_on).rel_attention(
        query,
        key,
        value,
        rel_key,
        content_bias=content_bias,
        position_bias=position_bias,
        segments=segments,
        mask=mask,
        query_positions=query_positions,
        max_distance=max_distance,
        memory=memory,
        dropout_p=float(dropout_p),
        dropout_state=dropout.new_state(query.device) if dropout_p > 0 else None,
        scale=float(scale),
        deterministic=deterministic,
    )
    return (out, lse) if return_lse else out


def autocasts(device_type: str) -> bool:
    """Whether autocast is on. Other device types know none; asking torch which do breaks the graphs of torch 2.6."""
    return device_type in ("cpu", "cuda", "mps", "xpu") and torch.is_autocast_enabled(device_type)


def _cast(tensor: MaybeTensor, dtype: torch.dtype) -> MaybeTensor:
    """What autocast does: floating tensors but float64 go to `dtype`."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _check(name: str, tensor: Tensor, query: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """`tensor` has that shape, query's device and `dtype` (default: query's)."""
    dtype = dtype or query.dtype
    if isinstance(tensor, Tensor) and tensor.shape == shape and tensor.dtype == dtype and tensor.device == query.device:
        return  # small calls have no time for the questions one by one
    check_rank(name, tensor, len(shape))
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} as query is {query.dtype}, got {tensor.dtype}")
    _check_device(name, tensor, query)


def _check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on query's device {query.device}, got {tensor.device}")


def _check_positions(
    query: Tensor,
    key_len: int,
    mem_len: int,
    rel_key: Tensor,
    max_distance: int | None,
    query_positions: Tensor | None,
) -> int:
    """Checks rel_key, max_distance and query_positions; returns max_distance."""
    batch, heads, length, width = query.shape
    if query_positions is None:
        if length > key_len:
            raise ValueError(
                f"query has {length} rows but key only {key_len}: more rows than positions need query_positions"
            )
    else:
        check_rank("query_positions", query_positions, 2)
        if tuple(query_positions.shape) != (batch, length):
            raise ValueError(f"query_positions must have shape {(batch, length)}, got {tuple(query_positions.shape)}")
        if query_positions.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"query_positions must hold int32 or int64, got {query_positions.dtype}")
        _check_device("query_positions", query_positions, query)
        check_range("query_positions", query_positions, 0, key_len)
    if torch.jit.is_tracing() and isinstance(max_distance, Tensor):  # sizes are tensors there
        max_distance = int(max_distance)
    if max_distance is not None and (not is_integer(max_distance) or abs(max_distance) >= 2**30):
        raise ValueError(f"max_distance must be an integer below 2^30, got {max_distance!r}")
    if not isinstance(rel_key, Tensor) or rel_key.dim() not in (3, 4):
        got = f"shape {tuple(rel_key.shape)}" if isinstance(rel_key, Tensor) else type(rel_key).__name__
        raise ValueError(f"rel_key must be (H, P, D) or (B, H, P, D), got {got}")
    check_not_nested("rel_key", rel_key)
    if rel_key.shape[-3] != heads and rel_key.shape[-2] == heads and rel_key.shape[-1] == width:
        raise ValueError(
            f"rel_key has {rel_key.shape[-3]} heads and query, of shape {tuple(query.shape)}, {heads}: rel_key must be "
            f"(H, P, D); of (P, H, D) give rel_key.transpose(-3, -2)"
        )
    if rel_key.shape[-3] != heads and rel_key.shape[-3] == length:  # in this order: exported lengths stay free
        raise ValueError(
            f"rel_key has {length} heads and query, of shape {tuple(query.shape)}, {heads}: query, key and value must "
            f"be (B, H, L, D); of (B, L, H, D) give query.transpose(1, 2), and so on"
        )
    max_distance = _check_distances(rel_key, key_len, mem_len, max_distance)
    rows = rel_key.shape[-2]
    _check("rel_key", rel_key, query, ((batch,) if rel_key.dim() == 4 else ()) + (heads, rows, width))
    return max_distance


def _check_distances(rel_key: Tensor, key_len: int, mem_len: int, max_distance: int | None) -> int:
    """Checks the number of rel_key's rows; returns max_distance."""
    rows, farthest = rel_key.shape[-2], mem_len + key_len
    is_window = max_distance is not None
    if max_distance is None:
        max_distance = farthest
    is_whole = rows in (max_distance + key_len, max_distance + 1) and (rows > 0 or key_len == 0)
    if is_whole or is_window and 1 <= rows <= max_distance + key_len:
        return max_distance
    conformer = ""
    if rows == farthest + key_len - 1 and max_distance < farthest - 1:
        conformer = (
            f"; of a Conformer's table, which begins at distance M + K - 1 = {farthest - 1}, give the rows of the "
            f"window, from {farthest - 1 - max_distance} on"
        )
    elif rows == farthest + key_len - 1:
        conformer = f"; a Conformer's table begins at distance M + K - 1: give max_distance={farthest - 1}"
    if max_distance <= -key_len:
        raise ValueError(f"max_distance must be at least -(K - 1) = {1 - key_len}, the last key's, got {max_distance}")
    if is_window:
        raise ValueError(
            f"rel_key must have 1 to {max_distance + key_len} rows from max_distance={max_distance} down to "
            f"-(K - 1) = {1 - key_len}, got shape {tuple(rel_key.shape)}, {rows} rows{conformer}"
        )
    raise ValueError(
        f"rel_key has {rows} rows from distance {max_distance} on, shape {tuple(rel_key.shape)}: it needs "
        f"{max_distance + key_len} to reach down to -(K - 1) = {1 - key_len}, or {max_distance + 1} to end at "
        f"distance 0{conformer}; a window of distances needs max_distance"
    )


def _check_segments(segments: Segments, query: Tensor, keys: int) -> None:
    batch, heads, length, width = query.shape
    for name, ids, count in (("query_ids", segments.query_ids, length), ("key_ids", segments.key_ids, keys)):
        if tuple(ids.shape) != (batch, count):
            raise ValueError(f"segments.{name} must have shape {(batch, count)}, got {tuple(ids.shape)}")
        _check_device(f"segments.{name}", ids, query)
    _check("segments.embed", segments.embed, query, (2, heads, width))
    if segments.bias is not None:
        _check("segments.bias", segments.bias, query, (heads, width))


def _check_mask(mask: RankMask | Tensor | None, query: Tensor, keys: int) -> RankMask | Tensor | None:
    """The mask with every batch spelled out: a RankMask of B rows, or a 4-dimensional bool tensor."""
    if mask is None:
        return None
    batch, heads, length, _ = query.shape
    if isinstance(mask, RankMask):
        if mask.query_rank.shape[0] not in (1, batch):
            raise ValueError(f"mask must have batch size {batch} (or 1), got {mask.query_rank.shape[0]}")
        if mask.query_rank.shape[1] != length:
            rows = mask.query_rank.shape[1]
            raise ValueError(f"mask.query_rank must have one rank per query row ({length}), got {rows}")
        if mask.key_rank.shape[1] != keys:
            raise ValueError(f"mask.key_rank must have M + K = {keys} ranks, got {mask.key_rank.shape[1]}")
        _check_device("mask", mask.query_rank, query)
        for name in ("key_rank", "query_floor", "sees_self"):
            values = getattr(mask, name)
            if isinstance(values, Tensor):
                _check_device(f"mask.{name}", values, query)
        return mask.expand(batch)
    return check_dense_mask(mask, query, keys).expand(batch, heads, length, keys)
