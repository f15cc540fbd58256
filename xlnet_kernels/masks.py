"""RankMask: permutation, causal, padding and window masks as three integer vectors instead of an L x K matrix."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import check_matrix, is_integer, readable
from ._torch import register

LOWEST = torch.iinfo(torch.int32).min  # rank of a key that every query sees
HIGHEST = torch.iinfo(torch.int32).max  # rank of a key that no query sees


@register
@dataclass(frozen=True, eq=False)
class RankMask:
    """Query i sees key j iff ``query_floor[i] <= key_rank[j] < query_rank[i]``, or j is its own key and it sees itself.

    This is XLNet's ``perm_mask`` rule (Yang et al. 2019, section 2.2; ``key_rank = rev``, ``query_rank = self_rev`` in
    the original code) with two vectors of length L and M + K in place of the L x (M + K) matrix.

    Args:
        query_rank: (B, L) integers.
        key_rank: (B, M + K) integers; memory first, then the current segment.
        query_floor: (B, L) integers or None for no lower bound.
        sees_self: whether a query row sees the key at its own position whatever the ranks say; a bool, or (B, L) bool
            where rows of both streams are stacked.

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

    def __post_init__(self) -> None:
        for name in ("query_rank", "key_rank", "query_floor"):
            rank = getattr(self, name)
            if rank is None and name == "query_floor":
                continue
            object.__setattr__(self, name, _as_ranks(name, rank))
        rows = tuple(self.query_rank.shape)
        if self.query_floor is not None and tuple(self.query_floor.shape) != rows:
            raise ValueError(
                f"RankMask: query_floor must have query_rank's shape {rows}, got {tuple(self.query_floor.shape)}"
            )
        if not isinstance(self.sees_self, (bool, Tensor)):
            got = type(self.sees_self).__name__
            raise ValueError(f"RankMask: sees_self must be a bool or a bool tensor of query_rank's shape, got {got}")
        if isinstance(self.sees_self, Tensor):
            _check_flags("sees_self", self.sees_self, rows)
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
        """The permutation-LM mask of one factorisation order per sequence (what the query stream sees).

        Context positions (not in `targets`) are seen by everyone; a target is seen by the targets that come later in
        the order. Memory is seen by everyone.

        Args:
            steps: (B, L) integers, the step at which the factorisation reaches each position (0 first). Equal steps do
                not see each other.
            sequence: instead of steps, (B, L) integers, the positions in the order in which they are visited:
                ``steps = sequence.argsort(1)``.
            targets: (B, L) bool, True where a token is predicted; None: all of them.
            padding: (B, L) bool, True where there is no token; no one sees it.
            mem_len: M, number of memory positions before the segment.
        """
        if (steps is None) == (sequence is None):
            raise ValueError("RankMask.from_order: give steps (when a position is visited) or the sequence of visits")
        if sequence is not None:
            steps = _steps_of(sequence)
        order = _as_ranks("steps", steps)
        for name, flags in (("targets", targets), ("padding", padding)):
            if flags is not None:
                _check_flags(name, flags, tuple(order.shape))
        if targets is None:
            query_rank, key_rank = order, order
        else:
            # Context keys rank below every step; context rows see just those (rev = -1, self_rev = 0 in the original).
            query_rank = torch.where(targets, order, torch.zeros_like(order))
            key_rank = torch.where(targets, order, torch.full_like(order, LOWEST))
        return cls(query_rank, _with_memory(_hide(key_rank, padding), mem_len), sees_self=sees_self)

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
        """Each position sees itself and what comes before it, memory included; at most `window` keys if given.

        The query stream of the same mask sees only what comes before.
        """
        for name, count, least in (("batch", batch, 0), ("length", length, 0), ("mem_len", mem_len, 0)):
            _check_count(name, count, least)
        if window is not None:
            _check_count("window", window, 1)
        if padding is not None:
            _check_flags("padding", padding, (batch, length))
        position = torch.arange(length, dtype=torch.int32, device=device)
        key_rank = torch.arange(-mem_len, length, dtype=torch.int32, device=device).expand(batch, -1)
        if padding is not None:
            key_rank = torch.cat([key_rank[:, :mem_len], _hide(key_rank[:, mem_len:], padding)], 1)
        query_rank = position.expand(batch, -1)
        floor = None if window is None else query_rank - (window - 1)
        return cls(query_rank, key_rank, floor, sees_self=True)

    @classmethod
    def padding(
        cls, padding: Tensor | None = None, mem_len: int = 0, *, attention_mask: Tensor | None = None
    ) -> RankMask:
        """Everyone sees every key that is not padding.

        Args:
            padding: (B, L) bool, True where there is no token. On a CPU there is a warning where all of a sequence is
                padding: then it may be an attention_mask.
            attention_mask: instead of padding, (B, L) bool or integers as tokenizers give it, 1 or True = token.
        """
        if (padding is None) == (attention_mask is None):
            raise ValueError("RankMask.padding: give padding (True = no token) or attention_mask (1 = token)")
        if attention_mask is not None:
            padding = _no_token(attention_mask)
        else:
            padding = _check_flags("padding", padding)
            _warn_of_inversion(padding)
        key_rank = torch.full(padding.shape, LOWEST, dtype=torch.int32, device=padding.device)
        return cls(torch.zeros_like(key_rank), _with_memory(_hide(key_rank, padding), mem_len))

    @classmethod
    def full(cls, batch: int, length: int, mem_len: int = 0, device: torch.device | str | None = None) -> RankMask:
        """Everyone sees everything."""
        return cls.padding(torch.zeros(batch, length, dtype=torch.bool, device=device), mem_len)

    def expand(self, batch: int) -> RankMask:
        """The same mask for `batch` sequences, from one or as many."""
        return self._map(lambda values: values.expand(batch, -1))

    def rows(self, positions: Tensor) -> RankMask:
        """The mask of the query rows at `positions` (B, N), in that order."""
        mask, index = self.expand(positions.shape[0]), positions.long()
        return mask._map_rows(lambda values: values.gather(1, index))

    def rows_from(self, first: int) -> RankMask:
        """The mask of the query rows from number `first` on."""
        return self._map_rows(lambda values: values[:, first:])

    def to(self, device: torch.device | str) -> RankMask:
        """The same mask on `device`."""
        return self._map(lambda values: values.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> RankMask:
        floor, own = self.query_floor, self.sees_self
        return RankMask(
            change(self.query_rank),
            change(self.key_rank),
            None if floor is None else change(floor),
            change(own) if isinstance(own, Tensor) else own,
        )

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> RankMask:
        floor, sees_self = self.query_floor, self.sees_self
        return RankMask(
            change(self.query_rank),
            self.key_rank,
            None if floor is None else change(floor),
            change(sees_self) if isinstance(sees_self, Tensor) else sees_self,
        )

    def for_stream(self, stream: str) -> RankMask:
        """The same ranks as the "content" stream (which sees itself too) or the "query" stream (which does not)."""
        if stream not in ("content", "query"):
            raise ValueError(f'RankMask: stream must be "content" or "query", got {stream!r}')
        return self.seeing_self(stream == "content")

    def seeing_self(self, sees_self: bool | Tensor) -> RankMask:
        """The same ranks with another `sees_self`."""
        return RankMask(self.query_rank, self.key_rank, self.query_floor, sees_self)

    def to_bool(
        self, stream: str | None = None, query_positions: Tensor | None = None, mem_len: int | None = None
    ) -> Tensor:
        """The dense (B, L, M + K) bool mask this stands for, True = may attend.

        Args:
            stream: "content" (sees itself), "query" (does not), or None for what `sees_self` says.
            query_positions: (B, L) position of each row in the current segment; default 0 .. L-1.
            mem_len: M; default (M + K) - L, right where the rows are the whole segment.
        """
        if stream is not None:
            return self.for_stream(stream).to_bool(None, query_positions, mem_len)
        visible = self.key_rank[:, None, :] < self.query_rank[:, :, None]
        if self.query_floor is not None:
            visible = visible & (self.key_rank[:, None, :] >= self.query_floor[:, :, None])
        if self.sees_self is False:
            return visible
        length, keys = self.query_rank.shape[1], self.key_rank.shape[1]
        if mem_len is None:
            mem_len = keys - length
        key = torch.arange(keys, device=visible.device)
        if query_positions is None:
            query_positions = torch.arange(length, device=visible.device)[None]
        own = key == (query_positions + mem_len)[:, :, None]
        return visible | (own if self.sees_self is True else own & self.sees_self[:, :, None])


def _as_ranks(name: str, values: Tensor | None) -> Tensor:
    """`values` as int32, clamped to its range."""
    values = check_matrix(f"RankMask: {name}", values)
    if values.dtype not in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"RankMask: {name} must hold integers, got {values.dtype}")
    return values if values.dtype == torch.int32 else values.long().clamp(LOWEST, HIGHEST).int()


