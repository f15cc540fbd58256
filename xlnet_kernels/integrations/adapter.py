"""Shared code of stand-ins: calls of the operator in a Conformer's table order, and checks of support."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._checks import readable
from .._content import row_hashes
from ..backends import reference
from ..call import collect
from ..functional import rel_attention
from ..masks import RankMask
from ..position_cache import PositionCache
from ._accelerated_class import ORIGINAL
from ._masks import known
from ._window import Window, attend_in_window, bounded

if TYPE_CHECKING:

    class Original(nn.Module):
        """Typing stub of the library's class, which comes after the stand-in: its attributes and `super().forward`."""

        def __getattr__(self, name: str) -> Any: ...

        def forward(self, *inputs: Any, **options: Any) -> Any: ...

else:
    Original = object


def check_forward(module: nn.Module, name: str, *arguments: str) -> None:
    """Raise ValueError where the forward of the module's class `name` begins with other arguments.

    It is then another class of the same name, or an unknown version.
    """
    cls = getattr(type(module), ORIGINAL, type(module))  # of a module that may be accelerated already
    original: Any = next(base for base in cls.__mro__ if base.__name__ == name)
    found = [parameter for parameter in inspect.signature(original.forward).parameters if parameter != "self"]
    if tuple(found[: len(arguments)]) != arguments:
        raise ValueError(
            f"{original.__module__}.{name} cannot be accelerated: its forward takes ({', '.join(found)}), "
            f"expected ({', '.join(arguments)})"
        )


def attend(*arguments: Any, **options: Any) -> Tensor:
    """The output of `attend_with_lse` as (B, L, H * D)."""
    return attend_with_lse(*arguments, **options)[0].transpose(1, 2).flatten(2)


def attend_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor,
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    mask: RankMask | Tensor | None,
    window: Window | None = None,
    max_distance: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, L, D) and log-sum-exp (B, H, L), -inf in fully masked rows.

    Args:
        query, key, value: heads (B, H, L, D) and (B, H, K, D). The L queries are the last of the K frames; earlier
            frames are from a cache.
        rel_key: row 0 is for `max_distance`, default K - 1; with a window, its `rows` of that table.
        window: from `window_of`.
        options: backend, dropout_p and scale of `rel_attention`.
    """
    options |= dict(content_bias=content_bias, position_bias=position_bias, query_positions=_positions(query, key))
    if window is not None:
        return attend_in_window(window, query, key, value, rel_key, mask, **options)
    max_distance = key.shape[2] - 1 if max_distance is None else max_distance
    return rel_attention(query, key, value, rel_key, mask=mask, max_distance=max_distance, return_lse=True, **options)


def window_of(module: nn.Module, length: int, keys: int) -> Window | None:
    """The window of a module's L queries among its K frames, set by `accelerate`; None for full attention."""
    return bounded(vars(module).get("window"), length, keys)


def check_no_window(window: Window | None, module: nn.Module) -> None:
    """Raise ValueError where the library's own code would compute a call that has a window."""
    if window is not None:
        raise ValueError(
            f"{type(module).__name__} was called with options that only its library's code supports (attention maps, "
            f"masks that are added to scores, other shapes), without a window: accelerate the model without window, "
            f"got ({window.left}, {window.right})"
        )


def attention_map(
    query: Tensor,
    key: Tensor,
    rel_key: Tensor,
    content_bias: Tensor,
    position_bias: Tensor,
    mask: RankMask | Tensor | None,
    window: Window | None,
) -> Tensor:
    """The map (B, H, L, K) of such a call of `attend`."""
    keys = key.shape[2]
    if window is not None and window.global_tokens:
        visible = mask.to_bool()[:, None] if isinstance(mask, RankMask) else mask
        mask = window.to_bool(keys, key.device)
        mask = mask if visible is None else mask & visible
    call = collect(
        query,
        key,
        key,
        rel_key.to(query.dtype),
        content_bias=content_bias.to(query.dtype),
        position_bias=position_bias.to(query.dtype),
        mask=mask,
        query_positions=_positions(query, key),
        max_distance=keys - 1 if window is None else window.first_distance(keys),
        scale=query.shape[3] ** -0.5,
    )
    return reference.attention_map(call)[0]


def _positions(query: Tensor, key: Tensor) -> Tensor | None:
    """Positions (B, L) of the queries among the keys; None where the queries are all frames."""
    batch, _, length, _ = query.shape
    keys = key.shape[2]
    return None if keys == length else torch.arange(keys - length, keys, device=query.device).expand(batch, -1)


def split(x: Tensor, width: int) -> Tensor:
    """(..., L, H * D) -> (..., H, L, D) with D = `width`, a view."""
    return x.unflatten(-1, (-1, width)).transpose(-3, -2)


def project_positions(module: Original, positions: Tensor, projection: nn.Module, width: int) -> Tensor:
    """rel_key of positions (..., P, d_model), cached at inference because consecutive calls often have the same.

    The cache is the module's attribute `kept`, one of the class's `made_here`.
    """

    def project(rows: Tensor) -> Tensor:
        return split(projection(rows), width)

    if not readable(positions):
        return project(positions)
    kept = vars(module).setdefault("kept", PositionCache())
    return kept.of_module(positions, projection, project)


def shared(positions: Tensor) -> Tensor:
    """Positions (P, d_model) where the samples of a batch are equal, to project them once; else unchanged.

    Samples with unknown values count as different.
    """
    if positions.shape[0] > 1 and positions.stride(0):
        if not known(positions):
            return positions
        hashes = row_hashes(positions)
        if not torch.equal(hashes, hashes[:1].expand_as(hashes)):
            return positions
    return positions[0]


def clipped_rows(keys: int, window: Window | None, left: int, right: int, device: torch.device) -> Tensor:
    """Indices in Shaw's table for distances K - 1 down to 1 - K, or for those of the window.

    The table has a row for each distance from `left` before the query to `right` after it; its first and last rows also
    serve all distances beyond.
    """
    ahead = torch.arange(1 - keys, keys, device=device)
    if window is not None:
        ahead = window.rows(ahead[:, None], keys)[:, 0]
    return ahead.clamp(-left, right) + left


def make_stand_in(name: str, module: str, classes: Mapping[str, tuple[str, type]]) -> type:
    """The stand-in for a class of transformers, made on demand because versions have different models.

    module: the calling module of this package. classes: name of the class -> its folder in transformers, and the
    methods.
    """
    if name not in classes:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return _make_stand_in(name, module, *classes[name])


@cache
def _make_stand_in(name: str, module: str, folder: str, methods: type) -> type:
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    return type(name, (methods, getattr(modeling, name)), {"__module__": module})


def say_once(text: str) -> None:
    if not torch.compiler.is_compiling():
        _warn(text)


@cache
def _warn(text: str) -> None:
    warnings.warn(f"xlnet_kernels: {text}", stacklevel=3)
