"""Tensor parallelism: each process has some attention heads and some columns of the feed-forward layers.

Each of W processes then has 1 / W of a layer's parameters and products. The processes sum the outputs of attention and
of feed-forward (Shoeybi et al., Megatron-LM, 2019, section 3). Backward has three sums, because queries come from other
rows than keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..attention import TwoStreamAttention
from ..model.encoder import XLNetFeedForward

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def tensor_parallel_plan(model: nn.Module) -> ParallelStyle | dict[str, ParallelStyle]:
    """Plan for torch's `parallelize_module` that splits the layers of a model among processes, by heads:

        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import parallelize_module

        mesh = init_device_mesh("cuda", (8,))
        parallelize_module(model, mesh, xk.tensor_parallel_plan(model))

    Outputs and gradients are those of one process, dropout included. All processes give the model the same batch, with
    the same random numbers. Embeddings, norms and heads of models are replicated. Where d_inner is not a multiple of
    the processes, the last processes have fewer columns of the feed-forward, or none.

    Args:
        model: `TwoStreamAttention`, XLNetModel or a model with a head, or any model that contains `TwoStreamAttention`.

    Raises:
        ValueError: the model has no `TwoStreamAttention`. `parallelize_module` raises it where heads are not a multiple
            of the processes.
        RuntimeError: torch was built without torch.distributed.

    >>> from xlnet_kernels import XLNetConfig, XLNetModel
    >>> list(tensor_parallel_plan(XLNetModel(XLNetConfig(vocab_size=10, d_model=32, n_layer=1, n_head=4, d_inner=64))))
    ['layer.0.rel_attn', 'layer.0.ff.layer_1', 'layer.0.ff.layer_2']
    """
    try:
        from .parallel_styles import ColwiseParallel, HeadParallel, RowwiseParallel
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"tensor_parallel_plan needs torch.distributed.tensor, which this torch lacks: {error}"
        ) from None
    if isinstance(model, TwoStreamAttention):
        return HeadParallel()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
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
