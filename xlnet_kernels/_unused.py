"""Parameters that a step leaves out, for DistributedDataParallel."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def with_unused(x: Tensor, *parameters: nn.Parameter) -> Tensor:
    """x, on which the parameters depend with a gradient of zeros, where several processes train.

    DistributedDataParallel waits for the gradient of every parameter, unless it has to look for those that are missing
    (find_unused_parameters=True, a walk through the graph in every step). In one process nothing is added, and such a
    parameter has no gradient.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.is_grad_enabled()):
        return x
    for parameter in parameters:
        if parameter.requires_grad:
            x = x + parameter.flatten()[:0].sum().to(x.dtype)
    return x
