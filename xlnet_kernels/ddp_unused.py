"""Zero gradients for unused parameters, for DistributedDataParallel."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def with_unused(x: Tensor, *parameters: nn.Parameter) -> Tensor:
    """x, made to depend on the parameters with zero gradients where a process group exists.

    DistributedDataParallel waits for the gradient of every parameter, also in a group of one process. The alternative
    is find_unused_parameters=True, which walks through the graph in every step. Without a group nothing is added, and
    an unused parameter has no gradient.

    An optimizer skips parameters without gradients, but not those with zero gradients: in a group, weight decay shrinks
    unused parameters, unless they are exempt from it. Sharded parameters (DTensor) are left out.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.is_grad_enabled()):
        return x
    for parameter in parameters:
        if parameter.requires_grad and type(parameter) is nn.Parameter:
            x = x + parameter.flatten()[:0].sum().to(x.dtype)
    return x
