"""Plain flash attention in Triton: no positions, no segments, no mask. What our kernels' counts are compared with.

Tensors are (B * H, L, D), contiguous, of 16 bits; L is a multiple of both blocks. Scores are kept in units of log2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


class Config(NamedTuple):
    BLOCK_M: int  # query rows of a tile
    BLOCK_N: int  # keys of a tile
    num_warps: int = 4
    num_stages: int = 2


@triton.jit
def _tile(matrix, first, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows first .. first + BLOCK of a head's (L, D) matrix."""
    return tl.load(matrix + (first + tl.arange(0, BLOCK))[:, None] * D + tl.arange(0, D)[None, :])


@triton.jit
def _store(matrix, first, tile, D: tl.constexpr, BLOCK: tl.constexpr):
    at = matrix + (first + tl.arange(0, BLOCK))[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at, tile.to(matrix.dtype.element_ty))


@triton.jit
def forward_kernel(
    query, key, value, out, lse, length, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_M
    query += head * length * D
    key += head * length * D
    value += head * length * D
    q = _tile(query, row, D, BLOCK_M)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    o = tl.zeros((BLOCK_M, D), tl.float32)
    for column in range(0, length, BLOCK_N):
        score = tl.dot(q, _tile(key, column, D, BLOCK_N).T)
        new_max = tl.maximum(row_max, tl.max(score, 1) * (scale * LOG2_E))
        p = tl.exp2(score * (scale * LOG2_E) - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(p, 1)
        o = tl.dot(p.to(q.dtype), _tile(value, column, D, BLOCK_N), o * decay[:, None])
        row_max = new_max
    _store(out + head * length * D, row, o / row_sum[:, None], D, BLOCK_M)
    tl.store(lse + head * length + row + tl.arange(0, BLOCK_M), row_max + tl.log2(row_sum))


@triton.jit
def delta_kernel(out, grad_out, delta, D: tl.constexpr, BLOCK_M: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M  # of all heads
    product = _tile(out, row, D, BLOCK_M).to(tl.float32) * _tile(grad_out, row, D, BLOCK_M).to(tl.float32)
    tl.store(delta + row + tl.arange(0, BLOCK_M), tl.sum(product, 1))


@triton.jit
def keys_kernel(
    query, key, value, grad_out, lse, delta, grad_key, grad_value, length, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys, over all rows; scores are transposed, so that P and dS need no transposition."""
    head, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_N
    query += head * length * D
    grad_out += head * length * D
    k, v = _tile(key + head * length * D, column, D, BLOCK_N), _tile(value + head * length * D, column, D, BLOCK_N)
    dk, dv = tl.zeros((BLOCK_N, D), tl.float32), tl.zeros((BLOCK_N, D), tl.float32)
    for row in range(0, length, BLOCK_M):
        rows = head * length + row + tl.arange(0, BLOCK_M)
        q, do = _tile(query, row, D, BLOCK_M), _tile(grad_out, row, D, BLOCK_M)
        p = tl.exp2(tl.dot(k, q.T) * (scale * LOG2_E) - tl.load(lse + rows)[None, :])
        dv = tl.dot(p.to(k.dtype), do, dv)
        ds = p * (tl.dot(v, do.T) - tl.load(delta + rows)[None, :])
        dk = tl.dot(ds.to(k.dtype), q, dk)
    _store(grad_key + head * length * D, column, dk * scale, D, BLOCK_N)
    _store(grad_value + head * length * D, column, dv, D, BLOCK_N)


@triton.jit
def rows_kernel(
    query, key, value, grad_out, lse, delta, grad_query, length, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dQ of a block of rows, over all keys."""
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_M
    key += head * length * D
    value += head * length * D
    q, do = _tile(query + head * length * D, row, D, BLOCK_M), _tile(grad_out + head * length * D, row, D, BLOCK_M)
    rows = head * length + row + tl.arange(0, BLOCK_M)
    row_lse, row_delta = tl.load(lse + rows), tl.load(delta + rows)
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    for column in range(0, length, BLOCK_N):
        k, v = _tile(key, column, D, BLOCK_N), _tile(value, column, D, BLOCK_N)
        p = tl.exp2(tl.dot(q, k.T) * (scale * LOG2_E) - row_lse[:, None])
        ds = p * (tl.dot(do, v.T) - row_delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    _store(grad_query + head * length * D, row, dq * scale, D, BLOCK_M)


def forward(query: Tensor, key: Tensor, value: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """(out, lse / ln 2) of plain attention with scale D ** -0.5."""
    heads, length, width = query.shape
    out, lse = torch.empty_like(query), query.new_empty(heads, length, dtype=torch.float32)
    _launch(
        forward_kernel,
        (length // config.BLOCK_M, heads),
        config,
        query,
        key,
        value,
        out,
        lse,
        length,
        width**-0.5,
        width,
    )
    return out, lse


def backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys_config: Config,
    rows_config: Config,
    only: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `only` one of the two kernels, "keys" or "rows", to count it."""
    heads, length, width = query.shape
    delta, grads = torch.empty_like(lse), [torch.empty_like(x) for x in (query, key, value)]
    delta_kernel[(heads * length // keys_config.BLOCK_M,)](out, grad_out, delta, width, keys_config.BLOCK_M)
    shared, sizes = (query, key, value, grad_out, lse, delta), (length, width**-0.5, width)
    if only != "rows":
        _launch(keys_kernel, (length // keys_config.BLOCK_N, heads), keys_config, *shared, *grads[1:], *sizes)
    if only != "keys":
        _launch(rows_kernel, (length // rows_config.BLOCK_M, heads), rows_config, *shared, grads[0], *sizes)
    return tuple(grads)


def _launch(kernel, grid: tuple[int, int], config: Config, *arguments) -> None:
    kernel[grid](
        *arguments,
        config.BLOCK_M,
        config.BLOCK_N,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,  # the default until Triton 3.10
    )
