"""Tensor parallelism: each process has some heads of the attention and some columns of the feed-forward layers.

A layer then costs each of W processes a W-th of its parameters and products, and two sums over the processes in each
direction: of attention and of feed-forward (Shoeybi et al., Megatron-LM, 2019, section 3).
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from .attention import TwoStreamAttention
from .model.encoder import XLNetFeedForward

# The dimension of heads.
_HEADS = {name: 1 for name in ("q", "k", "v", "o", "r", "seg_embed")}
_HEADS |= {name: 0 for name in ("r_r_bias", "r_s_bias", "r_w_bias")}


class HeadParallel(ParallelStyle):
    """Shards the heads of a `TwoStreamAttention`: its inputs and outputs are whole and the same in all processes.

    Parameters are DTensors, but for the LayerNorm's, which every process has. Random numbers of all processes must be
    the same (one seed): dropout is then that of one process.

    Raises:
        ValueError: the module is no TwoStreamAttention, or n_head is no multiple of the processes.
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


def tensor_parallel_plan(model: nn.Module) -> ParallelStyle | dict[str, ParallelStyle]:
    """How torch's `parallelize_module` shares the layers of a model among processes, by heads:

        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import parallelize_module

        mesh = init_device_mesh("cuda", (8,))
        parallelize_module(model, mesh, xk.tensor_parallel_plan(model))

    Outputs and gradients are those of one process, dropout included. All processes give the model the same batch, with
    the same random numbers. Embeddings, norms and heads of models stay whole in each. Where d_inner is no multiple of
    the processes, the last ones have fewer columns of the feed-forward, or none.

    Args:
        model: `TwoStreamAttention`, XLNetModel or one with a head, or any model that has `TwoStreamAttention` in it.

    Raises:
        ValueError: there is none in it. `parallelize_module` raises it where heads are no multiple of the processes.

    >>> from xlnet_kernels import XLNetConfig, XLNetModel
    >>> list(tensor_parallel_plan(XLNetModel(XLNetConfig(vocab_size=10, d_model=32, n_layer=1, n_head=4, d_inner=64))))
    ['layer.0.rel_attn', 'layer.0.ff.layer_1', 'layer.0.ff.layer_2']
    """
    if isinstance(model, TwoStreamAttention):
        return HeadParallel()
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if isinstance(module, TwoStreamAttention):
            plan[name] = HeadParallel()
        elif isinstance(module, XLNetFeedForward):
            plan[f"{name}.layer_1"] = ColwiseParallel(use_local_output=False)
            plan[f"{name}.layer_2"] = RowwiseParallel()
    if not any(isinstance(style, HeadParallel) for style in plan.values()):
        raise ValueError(f"model must have TwoStreamAttention in it, {type(model).__name__} has none")
    return plan
