"""Window of `accelerate`: the visible frames of a query, and attention at a cost linear in length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import as_python, is_integer, shortened
from .._torch import is_free_in_onnx
from ..functional import rel_attention
from ..masks import RankMask
from ..merging import merge
from ._masks import hide_keys


@dataclass(frozen=True)
class Window:
    """Window of `left` keys before a query, itself and `right` keys after it, for sequences of more than `over` keys.

    The first `global_tokens` frames see all keys, and all queries see them.
    """

    left: int
    right: int
    over: int = 0
    global_tokens: int = 0

    def rows(self, table: Tensor, keys: int) -> Tensor:
        """The rows used from a table (..., P, D) whose first row is for distance K - 1."""
        if self.global_tokens:
            return table
        # Because the sequence may be shorter than the window.
        if is_free_in_onnx(keys):
            return F.pad(table, (0, 0, self.left, self.right)).narrow(-2, keys - 1, self.left + self.right + 1)
        return table[..., keys - 1 - self.left : keys + self.right, :]

    def first_distance(self, keys: int) -> int:
        """The distance of the first of `rows`."""
        return keys - 1 if self.global_tokens else self.left

    def to_bool(self, keys: int, device: torch.device) -> Tensor:
        """Mask (K, K) bool of the keys that each frame sees."""
        frame = torch.arange(keys, device=device)
        ahead = frame - frame[:, None]
        is_global = frame < self.global_tokens
        return (ahead >= -self.left) & (ahead <= self.right) | is_global | is_global[:, None]


def make_window(window: Any, window_over: Any, global_tokens: Any) -> Window | None:
    """The checked Window of `accelerate`'s arguments, or None.

    Raises:
        ValueError: an argument is invalid; the text names it.
    """
    window_over, global_tokens = as_python(window_over), as_python(global_tokens)
    for name, count in (("window_over", window_over), ("global_tokens", global_tokens)):
        if not is_integer(count) or count < 0:
            raise ValueError(f"{name} must be an integer of at least 0, got {shortened(count)}")
        if count and window is None:
            raise ValueError(f"{name} needs window=(left, right), got window=None and {name}={count}")
    if window is None:
        return None
    pair = [as_python(side) for side in window] if isinstance(window, (tuple, list)) else []
    if len(pair) != 2 or not all(is_integer(side) and side >= 0 for side in pair):
        raise ValueError(f"window must be a pair (left, right) of integers of at least 0, got {shortened(window)}")
    if not any(pair):
        raise ValueError("window must show a query more than its own key, got (0, 0)")
    return Window(pair[0], pair[1], window_over, global_tokens)


def bounded(window: Window | None, length: int, keys: int) -> Window | None:
    """The window of L queries, the last of K frames, clipped to these frames; None for full attention.

    Raises:
        ValueError: there are global tokens and cached frames; or the window depends on the length in an ONNX file for
            all lengths.
    """
    if window is not None and is_free_in_onnx(keys):
        if window.over or window.global_tokens:
            raise ValueError(
                f"window_over and global_tokens must be 0 where torch.onnx.export keeps lengths free, got "
                f"window_over={window.over} and global_tokens={window.global_tokens}"
            )
        return window
    if torch.jit.is_tracing():  # sizes are tensors there
        length, keys = int(length), int(keys)
    if window is None or keys <= window.over or keys <= window.global_tokens:
        return None
    left, right = min(window.left, keys - 1), min(window.right, keys - 1)
    if left == right == keys - 1:
        return None
    if window.global_tokens and length != keys:
        raise ValueError(
            f"global_tokens are the first frames of a whole sequence: global_tokens must be 0 with a cache, got "
            f"{window.global_tokens} and {length} queries of {keys} keys"
        )
    return replace(window, left=left, right=right)


def attend_in_window(
    window: Window,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor,
    mask: RankMask | Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, L, D) and log-sum-exp (B, H, L), -inf in fully masked rows, of attention under a window.

    Args:
        window: from `bounded`.
        rel_key: (H or B, P, D), `window.rows` of the table.
        options: the other arguments of `rel_attention`.
    """

    def attend(query: Tensor, rel_key: Tensor, mask: RankMask | Tensor | None, distance: int) -> tuple[Tensor, Tensor]:
        return rel_attention(query, key, value, rel_key, mask=mask, max_distance=distance, return_lse=True, **options)

    count = window.global_tokens
    if not count:
        return attend(query, rel_key, mask, window.left)
    # Three kinds of pairs: the query's frame, the key's frame or none is global. Each call is linear in length, because
    # kernels skip hidden keys.
    keys = key.shape[2]
    is_global = torch.arange(keys, device=key.device).expand(key.shape[0], -1) < count
    near = attend(query, replace(window, global_tokens=0).rows(rel_key, keys), hide_keys(mask, is_global), window.left)
    far = attend(query, rel_key[..., : keys - 1 + count, :], hide_keys(mask, ~is_global), keys - 1)
    local, lse = merge(*zip(near, far, strict=True))
    first, first_lse = attend(query[:, :, :count], rel_key[..., keys - count :, :], _first(mask, count), count - 1)
    return torch.cat([first, local[:, :, count:]], 2), torch.cat([first_lse, lse[:, :, count:]], 2)


def _first(mask: RankMask | Tensor | None, count: int) -> RankMask | Tensor | None:
    """The mask of the first rows."""
    if isinstance(mask, RankMask):
        return mask.rows(torch.arange(count, device=mask.query_rank.device).expand(len(mask.query_rank), -1))
    return mask if mask is None else mask[..., :count, :]
