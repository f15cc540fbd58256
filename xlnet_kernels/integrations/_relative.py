"""What stand-ins share: one call of the operator in the order of a Conformer's table; what says that they do not."""

from __future__ import annotations

import inspect
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._checks import readable
from .._kept import KeptTable
from ..functional import rel_attention
from ..masks import RankMask
from ._masks import OfLast

if TYPE_CHECKING:

    class Original(nn.Module):
        """The library's class, which comes after ours: its attributes, and what `super().forward` is."""

        def __getattr__(self, name: str) -> Any: ...

        def forward(self, *inputs: Any, **options: Any) -> Any: ...

else:
    Original = object


def check_forward(module: nn.Module, name: str, *arguments: str) -> None:
    """ValueError where the module's class called `name` has a forward that begins with other arguments.

    It is then another class by the same name, or one of a version that is not known.
    """
    cls = getattr(type(module), "_class_before_accelerate", type(module))  # it may be accelerated already
    original: Any = next(base for base in cls.__mro__ if base.__name__ == name)
    found = [parameter for parameter in inspect.signature(original.forward).parameters if parameter != "self"]
    if tuple(found[: len(arguments)]) != arguments:
        raise ValueError(
            f"{original.__module__}.{name} cannot be accelerated: its forward takes ({', '.join(found)}), and "
            f"({', '.join(arguments)}) is what is known"
        )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor,
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    mask: RankMask | Tensor | None,
    *,
    backend: str | None,
    max_distance: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """(B, L, H * D) from heads (B, H, L, D) and (B, H, K, D); rel_key's row 0 is for `max_distance`, default K - 1.

    The L queries are the last of the K frames: those before are of a cache.
    """
    batch, _, length, _ = query.shape
    keys = key.shape[2]
    positions = None
    if keys != length:
        positions = torch.arange(keys - length, keys, device=query.device).expand(batch, -1)
    out = rel_attention(
        query,
        key,
        value,
        rel_key,
        content_bias=content_bias,
        position_bias=position_bias,
        mask=mask,
        query_positions=positions,
        max_distance=keys - 1 if max_distance is None else max_distance,
        dropout_p=dropout_p,
        scale=scale,
        backend=backend,
    )
    return out.transpose(1, 2).flatten(2)


def split(x: Tensor, width: int) -> Tensor:
    """(..., L, H * D) -> (..., H, L, D) with D = `width`, a view."""
    return x.unflatten(-1, (-1, width)).transpose(-3, -2)


def project_positions(module: Original, positions: Tensor, projection: nn.Module, width: int) -> Tensor:
    """rel_key of positions (..., P, d_model); at inference of the call before, which had the same more often than not.

    What is kept is in the module's attribute `kept`, one of those that its class has `made_here`.
    """

    def project(rows: Tensor) -> Tensor:
        return split(projection(rows), width)

    if not readable(positions):
        return project(positions)
    kept = vars(module).setdefault("kept", KeptTable())
    return kept.of_module(positions, projection, project)


def shared(positions: Tensor) -> Tensor:
    """(P, d_model) where the samples of a batch are alike, so that they are projected once."""
    return positions[0] if _alike(positions) else positions


@OfLast
def _alike(positions: Tensor) -> bool:
    if positions.shape[0] == 1 or not readable(positions):  # where it is not known what they hold
        return positions.shape[0] == 1
    return torch.equal(positions, positions[:1].expand_as(positions))


def say_once(text: str) -> None:
    if not torch.compiler.is_compiling():
        _warn(text)


@cache
def _warn(text: str) -> None:
    warnings.warn(f"xlnet_kernels: {text}", stacklevel=3)
