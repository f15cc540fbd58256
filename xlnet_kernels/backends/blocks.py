"""Blocks of query rows: the split of a call into blocks, and their scores in plain torch operators.

Each block holds its rows' scores against the keys that they can see; no other part of the L x (M + K) map is stored.
The relative shift is a view (docs/math.md, *The shift is an address*). The band of m rows and n keys has rows of m + n
- 1 numbers. The same memory from element m - 1 on, with rows shorter by 1, holds the shifted scores. Rows with
`query_positions` gather their scores from the band instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _environment
from .._checks import readable
from ..call import INPUT_NAMES, positions_by_row
from ..dropout import keep_block
from ..ops import check_segments_are_whole

BUDGET = 128 * 2**20
LARGEST = 2.0**50  # bound of inputs for which sums over head_dim of products are finite
MOST_ROWS = 128  # a band of m rows and n keys is m - 1 columns wider than its scores


def budget() -> int:
    """Bytes that the temporaries of one block may take."""
    wish = _environment.read("XLNET_KERNELS_BLOCK_BYTES", lambda text: text.isdecimal() and int(text) > 0)
    return int(wish) if wish else BUDGET


class BlockedCall:
    """The operator's tensors by name, with sizes derived from their shapes."""

    def __init__(self, inputs) -> None:
        self.tensors = dict(zip(INPUT_NAMES, inputs, strict=False))
        check_segments_are_whole(self.tensors)
        self.max_distance, self.dropout_p, self.scale, *_ = inputs[len(INPUT_NAMES) :]
        self.query: Tensor = self.tensors["query"]
        self.dtype = torch.promote_types(self.query.dtype, torch.float32)
        self.batch, self.heads, self.length, self.width = self.query.shape
        memory_key = self.tensors["memory_key"]
        self.mem_len = 0 if memory_key is None else memory_key.shape[2]
        self.keys = self.mem_len + self.tensors["key"].shape[2]
        self.rel_len = self.tensors["rel_key"].shape[-2]
        # Values are read on the CPU only, because elsewhere the host would wait for the device.
        self.reads = self.query.device.type == "cpu" and readable(self.query)
        self._scratch: dict[str, Tensor] = {}

    def scratch(self, name: str, *shape: int) -> Tensor:
        """Uninitialised memory in the dtype of the scores, shared by all blocks.

        Shared because new memory for each block would cost more than its products: the system clears new pages.
        """
        count = math.prod(shape)
        found = self._scratch.get(name)
        if found is None or len(found) < count:
            found = self._scratch[name] = self.query.new_empty(count, dtype=self.dtype)
        return found[:count].view(shape)

    def is_bounded(self, *tensors: Tensor | None) -> bool:
        """Whether all numbers are known to be finite, and small enough for finite products."""
        present = [x for x in tensors if x is not None and x.numel()]
        return self.reads and all(-LARGEST < low and high < LARGEST for low, high in map(torch.aminmax, present))

    @functools.cached_property
    def positions(self) -> Tensor | None:
        """(B, L) int64, the position of each row; None for 0 .. L-1."""
        position = positions_by_row(self.tensors["query_positions"], self.tensors["query_order"])
        return None if position is None else position.long()

    def blocks(self, backward: bool = False) -> Iterator[Block]:
        """The call's blocks within the budget, part by part; parts with equal heads are consecutive."""
        if not self.query.numel():
            return
        rows, heads, batch = self.block_shape(budget(), backward)
        for h in range(0, self.heads, heads):
            for b in range(0, self.batch, batch):
                part = Part(self, slice(b, min(b + batch, self.batch)), slice(h, min(h + heads, self.heads)), rows)
                yield from part.blocks()

    def block_shape(self, limit: int, backward: bool) -> tuple[int, int, int]:
        """Number of rows of a block, and of heads and sequences of a part, for temporaries of at most `limit` bytes."""
        rows = min(self.length, MOST_ROWS)
        a_head, a_row = self._bytes_of_a_head(backward), self._bytes_of_a_row(rows, backward)
        # bytes of a row shared by all heads: masks, or indices, which still exist for the last block when the next
        # begins
        shared = (8 if self.positions is None else 40) * self.keys
        heads = max(1, min(self.heads, (limit - rows * shared) // (a_head + rows * a_row)))
        a_sequence = heads * (a_head + rows * a_row) + rows * shared
        batch = max(1, min(self.batch, limit // a_sequence)) if heads == self.heads else 1
        return max(1, min(rows, (limit - a_head) // (a_row + shared))) if heads == 1 else rows, heads, batch

    def _bytes_of_a_row(self, rows: int, backward: bool) -> int:
        """Bytes of a block's maps for one row of one head."""
        keys = min(self.keys, self.rel_len + rows)
        band = keys + rows
        if self.positions is not None:
            band = min(self.rel_len, self.keys + self.length) + 1
        floats = 2 * keys + band  # scores, probabilities, the band
        if backward:
            floats += keys
        found = self.dtype.itemsize * (floats + (keys if self.positions is not None else band))  # shifted, or padded
        if self.dropout_p:
            found += (28 + self.dtype.itemsize * backward) * keys  # the generator's integers
        return found

    def _bytes_of_a_head(self, backward: bool) -> int:
        """Bytes of one head's copied keys, values and rows of rel_key, and of sums in the scores' dtype."""
        is_cast = self.query.dtype != self.dtype
        keys = self.keys - self.mem_len
        current = [self.tensors[name] for name in ("key", "value")]
        copied = 2 * self.keys if is_cast or self.mem_len else sum(keys for x in current if not x.is_contiguous())
        copied += self.rel_len if is_cast else 0
        summed = 2 * self.keys + self.rel_len if is_cast and backward else 0
        return self.dtype.itemsize * self.width * (copied + summed)


class Part:
    """Part of a call: some sequences and heads, with contiguous keys in the dtype of the scores."""

    def __init__(self, call: BlockedCall, batch: slice, heads: slice, rows: int) -> None:
        self.call, self.batch, self.heads, self.rows = call, batch, heads, rows
        self.key = self._joined("memory_key", "key")
        self.value = self._joined("memory_value", "value")
        rel_key = call.tensors["rel_key"]
        self.rel_key = (rel_key[heads] if rel_key.dim() == 3 else rel_key[batch, heads]).to(call.dtype)
        self.content_bias, self.position_bias, self.segment_bias = (
            self._of_heads(name) for name in ("content_bias", "position_bias", "segment_bias")
        )
        embed = call.tensors["segment_embed"]
        self.embed = None if embed is None else embed[:, heads].to(call.dtype)
        biases = self.content_bias, self.position_bias, self.segment_bias
        self.is_bounded = call.is_bounded(
            call.query[batch, heads], self.key, self.value, self.rel_key, self.embed, *biases
        )

    def _joined(self, memory: str, current: str) -> Tensor:
        names = (memory, current) if self.call.mem_len else (current,)
        found = [self.call.tensors[name][self.batch, self.heads].to(self.call.dtype) for name in names]
        return torch.cat(found, 2) if len(found) > 1 else found[0].contiguous()

    def _of_heads(self, name: str) -> Tensor | None:
        bias = self.call.tensors[name]
        return None if bias is None else bias[self.heads].to(self.call.dtype)[:, None]

    def blocks(self) -> Iterator[Block]:
        for first in range(0, self.call.length, self.rows):
            rows = slice(first, min(first + self.rows, self.call.length))
            yield Block(self, rows, *self._seen(rows))

    def _seen(self, rows: slice) -> tuple[slice, Tensor | None]:
        """Bounds of the keys that the rows can see, found without waiting for the device, and positions."""
        call = self.call
        position = None if call.positions is None else call.positions[self.batch, rows]
        low, high = rows.start, rows.stop - 1
        if position is not None:
            low, high = map(int, position.aminmax()) if call.reads else (0, call.keys - call.mem_len - 1)
        first = max(0, low + call.mem_len - call.max_distance)
        end = min(call.keys, high + call.mem_len - call.max_distance + call.rel_len)
        rank = call.tensors["key_rank"]
        if rank is not None and call.reads and first < end:
            rank = rank[self.batch, first:end]
            seen = rank < call.tensors["query_rank"][self.batch, rows].amax(1, keepdim=True)
            floor, own = call.tensors["query_floor"], call.tensors["sees_self"]
            if floor is not None:
                seen &= rank >= floor[self.batch, rows].amin(1, keepdim=True)
            found = seen.any(0).nonzero()[:, 0] + first
            bounds = [(int(found[0]), int(found[-1]) + 1)] if len(found) else []
            if own is not None and bool(own[self.batch, rows].any()):
                bounds.append((low + call.mem_len, high + call.mem_len + 1))
            first = max(first, min((least for least, _ in bounds), default=end))
            end = min(end, max((most for _, most in bounds), default=first))
        return slice(first, max(first, end)), position


class Block:
    """Block of some rows of a part and the keys that they can see."""

    def __init__(self, part: Part, rows: slice, keys: slice, position: Tensor | None) -> None:
        self.part, self.call, self.rows, self.span, self.position = part, part.call, rows, keys, position
        self.length, self.keys = rows.stop - rows.start, keys.stop - keys.start
        self.index = (part.batch, part.heads, rows)
        query = self.call.query[self.index].to(self.call.dtype)
        self.content, self.positional, self.segmental = (
            (query if bias is None else query + bias) * self.call.scale
            for bias in (part.content_bias, part.position_bias, part.segment_bias)
        )
        self.key, self.value = part.key[:, :, keys], part.value[:, :, keys]
        # Rows of rel_key, beginning with that of the first key and the last row; some may lie outside of the table.
        last = rows.stop - 1
        first_row = self.call.max_distance - self.call.mem_len + keys.start - last
        self.window = slice(first_row, first_row + self.keys + self.length - 1)
        if position is not None:
            self.window = slice(0, self.call.rel_len)
            if self.call.reads and position.numel():
                low, high = map(int, position.aminmax())
                at = self.call.max_distance - self.call.mem_len + keys.start
                self.window = slice(at - high, at - low + self.keys)
        self.table = slice(max(0, self.window.start), max(0, min(self.call.rel_len, self.window.stop)))
        self.table = slice(min(self.table.start, self.table.stop), self.table.stop)
        self.rel_key = part.rel_key[..., self.table, :]  # (h, rows, D) or (b, h, rows, D), without missing rows
        if self.keys and not part.is_bounded and self.hidden is not None:
            self._leave_out_unread(self.hidden)

    @functools.cached_property
    def row_of_pair(self) -> Tensor:
        """(b, 1, m, n), the place in `table` of each pair's row; its size where the table has none."""
        at = self.call.max_distance - self.call.mem_len + self.span.start - self.table.start
        key = torch.arange(self.keys, device=self.content.device)
        row = key + (at - self.position)[:, None, :, None]
        size = self.table.stop - self.table.start
        return torch.where((row >= 0) & (row < size), row, size)

    def scores(self) -> Tensor:
        """(b, h, m, n) scaled scores, without the segment term of the same segment; -inf where invisible."""
        if not self.keys:
            return self.content.new_empty(*self.content.shape[:3], 0)
        score = self.call.scratch("score", *self.content.shape[:3], self.keys)
        torch.matmul(self.content, self.key.mT, out=score)
        score += self._shifted(self._band())
        if self.part.embed is not None:
            step = (self.segmental * (self.part.embed[1] - self.part.embed[0])[:, None]).sum(-1)[..., None]
            if self.part.is_bounded:
                score.addcmul_(self.different.to(score.dtype), step)
            else:
                score += torch.where(self.different, step, 0)
        if self.hidden is None:
            return score
        # clamp_max is allowed, because there is no NaN to keep, and a CPU vectorises it.
        if self.part.is_bounded:
            return score.clamp_max_(torch.where(self.hidden, -torch.inf, torch.inf))
        return score.masked_fill_(self.hidden, -torch.inf)

    def _band(self) -> Tensor:
        """(b, h, m, rows of the window), 0 where the table has no row."""
        width = self.rel_key.shape[-2]
        if self.rel_key.dim() == 4:
            band = self.call.scratch("band", *self.positional.shape[:3], width)
            torch.matmul(self.positional, self.rel_key.mT, out=band)
        else:  # one table for all sequences, whose rows form one matrix
            rows = self.positional.transpose(0, 1).flatten(1, 2)
            band = self.call.scratch("band", *rows.shape[:2], width)
            torch.matmul(rows, self.rel_key.mT, out=band)
            band = band.unflatten(1, (-1, self.length)).transpose(0, 1)
        if self.position is not None:
            return band
        missing = self.table.start - self.window.start, self.window.stop - self.table.stop
        return F.pad(band, missing) if any(missing) else band

    def _shifted(self, band: Tensor) -> Tensor:
        """The band's scores (b, h, m, n) by key: a view of it, or gathered by positions."""
        if self.position is not None:
            if not band.shape[-1]:
                return band.new_zeros(*band.shape[:3], self.keys)
            # Pairs without a row get an arbitrary one, because they are hidden.
            row = self.row_of_pair.clamp_max(band.shape[-1] - 1)
            return band.gather(-1, row.expand(-1, band.shape[1], -1, -1))
        return by_key(band, self.keys)

    @functools.cached_property
    def different(self) -> Tensor:
        """(b, 1, m, n), True where query and key are in different segments."""
        tensors, batch = self.call.tensors, self.part.batch
        query_ids = tensors["query_ids"][batch, None, self.rows, None]
        return query_ids != tensors["key_ids"][batch, None, None, self.span]

    @functools.cached_property
    def same(self) -> Tensor | float:
        """(b, h, m), the segment term of the same segment, which is constant in a row."""
        if self.part.embed is None:
            return 0.0
        return (self.segmental * self.part.embed[0][:, None]).sum(-1)

    @functools.cached_property
    def hidden(self) -> Tensor | None:
        """Mask of invisible pairs, broadcastable to (b, h, m, n); None: none."""
        found = [hidden for hidden in (self._outside_of_table(), self._hidden_by_mask()) if hidden is not None]
        return functools.reduce(torch.logical_or, found) if found else None

    @functools.cached_property
    def masked_rows(self) -> Tensor | None:
        """Mask of fully masked rows, broadcastable to (b, h, m); None: none."""
        if self.hidden is None:
            return None
        found = self.hidden.all(-1)
        return None if self.call.reads and not found.any() else found

    def zero_masked_rows(self, rows: Tensor) -> Tensor:
        """Zero fully masked rows (b, h, m, D) in place, because a key that other rows see may have made them NaN."""
        return rows if self.masked_rows is None else rows.masked_fill_(self.masked_rows[..., None], 0)

    def leave_out_rows(self, rows: Tensor) -> None:
        """Zero fully masked rows (b, h, m), because a NaN in a fully masked query must reach no gradient."""
        self.content, self.positional, self.segmental = (
            x.masked_fill(rows[..., None], 0) for x in (self.content, self.positional, self.segmental)
        )

    def _leave_out_unread(self, hidden: Tensor) -> None:
        """Zero unread keys, values and rows of rel_key, because zero times NaN is NaN."""
        unseen = hidden.all(-2)[..., None]
        self.key, self.value = self.key.masked_fill(unseen, 0), self.value.masked_fill(unseen, 0)
        pairs = (*self.content.shape[:3], self.keys)
        unread = self.to_band((~hidden).to(self.content.dtype).expand(pairs)).sum(2) == 0
        unread = unread if self.rel_key.dim() == 4 else unread.all(0)
        self.rel_key = self.rel_key.masked_fill(unread[..., None], 0)

    def _outside_of_table(self) -> Tensor | None:
        """Mask of pairs whose distance has no row in rel_key."""
        size = self.table.stop - self.table.start
        if self.position is not None:
            return self.row_of_pair == size
        if self.table == self.window:
            return None
        row, key = (torch.arange(count, device=self.content.device) for count in (self.length, self.keys))
        at = self.window.start - self.table.start + self.length - 1 - row[:, None] + key
        return (at < 0) | (at >= size)

    def _hidden_by_mask(self) -> Tensor | None:
        tensors, batch = self.call.tensors, self.part.batch
        if tensors["mask"] is not None:
            return ~tensors["mask"][batch, self.part.heads, self.rows, self.span]
        if tensors["key_rank"] is None:
            return None
        rank = tensors["key_rank"][batch, None, None, self.span]
        hidden = rank >= tensors["query_rank"][batch, None, self.rows, None]
        if tensors["query_floor"] is not None:
            hidden |= rank < tensors["query_floor"][batch, None, self.rows, None]
        if tensors["sees_self"] is not None:
            key = torch.arange(self.span.start, self.span.stop, device=rank.device) - self.call.mem_len
            position = self.position
            if position is None:
                position = torch.arange(self.rows.start, self.rows.stop, device=rank.device)[None]
            own = key == position[:, None, :, None]
            hidden &= ~(own & tensors["sees_self"][batch, None, self.rows, None])
        return hidden

    def drop(self, values: Tensor) -> Tensor:
        """`values` (b, h, m, n) after dropout, the kept ones scaled up."""
        state = self.call.tensors["dropout_state"]
        return values if state is None else values * self._kept

    @functools.cached_property
    def _kept(self) -> Tensor:
        state, call = self.call.tensors["dropout_state"], self.call
        kept = keep_block(state, call.heads, *self.index, self.span, call.dropout_p)
        return kept.to(call.dtype).div_(1 - call.dropout_p)

    def to_band(self, grad_score: Tensor) -> Tensor:
        """Gradients of scores (b, h, m, rows of `table`), each at the row of rel_key that its pair reads."""
        sequences, heads = grad_score.shape[:2]
        size = self.table.stop - self.table.start
        if self.position is not None:
            band = self.call.scratch("band", heads, sequences, self.length, size + 1).zero_().transpose(0, 1)
            return band.scatter_(-1, self.row_of_pair.expand_as(grad_score), grad_score)[..., :size]
        width = self.window.stop - self.window.start
        band = self.call.scratch("band", heads, sequences, self.length, width).zero_().transpose(0, 1)
        by_key(band, self.keys).copy_(grad_score)
        return band.narrow(-1, self.table.start - self.window.start, size)


def by_key(band: Tensor, keys: int) -> Tensor:
    """View (b, h, m, n) of a band (b, h, m, n + m - 1) by key.

    Row i begins at element m - 1 - i.
    """
    rows, stride = band.shape[2], band.stride()
    first = band.storage_offset() + rows - 1
    return band.as_strided((*band.shape[:3], keys), (*stride[:2], stride[2] - 1, 1), first)
