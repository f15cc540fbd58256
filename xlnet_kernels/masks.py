"""RankMask: permutation, causal, padding and window masks as three integer vectors instead of an L x K matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._checks import check_matrix, check_range
from ._ranks import (
    HIGHEST,
    LOWEST,
    as_ranks,
    check_count,
    check_flags,
    check_integers,
    check_sizes,
    hide,
    hide_first,
    hide_segment,
    no_token,
    own_key,
    positions_of,
    ranks_of_documents,
    ranks_see,
    steps_of,
    stream_sees_self,
    warn_of_inversion,
    with_memory,
)
from ._torch import register

__all__ = ["HIGHEST", "LOWEST", "RankMask"]


@register
@dataclass(frozen=True, eq=False)
class RankMask:
    """Mask where query i sees key j iff ``query_floor[i] <= key_rank[j] < query_rank[i]``, or sees itself.

    This is XLNet's ``perm_mask`` rule (Yang et al. 2019, section 2.2; ``key_rank = rev``, ``query_rank = self_rev`` in
    the original code) with two vectors of length L and M + K in place of the L x (M + K) matrix.

    Args:
        query_rank: (B, L) integers.
        key_rank: (B, M + K) integers; memory first, then the current segment.
        query_floor: (B, L) integers or None for no lower bound.
        sees_self: whether a query row sees the key at its own position regardless of ranks; a bool, or (B, L) bool
            where rows of both streams are stacked.
        one_stream: whether the ranks show rows the key at their own position, as those of `padding`, `full`, `local`,
            `chunked` and `packed` do. A query stream must not see its token: layers and models with a query stream hide
            the keys at its target positions from every other row (`hide_targets`), because a later layer would leak
            them. False: ranks apply unchanged, in both streams.

    Ranks are kept as int32; values beyond its range are clamped to it. A first dimension of 1 serves every batch.

    Raises:
        ValueError: a tensor has the wrong rank, dtype or size.

    >>> RankMask.causal(1, 3).to_bool().int().tolist()
    [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    """

    query_rank: Tensor
    key_rank: Tensor
    query_floor: Tensor | None = None
    sees_self: bool | Tensor = False
    one_stream: bool = False

    def __post_init__(self) -> None:
        for name in ("query_rank", "key_rank", "query_floor"):
            rank = getattr(self, name)
            if rank is not None or name != "query_floor":
                object.__setattr__(self, name, as_ranks(name, rank))
        rows = tuple(self.query_rank.shape)
        if self.query_floor is not None and tuple(self.query_floor.shape) != rows:
            raise ValueError(
                f"RankMask: query_floor must have query_rank's shape {rows}, got {tuple(self.query_floor.shape)}"
            )
        if not isinstance(self.sees_self, (bool, Tensor)):
            got = type(self.sees_self).__name__
            raise ValueError(f"RankMask: sees_self must be a bool or a bool tensor of query_rank's shape, got {got}")
        if isinstance(self.sees_self, Tensor):
            check_flags("sees_self", self.sees_self, rows)
        if not isinstance(self.one_stream, bool):
            raise ValueError(f"RankMask: one_stream must be a bool, got {type(self.one_stream).__name__}")
        if self.key_rank.shape[0] != rows[0]:
            raise ValueError(
                f"RankMask: key_rank must have query_rank's batch size {rows[0]}, got {self.key_rank.shape[0]}"
            )

    @classmethod
    def from_order(
        cls,
        steps: Tensor | None = None,
        targets: Tensor | None = None,
        padding: Tensor | None = None,
        mem_len: int = 0,
        sees_self: bool = False,
        *,
        sequence: Tensor | None = None,
    ) -> RankMask:
        """The permutation-LM mask (of the query stream) for one factorisation order per sequence.

        Context positions (not in `targets`) and memory are visible to all rows; a target is visible to later targets in
        the order.

        Args:
            steps: (B, L) integers, the step at which the factorisation reaches each position (0 first). Equal steps do
                not see each other.
            sequence: instead of steps, (B, L) integers, the positions in the order in which they are visited:
                ``steps = sequence.argsort(1)``.
            targets: (B, L) bool, True where a token is predicted; None: all of them.
            padding: (B, L) bool, True where there is no token; hidden from all rows. For padding in memory see
                `hide_memory`.
            mem_len: M, number of memory positions before the segment.
        """
        if (steps is None) == (sequence is None):
            raise ValueError("RankMask.from_order: give steps (when a position is visited) or the sequence of visits")
        if sequence is not None:
            steps = steps_of(sequence)
        order = as_ranks("steps", steps)
        for name, flags in (("targets", targets), ("padding", padding)):
            if flags is not None:
                check_flags(name, flags, tuple(order.shape))
        if targets is None:
            query_rank, key_rank = order, order
        else:
            # Context keys rank below every step; context rows see just those (rev = -1, self_rev = 0 in the original).
            query_rank = torch.where(targets, order, torch.zeros_like(order))
            key_rank = torch.where(targets, order, torch.full_like(order, LOWEST))
        return cls(query_rank, with_memory(hide(key_rank, padding), mem_len), sees_self=sees_self)

    @classmethod
    def causal(
        cls,
        batch: int,
        length: int,
        mem_len: int = 0,
        window: int | None = None,
        padding: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> RankMask:
        """Causal mask: each position sees itself and earlier keys, memory included; at most `window` keys if given.

        The query stream of this mask sees earlier keys only.

        Args:
            window: the number of keys that a row sees, its own included.
            padding: (B, L) bool, True where there is no token; hidden from all other rows. The content row of padding
                sees its own key, so its output is no zero. For padding in memory see `hide_memory`.
        """
        check_sizes(batch, length, mem_len)
        if window is not None:
            check_count("window", window, 1)
        query_rank = positions_of(batch, 0, length, device)
        key_rank = hide_segment(positions_of(batch, -mem_len, length, device), padding, mem_len)
        floor = None if window is None else query_rank - (window - 1)
        return cls(query_rank, key_rank, floor, sees_self=True)

    @classmethod
    def local(
        cls,
        batch: int,
        length: int,
        left: int | None,
        right: int | None,
        mem_len: int = 0,
        padding: Tensor | None = None,
        global_positions: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> RankMask:
        """Window mask: each position sees `left` keys before it, itself and `right` keys after it; None: all.

        Memory is before the segment. With ``right=0`` this is `causal` with a window. With more, it is a mask of
        `one_stream`.

        Args:
            padding: (B, L) bool, True where there is no token; hidden from all rows.
            global_positions: (B, G) integers, positions that see all keys and that all rows see. They need
                ``left=None``, because ranks cannot show one key through every window. Otherwise make two calls and
                add them by their log-sum-exps (docs/how-to/masks.md).

        Raises:
            ValueError: a count is negative, or global positions are given with `left`.

        >>> RankMask.local(1, 4, left=2, right=1).to_bool().int().tolist()
        [[[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1]]]
        """
        check_sizes(batch, length, mem_len)
        for name, count in (("left", left), ("right", right)):
            if count is not None:
                check_count(name, count)
        if global_positions is None and right == 0:
            return cls.causal(batch, length, mem_len, None if left is None else left + 1, padding, device)
        position = positions_of(batch, 0, length, device)
        query_rank = torch.full_like(position, HIGHEST) if right is None else position + (right + 1)
        key_rank = positions_of(batch, -mem_len, length, device)
        if global_positions is not None:
            if left is not None:
                raise ValueError(
                    "RankMask: global_positions need left=None, since ranks cannot show one key through every window; "
                    "docs/how-to/masks.md has what can: two calls, added by their log-sum-exps"
                )
            index = check_integers("global_positions", global_positions).long()
            query_rank = query_rank.scatter(1, index, HIGHEST)
            key_rank = key_rank.scatter(1, index + mem_len, LOWEST)
        floor = None if left is None else position - left
        return cls(query_rank, hide_segment(key_rank, padding, mem_len), floor, one_stream=True)

    @classmethod
    def chunked(
        cls,
        batch: int,
        length: int,
        chunk: int,
        left_chunks: int | None = None,
        mem_len: int = 0,
        padding: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> RankMask:
        """Chunk mask: each position sees its whole chunk and `left_chunks` chunks before it; None: all.

        NeMo's chunked-limited look-ahead with att_context_size [left, right] has ``chunk = right + 1`` and
        ``left_chunks = left // chunk``. Chunks are counted from the segment's first position; memory is in earlier
        chunks. It is a mask of `one_stream`.

        Args:
            padding: (B, L) bool, True where there is no token; hidden from all rows.

        >>> RankMask.chunked(1, 5, chunk=2, left_chunks=1).to_bool().int().tolist()[0]
        [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
        """
        check_sizes(batch, length, mem_len)
        check_count("chunk", chunk, 1)
        if left_chunks is not None:
            check_count("left_chunks", left_chunks)
        own = positions_of(batch, 0, length, device).div(chunk, rounding_mode="floor")
        key_rank = positions_of(batch, -mem_len, length, device).div(chunk, rounding_mode="floor")
        floor = None if left_chunks is None else own - left_chunks
        return cls(own + 1, hide_segment(key_rank, padding, mem_len), floor, one_stream=True)

    @classmethod
    def packed(cls, document_ids: Tensor, causal: bool = False, padding: Tensor | None = None) -> RankMask:
        """Mask for several documents in one row: each position sees its own document only, if `causal` up to itself.

        No other change is needed, because distances inside a document do not depend on its place in the row.

        Args:
            document_ids: (B, L) integers, equal within a document. A document need not be in one piece.
            causal: the query stream of the mask then sees earlier keys only. Otherwise it is a mask of `one_stream`.
            padding: (B, L) bool, True where there is no token; hidden from all rows.

        >>> RankMask.packed(torch.tensor([[7, 7, 7, 2, 2]]), causal=True).to_bool().int().tolist()[0]
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
        """
        place, first, end = ranks_of_documents(document_ids)
        key_rank = hide_segment(place, padding, 0)
        return cls(place if causal else end, key_rank, first, sees_self=causal, one_stream=not causal)

    @classmethod
    def padding(
        cls, padding: Tensor | None = None, mem_len: int = 0, *, attention_mask: Tensor | None = None
    ) -> RankMask:
        """Padding mask: all rows see all keys but padding; a mask of `one_stream`.

        Args:
            padding: (B, L) bool, True where there is no token. On a CPU there is a warning where all of a sequence is
                padding, because it may be an attention_mask.
            attention_mask: instead of padding, (B, L) bool or integers as tokenizers give it, 1 or True = token.
        """
        if (padding is None) == (attention_mask is None):
            raise ValueError("RankMask.padding: give padding (True = no token) or attention_mask (1 = token)")
        if attention_mask is not None:
            padding = no_token(attention_mask)
        else:
            padding = check_flags("padding", padding)
            warn_of_inversion(padding)
        key_rank = torch.full(padding.shape, LOWEST, dtype=torch.int32, device=padding.device)
        return cls(torch.zeros_like(key_rank), with_memory(hide(key_rank, padding), mem_len), one_stream=True)

    @classmethod
    def full(cls, batch: int, length: int, mem_len: int = 0, device: torch.device | str | None = None) -> RankMask:
        """Full mask: all rows see all keys; a mask of `one_stream`."""
        seen = torch.ones(batch, length, dtype=torch.bool, device=device)
        return cls.padding(attention_mask=seen, mem_len=mem_len)

    def expand(self, batch: int) -> RankMask:
        """This mask for `batch` sequences, from a mask of one or `batch` sequences."""
        if self.query_rank.shape[0] == batch:
            return self
        if self.query_rank.shape[0] != 1:
            raise ValueError(f"RankMask: batch must be {self.query_rank.shape[0]}, the mask's own, got {batch}")
        return self._map(lambda values: values.expand(batch, -1))

    def rows(self, positions: Tensor) -> RankMask:
        """The mask of the query rows at `positions` (B, N), in that order."""
        check_range("RankMask: positions", check_matrix("RankMask: positions", positions), 0, self.query_rank.shape[1])
        mask, index = self.expand(positions.shape[0]), positions.long()
        floor, sees_self = mask.query_floor, mask.sees_self
        return RankMask(
            mask.query_rank.gather(1, index),
            mask.key_rank,
            None if floor is None else floor.gather(1, index),
            sees_self.gather(1, index) if isinstance(sees_self, Tensor) else sees_self,
            mask.one_stream,
        )

    def rows_from(self, first: int) -> RankMask:
        """The mask of the query rows from number `first` on."""
        batch, rows = self.query_rank.shape
        return self.rows(torch.arange(first, rows, device=self.query_rank.device).expand(batch, -1))

    def contiguous(self) -> RankMask:
        """This mask with contiguous vectors, because kernels copy others in every call."""
        return self._map(lambda values: values.contiguous())

    def to(self, device: torch.device | str) -> RankMask:
        """This mask on `device`."""
        return self._map(lambda values: values.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> RankMask:
        floor, own = self.query_floor, self.sees_self
        return RankMask(
            change(self.query_rank),
            change(self.key_rank),
            None if floor is None else change(floor),
            change(own) if isinstance(own, Tensor) else own,
            self.one_stream,
        )

    def hide_targets(self, targets: Tensor) -> RankMask:
        """The mask for two streams: keys where `targets` is True are hidden, except from their own content rows.

        Args:
            targets: (B, L) bool, True where a token is predicted, of the last L keys.

        >>> RankMask.full(1, 3).hide_targets(torch.tensor([[False, True, False]])).to_bool("query").int().tolist()
        [[[1, 0, 1], [1, 0, 1], [1, 0, 1]]]
        """
        batch, length = check_flags("targets", targets).shape
        mask = self.expand(batch)
        key_rank = hide_segment(mask.key_rank, targets, mask.key_rank.shape[1] - length)
        return RankMask(mask.query_rank, key_rank, mask.query_floor, mask.sees_self)

    def hide_memory(self, padding: Tensor) -> RankMask:
        """The mask without keys of memory that are padding. `padding` of the other masks is of the segment only.

        Args:
            padding: (B, M) bool, True where the memory, the first M keys, has no token.

        >>> RankMask.causal(1, 2, mem_len=2).hide_memory(torch.tensor([[True, False]])).to_bool().int().tolist()
        [[[0, 1, 1, 0], [0, 1, 1, 1]]]
        """
        mask = self.expand(check_flags("padding", padding).shape[0])
        return replace(mask, key_rank=hide_first(mask.key_rank, padding))

    def for_stream(self, stream: str) -> RankMask:
        """This mask's ranks for the "content" stream (sees itself) or the "query" stream (does not).

        Raises:
            ValueError: the mask is of `one_stream`, whose ranks show a query row its own token.
        """
        sees_self = stream_sees_self(stream)
        if self.one_stream and not sees_self:
            raise ValueError(
                "RankMask: these ranks show a query row its own token: give mask.hide_targets(targets).for_stream(...)"
            )
        return self.seeing_self(sees_self)

    def seeing_self(self, sees_self: bool | Tensor) -> RankMask:
        """This mask's ranks with another `sees_self`."""
        return RankMask(self.query_rank, self.key_rank, self.query_floor, sees_self, self.one_stream)

    def to_bool(
        self, stream: str | None = None, query_positions: Tensor | None = None, mem_len: int | None = None
    ) -> Tensor:
        """The equivalent dense (B, L, M + K) bool mask, True = may attend.

        Args:
            stream: "content" (sees itself), "query" (does not), or None for `sees_self`. For a mask of `one_stream`,
                "query" hides each row's own key; `hide_targets` hides other targets.
            query_positions: (B, L) position of each row in the current segment; default 0 .. L-1.
            mem_len: M; default (M + K) - L, right where the rows are the whole segment.
        """
        sees_self = self.sees_self if stream is None else stream_sees_self(stream)
        hides_self = self.one_stream and stream == "query"
        visible = ranks_see(self.query_rank, self.key_rank, self.query_floor)
        if sees_self is False and not hides_self:
            return visible
        length, keys = self.query_rank.shape[1], self.key_rank.shape[1]
        if query_positions is None:
            query_positions = torch.arange(length, device=visible.device)[None]
        own = own_key(query_positions, keys - length if mem_len is None else mem_len, keys)
        if hides_self:
            return visible & ~own
        return visible | (own & sees_self[:, :, None] if isinstance(sees_self, Tensor) else own)
