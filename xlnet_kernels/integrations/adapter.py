"""What stand-ins share: one call of the operator in the order of a Conformer's table; what says that they do not."""

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
        """The library's class, which comes after ours: its attributes, and what `super().forward` is."""

        def __getattr__(self, name: str) -> Any: ...

        def forward(self, *inputs: Any, **options: Any) -> Any: ...

else:
    Original = object


def check_forward(module: nn.Module, name: str, *arguments: str) -> None:
    """ValueError where the module's class called `name` has a forward that begins with other arguments.

    It is then another class by the same name, or one of a version that is not known.
    """
    cls = getattr(type(module), ORIGINAL, type(module))  # it may be accelerated already
    original: Any = next(base for base in cls.__mro__ if base.__name__ == name)
    found = [parameter for parameter in inspect.signature(original.forward).parameters if parameter != "self"]
    if tuple(found[: len(arguments)]) != arguments:
        raise ValueError(
            f"{original.__module__}.{name} cannot be accelerated: its forward takes ({', '.join(found)}), and "
            f"({', '.join(arguments)}) is what is known"
        )


def attend(*arguments: Any, **options: Any) -> Tensor:
    """(B, L, H * D), the output of `attend_with_lse`."""
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
    """(B, H, L, D), and the log-sum-exp (B, H, L), -inf in rows that see nothing.

    Args:
        query, key, value: heads (B, H, L, D) and (B, H, K, D). The L queries are the last of the K frames: those before
            are of a cache.
        rel_key: row 0 is for `max_distance`, default K - 1; with a window, its `rows` of that table.
        window: of `window_of`.
        options: backend, dropout_p and scale of `rel_attention`.
    """
    options |= dict(content_bias=content_bias, position_bias=position_bias, query_positions=_positions(query, key))
    if window is not None:
        return attend_in_window(window, query, key, value, rel_key, mask, **options)
    max_distance = key.shape[2] - 1 if max_distance is None else max_distance
    return rel_attention(query, key, value, rel_key, mask=mask, max_distance=max_distance, return_lse=True, **options)


def window_of(module: nn.Module, length: int, keys: int) -> Window | None:
    """What a module's L queries see of its K frames, as `accelerate` was told; None for everything."""
    return bounded(vars(module).get("window"), length, keys)


def check_no_window(window: Window | None, module: nn.Module) -> None:
    """ValueError where the library's own code is about to compute a call that has a window."""
    if window is not None:
        raise ValueError(
            f"{type(module).__name__} was called with what its library's code alone computes (attention maps, masks "
            f"that are added to scores, other shapes), and that has no window: accelerate the model without window, "
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
    """(B, H, L, K), the map of such a call of `attend`."""
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
    """(B, L), where the queries are among the keys; None where they are all of them."""
    batch, _, length, _ = query.shape
    keys = key.shape[2]
    return None if keys == length else torch.arange(keys - length, keys, device=query.device).expand(batch, -1)


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
    kept = vars(module).setdefault("kept", PositionCache())
    return kept.of_module(positions, projection, project)


def shared(positions: Tensor) -> Tensor:
    """(P, d_model) where the samples of a batch are alike, so that they are projected once.

    Where their values are not known, samples count as different.
    """
    if positions.shape[0] > 1 and positions.stride(0):
        if not known(positions):
            return positions
        hashes = row_hashes(positions)
        if not torch.equal(hashes, hashes[:1].expand_as(hashes)):
            return positions
    return positions[0]


def clipped_rows(keys: int, window: Window | None, left: int, right: int, device: torch.device) -> Tensor:
    """Which rows of Shaw's table are for distances K - 1 down to 1 - K, or for those of the window.

    The table has a row for each distance from `left` before the query to `right` after it; its first and last rows are
    for all beyond.
    """
    ahead = torch.arange(1 - keys, keys, device=device)
    if window is not None:
        ahead = window.rows(ahead[:, None], keys)[:, 0]
    return ahead.clamp(-left, right) + left


def make_stand_in(name: str, module: str, classes: Mapping[str, tuple[str, type]]) -> type:
    """The stand-in for a class of transformers, made when it is first asked for: versions have different models.

    module: of this package, that asks. classes: name of the class -> its folder in transformers, and our methods.
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
