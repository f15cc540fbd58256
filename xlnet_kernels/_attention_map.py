"""Attention that also returns its map, computed by the reference."""

from __future__ import annotations

from torch import Tensor

from .backends import reference
from .call import Call, collect
from .call_checks import cast, check
from .distributed.tensors import is_distributed
from .functional import with_dropout_state


def attention_and_map(query: Tensor, key: Tensor, value: Tensor, rel_key: Tensor, **options) -> tuple[Tensor, Tensor]:
    """The output (B, H, L, D) of `rel_attention` with these arguments, and the attention map (B, H, L, M + K)."""
    return _compute(collect(query, key, value, rel_key, **options))


def _compute(call: Call) -> tuple[Tensor, Tensor]:
    if is_distributed(call.query):
        from .distributed.dtensor import attend_on_shards

        return attend_on_shards(_compute, call)
    call = with_dropout_state(check(cast(call)))
    weights, _, visible = reference.attention_map(call)
    return reference.weighted_sum(weights, call, visible), weights
