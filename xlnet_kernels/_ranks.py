"""Rank vectors: checks, clamping and construction from steps and padding."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ._checks import INTEGERS, check_matrix, is_integer, readable, shortened

LOWEST = torch.iinfo(torch.int32).min  # rank of a key that every query sees
HIGHEST = torch.iinfo(torch.int32).max  # rank of a key that no query sees


def as_ranks(name: str, values: Tensor | None) -> Tensor:
    """`values` as int32, clamped to its range."""
    values = check_integers(name, values)
    return values if values.dtype == torch.int32 else values.long().clamp(LOWEST, HIGHEST).int()


def check_integers(name: str, values: Tensor | None) -> Tensor:
    """Require integers (batch, length)."""
    values = check_matrix(f"RankMask: {name}", values)
    if values.dtype not in INTEGERS:
        raise ValueError(f"RankMask: {name} must hold integers, got {values.dtype}")
    return values


def steps_of(sequence: Tensor) -> Tensor:
    """The step at which each position is visited, from the positions in the order of visits."""
    sequence = as_ranks("sequence", sequence).long()
    steps = torch.arange(sequence.shape[1], dtype=torch.int32, device=sequence.device).expand_as(sequence)
    if readable(sequence) and sequence.device.type == "cpu" and not torch.equal(sequence.sort(1)[0], steps.long()):
        raise ValueError(f"RankMask: sequence must hold each of 0 .. {sequence.shape[1] - 1} once in every row")
    return torch.zeros_like(steps).scatter(1, sequence, steps)


def no_token(attention_mask: Tensor) -> Tensor:
    """Padding from an attention mask (1 = token): True where there is no token."""
    check_matrix("RankMask: attention_mask", attention_mask)
    if attention_mask.dtype == torch.bool:
        return ~attention_mask
    return as_ranks("attention_mask", attention_mask) < 1


def warn_of_inversion(padding: Tensor) -> None:
    if readable(padding) and padding.device.type == "cpu" and padding.numel() and padding.all(1).any():
        warnings.warn(
            "RankMask.padding: all of a sequence is padding. True means that there is no token; a mask with True or 1 "
            "for tokens is RankMask.padding(attention_mask=...)",
            stacklevel=3,
        )


def check_flags(name: str, flags: Tensor | None, shape: tuple[int, ...] | None = None) -> Tensor:
    flags = check_matrix(f"RankMask: {name}", flags)
    if flags.dtype != torch.bool or shape not in (None, tuple(flags.shape)):
        wanted = "" if shape is None else f" of shape {shape}"
        raise ValueError(
            f"RankMask: {name} must be a bool tensor{wanted}, got {flags.dtype} of shape {tuple(flags.shape)}"
        )
    return flags


def check_count(name: str, count: int, least: int = 0) -> None:
    if not is_integer(count) or count < least:
        raise ValueError(f"RankMask: {name} must be an integer of at least {least}, got {shortened(count)}")


def check_sizes(batch: int, length: int, mem_len: int) -> None:
    for name, count in (("batch", batch), ("length", length), ("mem_len", mem_len)):
        check_count(name, count)


def hide(key_rank: Tensor, padding: Tensor | None) -> Tensor:
    return key_rank if padding is None else key_rank.masked_fill(padding, HIGHEST)


def with_memory(key_rank: Tensor, mem_len: int) -> Tensor:
    check_count("mem_len", mem_len)
    return torch.nn.functional.pad(key_rank, (mem_len, 0), value=LOWEST)


def positions_of(batch: int, first: int, end: int, device: torch.device | str | None) -> Tensor:
    """(batch, end - first), each row first .. end - 1."""
    return torch.arange(first, end, dtype=torch.int32, device=device).expand(batch, -1)


def hide_segment(key_rank: Tensor, padding: Tensor | None, mem_len: int) -> Tensor:
    """Ranks of memory and segment, with the padding (B, L) of the segment hidden."""
    if padding is None:
        return key_rank
    check_flags("padding", padding, (key_rank.shape[0], key_rank.shape[1] - mem_len))
    return hide(key_rank, torch.nn.functional.pad(padding, (mem_len, 0)))


def hide_first(key_rank: Tensor, padding: Tensor) -> Tensor:
    """Ranks of memory and segment, with the padding (B, M) of the memory hidden."""
    keys, length = key_rank.shape[1], padding.shape[1]
    if length > keys:
        raise ValueError(f"RankMask: padding of the memory must have at most the mask's {keys} keys, got {length}")
    return hide(key_rank, torch.nn.functional.pad(padding, (0, keys - length)))


def ranks_of_documents(document_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rank of each key, its index in the order of documents; the first of its document, and the end of that."""
    ids = check_integers("document_ids", document_ids)
    in_documents, order = ids.sort(dim=1, stable=True)
    place = positions_of(ids.shape[0], 0, ids.shape[1], ids.device)
    place = torch.empty_like(place).scatter(1, order, place)
    first = torch.searchsorted(in_documents, ids.contiguous(), out_int32=True)
    end = torch.searchsorted(in_documents, ids.contiguous(), right=True, out_int32=True)
    return place, first, end


def stream_sees_self(stream: str) -> bool:
    """Whether rows of a stream see their own keys."""
    if stream not in ("content", "query"):
        raise ValueError(f'RankMask: stream must be "content" or "query", got {shortened(stream)}')
    return stream == "content"


def ranks_see(query_rank: Tensor, key_rank: Tensor, query_floor: Tensor | None) -> Tensor:
    """(B, L, M + K) bool, the keys that each row sees by rank."""
    visible = key_rank[:, None, :] < query_rank[:, :, None]
    return visible if query_floor is None else visible & (key_rank[:, None, :] >= query_floor[:, :, None])


def own_key(position: Tensor, mem_len: int, keys: int) -> Tensor:
    """(B or 1, L, M + K) bool, the key at each row's own position."""
    return torch.arange(keys, device=position.device) == (position + mem_len)[:, :, None]
