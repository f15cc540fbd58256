"""Parameters that a step leaves out, for DistributedDataParallel."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def with_unused(x: Tensor, *parameters: nn.Parameter) -> Tensor:
    """x, on which the parameters depend with a gradient of zeros, where a process group exists.

    DistributedDataParallel waits for the gradient of every parameter, unless it has to look for those that are missing
    (find_unused_parameters=True, a walk through the graph in every step), also in a group of one process. Without a
    group nothing is added, and such a parameter has no gradient.

    An optimizer passes over parameters without gradients, but not over zeros: weight decay shrinks unused ones in a
    group, unless they are among the parameters without it. Sharded parameters (DTensor) are left out.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.is_grad_enabled()):
        return x
    for parameter in parameters:
        if parameter.requires_grad and type(parameter) is nn.Parameter:
            x = x + parameter.flatten()[:0].sum().to(x.dtype)
    return x
