"""The operator's sharding rule: `rel_attention` on DTensors, where each process has some sequences and some heads.

Neither sequences nor heads know of each other, so every process calls the operator on its own ones and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .. import dropout
from .._checks import check_dense_mask, check_rank
from ..masks import RankMask
from ..segments import Segments
from ..two_streams import RowPositions, position_of_rows
from .tensors import replicated

_SHARED = ("sequences", "heads")  # dimensions 0 and 1 of query


def attend_on_shards(
    function: Callable[..., Any],
    query: DTensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor,
    *,
    content_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    segments: Segments | None = None,
    mask: RankMask | Tensor | None = None,
    query_positions: Tensor | RowPositions | None = None,
    memory: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> Any:
    """function(query, key, ...), of the arguments of `rel_attention`, on this process's sequences and heads.

    `query` says how all are sharded: each dimension of its mesh over sequences (Shard(0)), over heads (Shard(1)), or
    not at all. The other arguments are brought to that; what is no DTensor is the same in all processes. Parts that
    many processes share, such as biases where sequences are sharded, get their gradients summed over these.
    Dropout takes the probabilities that one process would take, where all processes have the same random numbers.

    Args:
        function: what computes a process's part, with the arguments of `rel_attention`.
        query: (B, H, L, D), DTensor.
        key, value, rel_key, content_bias, position_bias, mask, query_positions, memory: shapes of `rel_attention`,
            whole or DTensors.
        segments: of tensors (B, L), (B, M + K), (2, H, D), (H, D), whole or DTensors.
        options: go to `function` as they are.

    Returns:
        What `function` returns, tensors (B, H, ...), as DTensors sharded like `query`.

    Raises:
        ValueError: query is sharded in another way, or its sequences or heads are no multiple of the processes, or
            another argument has not as many. All processes raise it.
    """
    mesh, placements = query.device_mesh, query.placements
    check_rank("query", query, 4)
    _check_placements(query)

    def own(name: str, x: Tensor | None, dims: str, shares: bool = False) -> Any:
        """This process's part of the argument `name`, of dimensions such as "BHLD"; a size of 1 may serve all."""
        if x is None:
            return None
        check_rank(name, x, len(dims))
        parts: list[Placement] = []
        gradients: list[Placement] = []
        for placement in placements:
            if not isinstance(placement, Shard):
                parts.append(Replicate())
                gradients.append(Replicate())
                continue
            dim, wanted = dims.find("BH"[placement.dim]), query.shape[placement.dim]
            if dim >= 0 and x.shape[dim] != wanted and not (shares and x.shape[dim] == 1):
                raise ValueError(
                    f"{name} must have {wanted} {_SHARED[placement.dim]} as query has, got shape {tuple(x.shape)}"
                )
            if dim < 0 or x.shape[dim] < wanted:  # shared by all
                parts.append(Replicate())
                gradients.append(Partial())
            else:
                parts.append(Shard(dim))
                gradients.append(Shard(dim))
        return replicated(x, query, name).redistribute(placements=parts).to_local(grad_placements=gradients)

    if isinstance(mask, RankMask):
        sees_self = mask.sees_self
        mask = RankMask(
            own("mask.query_rank", mask.query_rank, "BL", shares=True),
            own("mask.key_rank", mask.key_rank, "BK", shares=True),
            own("mask.query_floor", mask.query_floor, "BL", shares=True),
            own("mask.sees_self", sees_self, "BL", shares=True) if isinstance(sees_self, Tensor) else sees_self,
        )
    elif mask is not None:
        keys = check_rank("key", key, 4)[2] + (0 if memory is None else check_rank("memory[0]", memory[0], 4)[2])
        mask = check_dense_mask(mask, query, keys)
        mask = own("mask", mask[(None,) * (4 - mask.dim())], "BHLK", shares=True)
    if segments is not None:
        segments = Segments(
            own("segments.query_ids", segments.query_ids, "BL"),
            own("segments.key_ids", segments.key_ids, "BK"),
            own("segments.embed", segments.embed, "SHD"),
            own("segments.bias", segments.bias, "HD"),
        )
    positions = own("query_positions", position_of_rows(query_positions), "BL")
    if isinstance(query_positions, RowPositions):
        positions = RowPositions(positions)
    with dropout.of_shard(*_shard(query)) if options.get("dropout_p") else nullcontext():
        found = function(
            own("query", query, "BHLD"),
            own("key", key, "BHKD"),
            own("value", value, "BHKD"),
            own("rel_key", rel_key, "BHPD" if rel_key.dim() == 4 else "HPD"),
            content_bias=own("content_bias", content_bias, "HD"),
            position_bias=own("position_bias", position_bias, "HD"),
            segments=segments,
            mask=mask,
            query_positions=positions,
            memory=memory and (own("memory[0]", memory[0], "BHMD"), own("memory[1]", memory[1], "BHMD")),
            **options,
        )
    if isinstance(found, tuple):
        return tuple(DTensor.from_local(x, mesh, placements, run_check=False) for x in found)
    return DTensor.from_local(found, mesh, placements, run_check=False)


def _check_placements(query: DTensor) -> None:
    processes = {0: 1, 1: 1}
    for dim, placement in enumerate(query.placements):
        if type(placement) is Shard and placement.dim in processes:
            processes[placement.dim] *= query.device_mesh.size(dim)
        elif not isinstance(placement, Replicate):
            raise ValueError(
                f"query must be sharded over sequences, Shard(0), or heads, Shard(1), or replicated, got {placement}"
            )
    for dim, name in enumerate(_SHARED):
        if query.shape[dim] % processes[dim]:
            raise ValueError(
                f"query has {query.shape[dim]} {name}, which is no multiple of the {processes[dim]} processes that "
                f"share them"
            )


def _shard(query: DTensor) -> tuple[int, int]:
    """Which heads of a larger problem this process has, as dropout counts them, sequence after sequence.

    Returns:
        The number of its first head, and how many heads of each sequence other processes have.
    """
    mesh, heads = query.device_mesh, query.shape[1]
    first, of_a_shard = [0, 0], [query.shape[0], heads]
    for dim, placement in enumerate(query.placements):
        if isinstance(placement, Shard):
            of_a_shard[placement.dim] //= mesh.size(dim)
            first[placement.dim] += of_a_shard[placement.dim] * mesh.get_local_rank(dim)
    return first[0] * heads + first[1], heads - of_a_shard[1]
