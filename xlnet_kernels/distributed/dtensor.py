"""Sharding rule of the operator: `rel_attention` on DTensors, where each process has some sequences and heads.

Sequences and heads are independent, so every process calls the operator on its own part, without communication.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .. import dropout
from .._checks import check_dense_mask, check_rank
from ..call import TENSORS, Argument, Call, mem_len, replace
from .tensors import is_distributed, replicated

_SHARED = ("sequences", "heads")  # dimensions 0 and 1 of query


def attend_on_shards(function: Callable[[Call], tuple[Tensor, Tensor]], call: Call) -> tuple[Tensor, Tensor]:
    """The result of function(call) for this process's sequences and heads, as DTensors.

    `query` determines the sharding: each dimension of its mesh over sequences (Shard(0)), over heads (Shard(1)), or not
    at all. The other tensors are redistributed accordingly by their axes; a plain tensor is the same in all processes.
    Gradients of shared parts, such as biases where sequences are sharded, are summed over processes. Dropout is that of
    a single process, provided all processes have the same random numbers.

    Args:
        function: computes a process's part; it returns two tensors (B, H, ...).
        call: query (B, H, L, D) is a DTensor; other tensors are plain or DTensors.

    Returns:
        The tensors of `function` as DTensors sharded like `query`.

    Raises:
        ValueError: query is sharded in another way, its sequences or heads are not a multiple of the processes, or
            another argument has a different number of them. All processes raise it.
    """
    query = call.query
    assert is_distributed(query)
    check_rank("query", query, 4)
    _check_placements(query)
    if call.mask is not None:
        keys = check_rank("key", call.key, 4)[2] + mem_len(call)
        mask = check_dense_mask(call.mask, query, keys)
        call = replace(call, mask=mask[(None,) * (4 - mask.dim())])
    own = {name: _own_part(getattr(call, name), argument, query) for name, argument in TENSORS.items()}
    with dropout.of_shard(*_shard(query)) if call.dropout_p else nullcontext():
        first, second = function(replace(call, **own))
    mesh, placements = query.device_mesh, query.placements
    return (
        DTensor.from_local(first, mesh, placements, run_check=False),
        DTensor.from_local(second, mesh, placements, run_check=False),
    )


def _own_part(x: Tensor | None, argument: Argument, query: DTensor) -> Tensor | None:
    """This process's part of an argument."""
    if x is None or not argument.axes:
        return x
    axes = argument.axes_of(x) if isinstance(x, Tensor) else argument.axes
    check_rank(argument.label, x, len(axes))
    parts: list[Placement] = []
    gradients: list[Placement] = []
    for placement in query.placements:
        if not isinstance(placement, Shard):
            parts.append(Replicate())
            gradients.append(Replicate())
            continue
        axis, wanted = "BH"[placement.dim], query.shape[placement.dim]
        dim = axes.upper().find(axis)
        serves_all = dim < 0 or (axes[dim].islower() and x.shape[dim] == 1 and wanted != 1)
        if not serves_all and x.shape[dim] != wanted:
            raise ValueError(
                f"{argument.label} must have {wanted} {_SHARED[placement.dim]} as query has, got shape {tuple(x.shape)}"
            )
        parts.append(Replicate() if serves_all else Shard(dim))
        gradients.append(Partial() if serves_all else Shard(dim))
    return replicated(x, query, argument.label).redistribute(placements=parts).to_local(grad_placements=gradients)


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
    """This process's heads in the larger problem, as dropout counts them, sequence after sequence.

    Returns:
        The number of its first head, and the number of other processes' heads for each sequence.
    """
    mesh, heads = query.device_mesh, query.shape[1]
    first, of_a_shard = [0, 0], [query.shape[0], heads]
    for dim, placement in enumerate(query.placements):
        if isinstance(placement, Shard):
            of_a_shard[placement.dim] //= mesh.size(dim)
            first[placement.dim] += of_a_shard[placement.dim] * mesh.get_local_rank(dim)
    return first[0] * heads + first[1], heads - of_a_shard[1]
