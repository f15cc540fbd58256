"""Parallel styles of layers; imported with a plan only, because not every torch has torch.distributed."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ..attention import TwoStreamAttention

__all__ = ["ColwiseParallel", "HeadParallel", "RowwiseParallel"]

# The dimension of heads.
_HEADS = {name: 1 for name in ("q", "k", "v", "o", "r", "seg_embed")}
_HEADS |= {name: 0 for name in ("r_r_bias", "r_s_bias", "r_w_bias")}


class HeadParallel(ParallelStyle):
    """Parallel style that shards the heads of a `TwoStreamAttention`; inputs and outputs are replicated.

    Parameters are DTensors, except for the LayerNorm's, which are replicated. With the same random numbers in all
    processes (one seed), dropout is that of a single process.

    Raises:
        ValueError: the module is not a TwoStreamAttention, or n_head is not a multiple of the processes.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, TwoStreamAttention):
            raise ValueError(f"HeadParallel is for TwoStreamAttention, got {type(module).__name__}")
        if module.n_head % device_mesh.size():
            raise ValueError(
                f"{module.n_head} heads cannot be shared by {device_mesh.size()} processes: n_head must be a multiple"
            )
        for name, dim in _HEADS.items():
            whole = getattr(module, name)
            part = distribute_tensor(whole.detach(), device_mesh, [Shard(dim)])
            setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        return module
