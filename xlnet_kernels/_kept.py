"""Projected positions, kept from call to call where nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.weak import TensorWeakRef

from ._checks import readable
from ._torch import has_hooks, in_dispatch_mode, transformed

_LARGEST = 2**22  # numbers in a table that is kept, of one layer


class _Kept(NamedTuple):
    positions: Tensor
    position_version: int | None
    weight: TensorWeakRef
    weight_version: int | None
    probe: Tensor  # a row of no position, which is projected again
    projected: Tensor  # what it was projected to
    table: Tensor


class KeptTable:
    """The rel_key table of a layer, kept at inference on a CPU, where it is up to a third of a layer's products.

    It serves the same positions again, and any that are the middle rows of them: a Conformer's for a shorter audio.
    The weight must be the same tensor of the same version; it may change in ways that leave no trace (x.data), and
    so may biases and adapters around it: one row, projected again, tells. Positions that are written through another
    library's view of their memory (numpy's) are not noticed. Threads may share a table. A call that wants gradients
    empties it; copies and pickles are empty.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def __reduce__(self) -> tuple:
        return KeptTable, ()

    def __call__(self, positions: Tensor, weight: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """project(positions): positions (..., P, d_model) times `weight`, to (..., H, P, D)."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or in_dispatch_mode() or transformed():
            return project(positions)
        usable = positions.device.type == "cpu" and readable(positions) and readable(weight)
        if not usable or weight.is_inference() or torch.is_grad_enabled():
            self._kept = None
            return project(positions)
        kept = self._kept  # read once: another thread may write it
        first = None if kept is None else _find(kept, positions, weight)
        if kept is not None and first is not None:
            again = project(kept.probe)
            if again.dtype == kept.projected.dtype and torch.equal(again, kept.projected):
                return kept.table.narrow(-2, first, positions.shape[-2])
        versions = _version(positions), _version(weight)
        # No one counts what is written into an inference tensor, so its values are kept and compared.
        own = positions.clone() if positions.is_inference() else positions
        table = project(own)
        if 0 < table.numel() <= _LARGEST:
            # Without zeros, which hide columns of the weight: rows of positions may have some.
            probe = torch.linspace(1, 2, own.shape[-1]).to(own.dtype).expand_as(own.narrow(-2, 0, 1))
            self._kept = _Kept(own, versions[0], TensorWeakRef(weight), versions[1], probe, project(probe), table)
        return table

    def of_module(self, positions: Tensor, projection: nn.Module, project: Callable[[Tensor], Tensor]) -> Tensor:
        """The same where `project` calls `projection`; hooks of it and its parts see every call, with all positions."""
        if torch.is_grad_enabled() or is_parametrized(projection) or any(map(has_hooks, projection.modules())):
            self._kept = None
            return project(positions)
        weight = getattr(projection, "weight", None)
        if not isinstance(weight, Tensor):
            return project(positions)
        return self(positions, weight, project)


def _find(kept: _Kept, positions: Tensor, weight: Tensor) -> int | None:
    """The row of the kept positions where these begin."""
    own = kept.positions
    if _version(own) != kept.position_version:
        return None
    if kept.weight() is not weight or _version(weight) != kept.weight_version:
        return None
    if kept.table.is_inference() and not torch.is_inference_mode_enabled():  # backward could not save it
        return None
    if own is positions:
        return 0
    first, odd = divmod(own.shape[-2] - positions.shape[-2], 2)
    if first < 0 or odd or own.dim() != positions.dim() or own.dtype != positions.dtype:
        return None
    return first if torch.equal(own.narrow(-2, first, positions.shape[-2]), positions) else None


def _version(tensor: Tensor) -> int | None:
    """Changes with the tensor's values, where torch counts that."""
    return None if tensor.is_inference() else tensor._version
