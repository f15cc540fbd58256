"""Projected positions, kept from call to call where nothing is trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._checks import readable

_LARGEST = 2**22  # numbers in a table that is kept, of one layer


class KeptTable:
    """The rel_key table of a layer, kept at inference on a CPU, where it is up to a third of a layer's products.

    It serves the same positions again, and any that are the middle rows of them: a Conformer's for a shorter audio.
    Weights may change in ways that leave no trace (x.data): one row, computed again, tells. Copies and pickles are
    empty.
    """

    def __init__(self) -> None:
        self._kept: tuple[Tensor, int | None, Tensor, Tensor] | None = None  # positions, version, first row, table

    def __reduce__(self) -> tuple:
        return KeptTable, ()

    def forget(self) -> None:
        self._kept = None

    def __call__(self, positions: Tensor, weight: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """project(positions): positions (..., P, d_model) times `weight`, to (..., H, P, D)."""
        usable = positions.device.type == "cpu" and readable(positions) and readable(weight)
        if not usable or torch.is_grad_enabled() or torch.jit.is_tracing():
            return project(positions)
        first = self._find(positions)
        if first is not None:
            assert self._kept is not None, "it was found there"
            own, _, row, table = self._kept
            again = project(own[..., :1, :])
            if again.dtype == row.dtype and torch.equal(again, row):
                return table.narrow(-2, first, positions.shape[-2])
        table = project(positions)
        if table.numel() <= _LARGEST:
            self._kept = (positions, _version(positions), project(positions[..., :1, :]), table)
        return table

    def _find(self, positions: Tensor) -> int | None:
        """The row of the kept positions where these begin."""
        if self._kept is None:
            return None
        own, version = self._kept[:2]
        if _version(own) != version:
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
