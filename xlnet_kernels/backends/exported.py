"""The operator in terms of ONNX operators, for torch.onnx.export: outputs only, no gradients.

The relative shift is a reshape: rows of n + 1 numbers, read as rows of n, begin one number earlier each (docs/math.md,
*The shift is an address*). There are two forms:

- every pair, quadratic in length;
- a window around each query, where rel_key's rows and max_distance are known and the length is unknown or larger.
  Queries are in blocks, each with a few blocks of keys: linear in length, without a loop.

The reference serves calls with query_positions (two streams, caches), with fewer queries than keys, or with dropout.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from .._ranks import HIGHEST
from ..call import Call, mem_len, with_memory
from . import reference

# Rows of a block, to avoid many small products in narrow windows.
LEAST_ROWS = 64


def rel_attention(call: Call) -> tuple[Tensor, Tensor]:
    """Output (B, H, L, D) and log-sum-exp (B, H, L) of a call checked by `call_checks`.

    Raises:
        ValueError: a window with a mask that has a row for each query.
    """
    if call.query_positions is not None or call.dropout_state is not None or call.query.shape[2] != call.key.shape[2]:
        return reference.rel_attention(call)
    return _attend(call, (_Window if _is_window(call) else _EveryPair)(call))


def _is_window(call: Call) -> bool:
    """Whether each query sees a fixed number of keys around its own, fewer than all keys may be."""
    rows, keys = call.rel_key.shape[-2], call.key.shape[2] + mem_len(call)
    if not (isinstance(rows, int) and isinstance(call.max_distance, int) and 0 <= call.max_distance < rows):
        return False
    return not isinstance(keys, int) or _rows_of_block(rows) + rows - 1 < keys


def _rows_of_block(rows: int) -> int:
    """Query rows of a block for a window of `rows` keys; at most a third of its scores are unread."""
    return max(LEAST_ROWS, (rows + 1) // 2)


class _EveryPair:
    """Form with one block of all queries and keys."""

    def __init__(self, call: Call) -> None:
        self.call, self.length, self.memory = call, call.query.shape[2], mem_len(call)
        self.keys = self.memory + self.length
        # First row of rel_key, read by the first key and the last query, and the number of rows from there on.
        self.first, self.distances = call.max_distance - (self.keys - 1), self.length + self.keys - 1
        self.before = 0 if self.first > 0 else -self.first
        self.after = self.first + self.distances - call.rel_key.shape[-2]
        self.is_whole = not self.before and not self.after

    def of_queries(self, x: Tensor) -> Tensor:
        """(b, h, L, n) -> (b, h, 1, L, n)."""
        return x[:, :, None]

    def of_keys(self, x: Tensor, fill: int = 0) -> Tensor:
        """(b, h, M + K, n) -> (b, h, 1, M + K, n)."""
        return x[:, :, None]

    def of_mask(self, mask: Tensor) -> Tensor:
        """(b, h, l, t) -> (b, h, 1, l, t)."""
        return mask[:, :, None]

    def join(self, x: Tensor) -> Tensor:
        """(b, h, 1, L, n) -> (b, h, L, n)."""
        return x[:, :, 0]

    def row_of_pair(self) -> Tensor:
        """(L, M + K), the row of rel_key that encodes the distance of each pair."""
        query, key = (torch.arange(n, device=self.call.query.device) for n in (self.length, self.keys))
        return key - query[:, None] + (self.call.max_distance - self.memory)

    def positional(self) -> Tensor:
        """(B, H, 1, L, M + K) scores of queries and rel_key."""
        rel_key = self.call.rel_key[..., self.first :, :] if self.first > 0 else self.call.rel_key
        # One more row than distances, because the shift drops one number of each query.
        band = _positional(self.call, F.pad(rel_key, (0, 0, self.before, self.after + 1)))
        band = band.flatten(-2).narrow(-1, self.length - 1, self.length * self.distances)
        return band.unflatten(-1, (self.length, self.distances))[:, :, None, :, : self.keys]


class _Window:
    """Form with blocks of `size` queries, each with the `width` keys that its queries see."""

    is_whole = False

    def __init__(self, call: Call) -> None:
        if call.mask is not None and call.mask.shape[-2] != 1:
            raise ValueError(
                f"mask must be a RankMask or have one row for all queries, got shape {tuple(call.mask.shape)}: "
                f'torch.onnx.export makes the window linear in length; backend="reference" takes any mask, and is '
                f"quadratic"
            )
        self.call, self.length = call, call.query.shape[2]
        self.size = _rows_of_block(call.rel_key.shape[-2])
        self.width = self.size + call.rel_key.shape[-2] - 1
        # At least two, the last possibly empty, because tracing takes a dimension of 1 for one that is always 1.
        self.blocks = (self.length - 1) // self.size + 2
        self.of_one = (self.width + self.size - 1) // self.size  # blocks of keys read by a block of queries

    def of_queries(self, x: Tensor) -> Tensor:
        """(b, h, L, n) -> (b, h, blocks, size, n)."""
        rows = self.blocks * self.size
        return F.pad(x, (0, 0, 0, rows - self.length)).unflatten(2, (self.blocks, self.size))

    def of_keys(self, x: Tensor, fill: int = 0) -> Tensor:
        """(b, h, M + K, n) -> (b, h, blocks, width, n), `fill` where there is no key."""
        before, blocks = self.call.max_distance, self.blocks + self.of_one - 1
        rows = blocks * self.size
        x = F.pad(x, (0, 0, before, rows - before - self.length), value=fill)
        x = x.narrow(2, mem_len(self.call), rows).unflatten(2, (blocks, self.size))
        return torch.cat([x.narrow(2, at, self.blocks) for at in range(self.of_one)], 3)[..., : self.width, :]

    def of_mask(self, mask: Tensor) -> Tensor:
        """(b, h, 1, t) -> (b, h, blocks, 1, width)."""
        keys = self.length + mem_len(self.call)
        return self.of_keys(mask.expand(-1, -1, -1, keys).mT).mT

    def join(self, x: Tensor) -> Tensor:
        """(b, h, blocks, size, n) -> (b, h, L, n)."""
        return x.flatten(2, 3).narrow(2, 0, self.length)

    def row_of_pair(self) -> Tensor:
        """(size, width), the row of rel_key that encodes the distance of each pair."""
        query, key = (torch.arange(n, device=self.call.query.device) for n in (self.size, self.width))
        return key - query[:, None]

    def positional(self) -> Tensor:
        """(B, H, blocks, size, width) scores of queries and rel_key."""
        band = self.of_queries(F.pad(_positional(self.call, self.call.rel_key), (0, self.size)))
        return band.flatten(-2)[..., : self.size * self.width].unflatten(-1, (self.size, self.width))


def _attend(call: Call, form: _EveryPair | _Window) -> tuple[Tensor, Tensor]:
    key, value = form.of_keys(with_memory(call.memory_key, call.key)), with_memory(call.memory_value, call.value)
    value = form.of_keys(value)
    score = form.of_queries(_with_bias(call, call.content_bias)) @ key.mT + form.positional()
    same: Tensor | float = 0.0
    if call.segment_embed is not None and call.query_ids is not None and call.key_ids is not None:
        by_kind = _with_bias(call, call.segment_bias) @ call.segment_embed.permute(1, 2, 0)  # (B, H, L, 2)
        different = form.of_queries(_column(call.query_ids)) != form.of_keys(_column(call.key_ids)).mT
        # A term common to all keys of a query is left out, because it does not change the softmax.
        score = score + torch.where(different, form.of_queries(by_kind[..., 1:] - by_kind[..., :1]), 0.0)
        same = by_kind[..., 0]

    visible = _visible(call, form)
    has_masked_rows = visible is not None and (
        call.mask is not None or call.key_rank is not None or not 0 <= call.max_distance < call.rel_key.shape[-2]
    )
    if visible is not None:
        score = torch.where(visible, score, -torch.inf)
    out = score.softmax(-1)
    if has_masked_rows:
        assert visible is not None
        value = torch.where(visible.any(-2)[..., None], value, 0.0)  # zero times NaN would be NaN
        out = torch.where(visible.any(-1, keepdim=True), out @ value, 0.0)
    else:
        out = out @ value
    wide = score.to(torch.promote_types(score.dtype, torch.float32))
    lse = form.join(wide.logsumexp(-1, keepdim=True))[..., 0] + same
    return form.join(out), lse


def _visible(call: Call, form: _EveryPair | _Window) -> Tensor | None:
    """Mask of visible pairs, broadcastable to the scores; None for all."""
    found = []
    if call.query_rank is not None and call.key_rank is not None:
        rank, own = form.of_keys(_column(call.key_rank), HIGHEST).mT, form.of_queries(_column(call.query_rank))
        sees = rank < own
        if call.query_floor is not None:
            sees = sees & (rank >= form.of_queries(_column(call.query_floor)))
        if call.sees_self is not None:
            is_own = form.row_of_pair() == call.max_distance
            sees = sees | (is_own & form.of_queries(_column(call.sees_self)))
        found.append(sees)
    elif call.mask is not None:
        found.append(form.of_mask(call.mask))
    # Because a window has places for keys before the first and after the last.
    elif isinstance(form, _Window):
        keys = torch.ones(1, 1, call.key.shape[2] + mem_len(call), 1, dtype=torch.bool, device=call.key.device)
        found.append(form.of_keys(keys).mT)
    if not form.is_whole:
        row = form.row_of_pair()
        found.append((row >= 0) & (row < call.rel_key.shape[-2]))
    return functools.reduce(torch.logical_and, found) if found else None


def _column(x: Tensor) -> Tensor:
    """(b, n) -> (b, 1, n, 1)."""
    return x[:, None, :, None]


def _with_bias(call: Call, bias: Tensor | None) -> Tensor:
    """Query rows and a bias (H, D), scaled."""
    return (call.query if bias is None else call.query + bias[:, None]) * call.scale


def _positional(call: Call, rel_key: Tensor) -> Tensor:
    """(B, H, L, P) scores of queries and all rows of a table."""
    return _with_bias(call, call.position_bias) @ rel_key.mT
