"""Cache of projected positions, kept from call to call at inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ._checks import readable
from ._content import row_hashes
from ._torch import has_hooks, in_dispatch_mode, transformed

_LARGEST = 2**22  # elements in one layer's cached table


class _Kept(NamedTuple):
    positions: Tensor  # hashes of the rows
    kind: tuple  # dtype and width of the positions
    weights: list[Tensor]  # hashes of the weights' rows
    probe: Tensor  # an artificial row, projected again in each call
    projected: Tensor  # the probe's projection
    table: Tensor


class PositionCache:
    """Cache of a layer's rel_key table at inference on a CPU.

    It saves up to a third of a layer's products.

    It serves the same positions again, and any contiguous rows in their middle, such as a Conformer's for a shorter
    audio. Positions and weights are compared by hashes of their bits, so every change is noticed and no reference is
    kept. A probe row, projected again, shows whether the projection itself has changed (autocast, a precision). Threads
    may share a table. A call that needs gradients empties it; copies and pickles are empty.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def __reduce__(self) -> tuple:
        return PositionCache, ()

    def __call__(self, positions: Tensor, weights: list[Tensor], project: Callable[[Tensor], Tensor]) -> Tensor:
        """The result of project(positions): positions (..., P, d_model) times `weights`, to (..., H, P, D)."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or in_dispatch_mode() or transformed():
            return project(positions)
        usable = positions.device.type == "cpu" and all(map(readable, (positions, *weights)))
        if not usable or torch.is_grad_enabled():
            self._kept = None
            return project(positions)
        # Read once, because another thread may write it.
        kept = self._kept
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
            # Without zeros, because they would hide columns of the weight; rows of positions may have zeros.
            probe = torch.linspace(1, 2, positions.shape[-1], device="cpu").to(positions.dtype)
            probe = probe.expand_as(positions.narrow(-2, 0, 1))
            self._kept = _Kept(rows, kind, hashes, probe, project(probe), table)
        return table

    def of_module(self, positions: Tensor, projection: nn.Module, project: Callable[[Tensor], Tensor]) -> Tensor:
        """The cached projection where `project` calls the module `projection`.

        A module with hooks, parametrizations or submodules (of an adapter) is called each time, with all positions.
        """
        parts = any(True for _ in projection.children())
        if torch.is_grad_enabled() or parts or is_parametrized(projection) or has_hooks(projection):
            self._kept = None
            return project(positions)
        return self(positions, [*projection.parameters(), *projection.buffers()], project)


def _equal(hashes: list[Tensor], others: list[Tensor]) -> bool:
    return len(hashes) == len(others) and all(map(torch.equal, hashes, others))


def _find(kept: _Kept, rows: Tensor) -> int | None:
    """The first row of the positions with these hashes among the cached ones."""
    # Because backward could not save an inference tensor.
    if kept.table.is_inference() and not torch.is_inference_mode_enabled():
        return None
    own = kept.positions
    first, odd = divmod(own.shape[-1] - rows.shape[-1], 2)
    if first < 0 or odd or own.shape[:-1] != rows.shape[:-1]:
        return None
    return first if torch.equal(own.narrow(-1, first, rows.shape[-1]), rows) else None