def _steps_of(sequence: Tensor) -> Tensor:
    """The step at which each position is visited, of the positions in the order of visits."""
    sequence = _as_ranks("sequence", sequence).long()
    steps = torch.arange(sequence.shape[1], dtype=torch.int32, device=sequence.device).expand_as(sequence)
    if readable(sequence) and sequence.device.type == "cpu" and not torch.equal(sequence.sort(1)[0], steps.long()):
        raise ValueError(f"RankMask: sequence must hold each of 0 .. {sequence.shape[1] - 1} once in every row")
    return torch.zeros_like(steps).scatter(1, sequence, steps)


def _no_token(attention_mask: Tensor) -> Tensor:
    """True where an attention mask of 1 = token says that there is none."""
    check_matrix("RankMask: attention_mask", attention_mask)
    if attention_mask.dtype == torch.bool:
        return ~attention_mask
    return _as_ranks("attention_mask", attention_mask) < 1


def _warn_of_inversion(padding: Tensor) -> None:
    if readable(padding) and padding.device.type == "cpu" and padding.numel() and padding.all(1).any():
        warnings.warn(
            "RankMask.padding: all of a sequence is padding. True means that there is no token; a mask with True or 1 "
            "for tokens is RankMask.padding(attention_mask=...)",
            stacklevel=3,
        )


def _check_flags(name: str, flags: Tensor | None, shape: tuple[int, ...] | None = None) -> Tensor:
    flags = check_matrix(f"RankMask: {name}", flags)
    if flags.dtype != torch.bool or shape not in (None, tuple(flags.shape)):
        wanted = "" if shape is None else f" of shape {shape}"
        raise ValueError(
            f"RankMask: {name} must be a bool tensor{wanted}, got {flags.dtype} of shape {tuple(flags.shape)}"
        )
    return flags


def _check_count(name: str, count: int, least: int) -> None:
    if not is_integer(count) or count < least:
        raise ValueError(f"RankMask: {name} must be an integer of at least {least}, got {count!r}")


def _hide(key_rank: Tensor, padding: Tensor | None) -> Tensor:
    return key_rank if padding is None else key_rank.masked_fill(padding, HIGHEST)


def _with_memory(key_rank: Tensor, mem_len: int) -> Tensor:
    _check_count("mem_len", mem_len, 0)
    return torch.nn.functional.pad(key_rank, (mem_len, 0), value=LOWEST)
