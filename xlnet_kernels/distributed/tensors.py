"""Helpers for DTensors among plain tensors, with torch's DTensor module imported only when needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_distributed(values: Tensor) -> TypeGuard[DTensor]:
    """Whether the tensor is a DTensor."""
    usual = type(values) in (Tensor, nn.Parameter) or not isinstance(values, Tensor)
    return not usual and hasattr(values, "device_mesh")


def alike(x: Tensor, other: Tensor) -> Tensor:
    """x, as a DTensor if `other` is a DTensor: its gradient is summed over the shards."""
    if not is_distributed(other):
        return x
    return replicated(x, other)


def whole(x: Tensor) -> Tensor:
    """The full tensor of a DTensor."""
    return x.full_tensor() if is_distributed(x) else x


def replicated(x: Tensor, like: DTensor, name: str = "input") -> DTensor:
    """x as a replicated DTensor on the mesh of `like`.

    A plain x must be equal in all processes, and so is its gradient.

    Raises:
        ValueError: x, the argument `name`, is a DTensor on another mesh.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(x, DTensor):
        if x.device_mesh != like.device_mesh:
            raise ValueError(f"{name} is a DTensor on {x.device_mesh}, and must be on {like.device_mesh}")
        return x
    return DTensor.from_local(x, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
