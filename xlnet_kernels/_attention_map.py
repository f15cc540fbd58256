"""Attention with its map, which fused kernels never hold."""

from __future__ import annotations

import torch
from torch import Tensor

from . import dropout
from .backends import reference
from .distributed.tensors import is_distributed


def attention_and_map(
    query: Tensor, key: Tensor, value: Tensor, rel_key: Tensor, *, memory: tuple[Tensor, Tensor] | None, **options
) -> tuple[Tensor, Tensor]:
    """What `rel_attention` gives, and the attention map (B, H, L, M + K)."""
    if is_distributed(query):
        from .distributed.dtensor import attend_on_shards

        return attend_on_shards(attention_and_map, query, key, value, rel_key, memory=memory, **options)
    mem_len = 0
    if memory is not None:
        mem_len = memory[0].shape[2]
        key, value = torch.cat([memory[0], key], 2), torch.cat([memory[1], value], 2)
    weights, _, visible = reference.attention_map(
        query,
        key,
        rel_key,
        mem_len=mem_len,
        max_distance=key.shape[2],
        dropout_state=dropout.new_state(query.device) if options["dropout_p"] > 0 else None,
        scale=query.shape[-1] ** -0.5,
        **options,
    )
    return reference.weighed_sum(weights, value, visible), weights
