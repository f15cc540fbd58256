"""The short way of calls that nothing special is about.

A small call spends more time on questions in Python than in its kernel; csrc/plain_call.cpp asks them in C++. What it
does not serve goes the long way, through `functional`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _extension
from ._torch import in_dispatch_mode, transformed
from .backends import choose, cpu, cuda
from .masks import RankMask
from .ops import rank_vectors
from .segments import Segments
from .two_streams import RowPositions, split_positions

_plain_call = getattr(_extension.module, "plain_call", None)
# By the type of device: its backend's name and module
_OF_DEVICE = {"cpu": ("cpu", cpu)}
if getattr(_extension.module, "cuda_version", None):
    _OF_DEVICE["cuda"] = ("cuda", cuda)
_PLAIN = (Tensor, torch.nn.Parameter)


def attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor,
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    segments: Segments | None,
    mask: RankMask | Tensor | None,
    query_positions: Tensor | RowPositions | None,
    max_distance: int | None,
    memory: tuple[Tensor, Tensor] | None,
    scale: float | None,
    deterministic: bool | None,
    backend: str | None,
) -> tuple[Tensor, Tensor] | None:
    """The output and the log-sum-exp of a call without dropout, its arguments unchecked as `functional` is given them.

    None for whatever is not plainly right, for other backends than "cpu" and "cuda", and for what torch has a say in
    (compilers, transforms, modes, subclasses, autocast): `functional` serves the call or says what is wrong.
    """
    if _plain_call is None or torch.compiler.is_compiling() or transformed() or in_dispatch_mode():
        return None
    if type(query) not in _PLAIN or query.dim() != 4:
        return None
    device = query.device.type
    name, module = _OF_DEVICE.get(device, (None, None))
    if name is None or backend not in (None, name):
        return None
    if choose(None, device, query.dtype, query.shape[-1], query.device) is not module:
        return None
    query_rank = key_rank = query_floor = sees_self = None
    if type(mask) is RankMask:
        query_rank, key_rank, query_floor, sees_self = rank_vectors(mask)
    elif mask is not None:
        return None
    query_ids = key_ids = segment_embed = segment_bias = None
    if type(segments) is Segments:
        query_ids, key_ids = segments.query_ids, segments.key_ids
        segment_embed, segment_bias = segments.embed, segments.bias
    elif segments is not None:
        return None
    memory_key = memory_value = None
    if type(memory) is tuple and len(memory) == 2:
        memory_key, memory_value = memory
        if memory_key is None or memory_value is None:
            return None
    elif memory is not None:
        return None
    return _plain_call(
        query, key, value, rel_key, content_bias, position_bias, memory_key, memory_value, segment_embed, segment_bias,
        query_ids, key_ids, query_rank, key_rank, query_floor, sees_self, None, *split_positions(query_positions), None,
        max_distance, 0.0, scale, deterministic,
    )  # fmt: skip
