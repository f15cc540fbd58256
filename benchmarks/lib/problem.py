"""Inputs of every implementation: the tensors of one attention call, made from real text."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from xlnet_kernels import RankMask, Segments, relative_positions

from .text import VOCABULARY, Batch, build_batch


@dataclass(frozen=True)
class Case:
    """The size of a problem: B sequences of L tokens after M of memory, H heads of D."""

    length: int
    batch: int
    heads: int = 12
    head_dim: int = 64
    mem_len: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def map_bytes(self) -> int:
        """Bytes of one (B, H, L, M + K) matrix."""
        return self.batch * self.heads * self.length * (self.mem_len + self.length) * self.dtype.itemsize

    @property
    def d_model(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Problem:
    """Arguments of rel_attention, by its names; rows are the content stream's, or both streams' stacked.

    `mask` may be None, and both ids: then there is no mask, and there are no segments.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    rel_key: Tensor
    content_bias: Tensor
    position_bias: Tensor
    segment_embed: Tensor
    segment_bias: Tensor
    memory_key: Tensor
    memory_value: Tensor
    grad_out: Tensor
    query_ids: Tensor | None
    key_ids: Tensor | None
    mask: RankMask | None
    query_positions: Tensor | None

    INPUTS = (
        "query", "key", "value", "rel_key", "content_bias", "position_bias", "segment_embed", "segment_bias",
        "memory_key", "memory_value",
    )  # fmt: skip

    def double(self) -> Problem:
        """A problem with these values in float64."""
        return replace(self, **{name: getattr(self, name).double() for name in (*self.INPUTS, "grad_out")})

    def segments(self, embed: Tensor, bias: Tensor) -> Segments | None:
        if self.query_ids is None:
            return None
        return Segments(self.query_ids, self.key_ids, embed, bias)

    def visible(self) -> Tensor:
        """The dense (B, L, M + K) bool mask."""
        return self.mask.to_bool(None, self.query_positions, self.memory_key.shape[2])


def build_problem(case: Case, two_streams: bool = False, seed: int = 0) -> Problem:
    """Tokens embedded and projected by random weights, so that equal tokens have equal keys as in a model.

    With `two_streams`, one query-stream row per target follows the content rows, all with the projection of XLNet's
    one learned vector, as in its first layer.
    """
    batch = build_batch(case.batch, case.length, case.mem_len, seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads, width = case.heads, case.head_dim
    embedding = normal(VOCABULARY + 1, case.d_model)  # last: the query stream's vector
    projected = {name: embedding @ normal(case.d_model, case.d_model) * case.d_model**-0.5 for name in ("q", "k", "v")}
    positions = relative_positions(case.mem_len + case.length, case.length, case.d_model)
    rel_key = positions @ normal(case.d_model, case.d_model) * (2 / case.d_model) ** 0.5

    def rows(table: Tensor) -> Tensor:
        return table.to(case.device, case.dtype).unflatten(-1, (heads, width)).transpose(-3, -2)

    content_rows, memory = batch.tokens, batch.memory_tokens
    mask, query_ids, query_positions = batch.mask.for_stream("content"), batch.segment_ids, None
    if two_streams:
        content_rows, query_ids, query_positions, mask = _stack_streams(batch)
    return Problem(
        query=rows(projected["q"][content_rows]),
        key=rows(projected["k"][batch.tokens]),
        value=rows(projected["v"][batch.tokens]),
        rel_key=rows(rel_key).contiguous(),
        content_bias=(0.3 * normal(heads, width)).to(case.device, case.dtype),
        position_bias=(0.3 * normal(heads, width)).to(case.device, case.dtype),
        segment_embed=normal(2, heads, width).to(case.device, case.dtype),
        segment_bias=(0.3 * normal(heads, width)).to(case.device, case.dtype),
        memory_key=rows(projected["k"][memory]),
        memory_value=rows(projected["v"][memory]),
        grad_out=rows(normal(case.batch, content_rows.shape[1], case.d_model)),
        query_ids=query_ids.to(case.device),
        key_ids=torch.cat([torch.zeros_like(memory), batch.segment_ids], 1).to(case.device),
        mask=mask.to(case.device),
        query_positions=None if query_positions is None else query_positions.to(case.device),
    )


def _stack_streams(batch: Batch) -> tuple[Tensor, Tensor, Tensor, RankMask]:
    """Tokens, segments, positions and mask of L content rows and then N query-stream rows."""
    targets, mask = batch.target_positions, batch.mask
    own = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    positions = torch.cat([own, targets], 1)
    stacked = RankMask(
        mask.query_rank.gather(1, positions),
        mask.key_rank,
        sees_self=torch.cat([torch.ones_like(own), torch.zeros_like(targets)], 1).bool(),
    )
    tokens = torch.cat([batch.tokens, torch.full_like(targets, VOCABULARY)], 1)
    return tokens, batch.segment_ids.gather(1, positions), positions, stacked
