"""Projected positions, kept from call to call where nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ._checks import readable
from ._content import row_hashes
from ._torch import has_hooks, in_dispatch_mode, transformed

_LARGEST = 2**22  # numbers in a table that is kept, of one layer


class _Kept(NamedTuple):
    positions: Tensor  # hashes of the rows
    kind: tuple  # dtype and width of the positions
    weights: list[Tensor]  # hashes of their rows
    probe: Tensor  # a row of no position, which is projected again
    projected: Tensor  # what it was projected to
    table: Tensor


class PositionCache:
    """The rel_key table of a layer, kept at inference on a CPU, where it is up to a third of a layer's products.

    It serves the same positions again, and any that are the middle rows of them: a Conformer's for a shorter audio.
    Positions and weights are compared by hashes of their bits, so that no way of changing them goes unnoticed, and
    nothing refers to them. One row, projected again, tells whether the projection itself has changed (autocast, a
    precision). Threads may share a table. A call that wants gradients empties it; copies and pickles are empty.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def __reduce__(self) -> tuple:
        return PositionCache, ()

    def __call__(self, positions: Tensor, weights: list[Tensor], project: Callable[[Tensor], Tensor]) -> Tensor:
        """project(positions): positions (..., P, d_model) times `weights`, to (..., H, P, D)."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or in_dispatch_mode() or transformed():
            return project(positions)
        usable = positions.device.type == "cpu" and all(map(readable, (positions, *weights)))
        if not usable or torch.is_grad_enabled():
            self._kept = None
            return project(positions)
        kept = self._kept  # read once: another thread may write it
        rows, kind = row_hashes(positions), (positions.dtype, positions.shape[-1])
        hashes = [row_hashes(weight.flatten(1) if weight.dim() > 1 else weight) for weight in weights]
        first = None
        if kept is not None and kept.kind == kind and _equal(kept.weights, hashes):
            first = _find(kept, rows)
        if kept is not None and first is not None:
            again = project(kept.probe)
            if again.dtype == kept.projected.dtype and torch.equal(again, kept.projected):
                return kept.table.narrow(-2, first, positions.shape[-2])
        table = project(positions)
        if 0 < table.numel() <= _LARGEST:
            # Without zeros, which hide columns of the weight: rows of positions may have some.
            probe = torch.linspace(1, 2, positions.shape[-1], device="cpu").to(positions.dtype)
            probe = probe.expand_as(positions.narrow(-2, 0, 1))
            self._kept = _Kept(rows, kind, hashes, probe, project(probe), table)
        return table

    def of_module(self, positions: Tensor, projection: nn.Module, project: Callable[[Tensor], Tensor]) -> Tensor:
        """The same where `project` calls `projection`.

        A module with hooks, parametrizations or parts (an adapter's) is called each time, with all positions.
        """
        parts = any(True for _ in projection.children())
        if torch.is_grad_enabled() or parts or is_parametrized(projection) or has_hooks(projection):
            self._kept = None
            return project(positions)
        return self(positions, [*projection.parameters(), *projection.buffers()], project)


def _equal(hashes: list[Tensor], others: list[Tensor]) -> bool:
    return len(hashes) == len(others) and all(map(torch.equal, hashes, others))


def _find(kept: _Kept, rows: Tensor) -> int | None:
    """The row of the kept positions where those with these hashes begin."""
    if kept.table.is_inference() and not torch.is_inference_mode_enabled():  # backward could not save it
        return None
    own = kept.positions
    first, odd = divmod(own.shape[-1] - rows.shape[-1], 2)
    if first < 0 or odd or own.shape[:-1] != rows.shape[:-1]:
        return None
    return first if torch.equal(own.narrow(-1, first, rows.shape[-1]), rows) else None
