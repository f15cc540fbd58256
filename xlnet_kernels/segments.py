"""Segments: XLNet's relative segment encodings, as an argument of the operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import INTEGERS, check_matrix, check_range
from ._torch import register


@register
@dataclass(frozen=True, eq=False)
class Segments:
    """Segment term ``(query_i + bias) . embed[query_ids[i] != key_ids[j]]`` (Yang et al. 2019, section 2.5).

    Args:
        query_ids: (B, L) integers, the segment of each query row; any int32 values, because only equality counts.
        key_ids: (B, M + K) integers, memory first (segment 0 in XLNet).
        embed: (2, H, D), row 0 for the same segment, row 1 for a different one (XLNet ``seg_embed``).
        bias: (H, D) or None for zeros (XLNet ``r_s_bias``).

    Raises:
        ValueError: the ids are not 2-dimensional tensors of integers that fit int32, of one batch size.

    >>> ids = torch.tensor([[0, 0, 1, 1, 2]])
    >>> segments = Segments(ids, ids, embed=torch.randn(2, 4, 8), bias=torch.randn(4, 8))
    >>> query = key = value = torch.randn(1, 4, 5, 8)
    >>> rel_attention(query, key, value, torch.randn(4, 10, 8), segments=segments).shape
    torch.Size([1, 4, 5, 8])
    """

    query_ids: Tensor
    key_ids: Tensor
    embed: Tensor
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("query_ids", "key_ids"):
            ids = getattr(self, name)
            check_matrix(f"Segments: {name}", ids)
            if ids.dtype not in INTEGERS:
                raise ValueError(f"Segments: {name} must hold integers, got {ids.dtype}")
            # Because the kernels compare int32.
            if ids.dtype == torch.int64:
                check_range(f"Segments: {name}", ids, -(2**31), 2**31)
        if self.query_ids.shape[0] != self.key_ids.shape[0]:
            raise ValueError(
                f"Segments: query_ids and key_ids must have one batch size, got {self.query_ids.shape[0]} and "
                f"{self.key_ids.shape[0]}"
            )
