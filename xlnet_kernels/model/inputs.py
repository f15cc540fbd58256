"""Checks of the model's inputs, and the masks made from them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import INTEGERS, check_range, is_integer, readable, shortened
from .._torch import autocasts
from ..masks import HIGHEST, LOWEST, RankMask
from ..two_streams import RowPositions, check_rank_mask, stack_mask, stack_segments
from .config import XLNetConfig
from .memory import ProjectedMemory

Targets = tuple[Tensor | None, Tensor | None, Tensor | None]  # result of `find_targets`


def check_tensor(
    name: str, x: Tensor, shape: tuple, like: Tensor, integers: bool = False, floats: bool = False
) -> None:
    """Require a tensor of that shape on like's device; optionally of integers, or of like's dtype.

    A name stands for an arbitrary size.
    """
    fits = isinstance(x, Tensor) and x.dim() == len(shape)
    if not fits or any(not isinstance(want, str) and want != size for size, want in zip(x.shape, shape, strict=True)):
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name} must be a tensor of shape ({wanted}), got {got}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on the model's device {like.device}, got {x.device}")
    if integers and x.dtype not in INTEGERS:
        raise ValueError(f"{name} must hold integers, got {x.dtype}")
    if floats and x.dtype != like.dtype and not (x.is_floating_point() and autocasts(x.device.type)):
        raise ValueError(f"{name} must be {like.dtype} like the parameters, got {x.dtype}")


def check_words(input_ids: Tensor | None, inputs_embeds: Tensor | None, config: XLNetConfig, like: Tensor) -> None:
    """Require either ids of the vocabulary (B, L), or embeddings (B, L, d_model)."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(f"give either input_ids or inputs_embeds, got {'neither' if input_ids is None else 'both'}")
    if inputs_embeds is not None:
        check_tensor("inputs_embeds", inputs_embeds, ("batch", "length", config.d_model), like, floats=True)
    elif input_ids is not None:
        check_tensor("input_ids", input_ids, ("batch", "length"), like, integers=True)
        check_range("input_ids", input_ids, 0, config.vocab_size)


def check_labels(name: str, labels: Tensor, logits: Tensor) -> None:
    """Require integers in [0, classes), or -100 for ignored labels."""
    check_tensor(name, labels, logits.shape[:-1], logits, integers=True)
    check_range(f"{name} (-100 aside)", labels.masked_fill(labels == -100, 0), 0, logits.shape[-1])


def check_length(name: str, value: int | None, default: int | None) -> int | None:
    """The checked `value`, or the configuration's."""
    if value is None:
        return default
    if not is_integer(value) or value < 0:
        got = shortened(value)
        raise ValueError(f"{name} must be an integer of at least 0, or None for the configuration's, got {got}")
    return value


def check_mems(
    mems: list[Tensor] | ProjectedMemory | None, config: XLNetConfig, batch: int | None, like: Tensor, training: bool
) -> int:
    """Require memory made by this configuration (of any batch size for None); returns M."""
    if mems is None:
        return 0
    if isinstance(mems, ProjectedMemory):
        if training:
            raise ValueError("mems must be those of a training call, since ProjectedMemory is for inference")
        tensors, layers = [*mems.keys, *mems.values], len(mems.keys)
        shape: tuple
        shape = ("batch" if batch is None else batch, config.n_head, mems.length, config.d_head)
    elif isinstance(mems, (list, tuple)) and all(isinstance(x, Tensor) and x.dim() == 3 for x in mems):
        tensors, layers = mems, len(mems)
        shape = (mems[0].shape[0] if mems else "M", "batch" if batch is None else batch, config.d_model)
    else:
        got = f"a list with {shortened(mems[0])}" if isinstance(mems, (list, tuple)) else shortened(mems)
        raise ValueError(
            f"mems must be a list of tensors (M, batch, d_model), one per layer, or ProjectedMemory, got {got}"
        )
    if layers != config.n_layer:
        raise ValueError(f"mems must hold one memory for each of the {config.n_layer} layers, got {layers}")
    for index, x in enumerate(tensors):
        check_tensor(f"mems[{index % layers}]", x, shape, like, floats=True)
    return mems.length if isinstance(mems, ProjectedMemory) else mems[0].shape[0]


def find_padding(attention_mask: Tensor | None, input_mask: Tensor | None, h: Tensor) -> Tensor | None:
    """Padding (B, L) bool, True where there is no token."""
    if attention_mask is not None and input_mask is not None:
        raise ValueError("attention_mask (1 = token) and input_mask (1 = padding) are one thing: give one of them")
    if attention_mask is not None:
        _check_flags("attention_mask", attention_mask, h, "1 for tokens and 0 for padding")
        return ~attention_mask if attention_mask.dtype == torch.bool else attention_mask < 1
    if input_mask is not None:
        _check_flags("input_mask", input_mask, h, "1 for padding and 0 for tokens")
        return input_mask > 0
    return None


def _check_flags(name: str, x: Tensor, h: Tensor, meaning: str) -> None:
    check_tensor(name, x, h.shape[:2], h)
    if x.dtype != torch.bool and x.device.type == "cpu" and readable(x) and not ((x >= 0) & (x <= 1)).all():
        raise ValueError(
            f"{name} must hold {meaning}, got values from {x.min()} to {x.max()}: a mask that is added to scores has "
            f"another meaning"
        )


def find_mask(
    mask: RankMask | Tensor | None,
    perm_mask: Tensor | None,
    padding: Tensor | None,
    same_length: bool,
    h: Tensor,
    mem_len: int,
    targets: Targets = (None, None, None),
) -> RankMask | Tensor | None:
    """Mask of the query stream: a RankMask where possible, else bool (B, L, M + L), or None for full.

    A mask of one stream also hides the `targets` from `find_targets`.
    """
    batch, length = h.shape[:2]
    if mask is not None and perm_mask is not None:
        raise ValueError("mask and perm_mask are one thing: give one of them")
    if mask is not None:
        if not isinstance(mask, RankMask):
            raise ValueError(f"mask must be a RankMask (perm_mask takes tensors), got {type(mask).__name__}")
        mask = _with_memory(mask, length, mem_len)
        check_rank_mask(mask, batch, length, mem_len + length)
        flags = flag_targets(targets, h) if mask.one_stream else None
        if flags is not None:
            mask = mask.hide_targets(flags)
    elif perm_mask is not None:
        check_tensor("perm_mask", perm_mask, (batch, length, length), h)
        seen = ~perm_mask if perm_mask.dtype == torch.bool else perm_mask <= 0
        mask = F.pad(seen, (mem_len, 0), value=True)
    if same_length:
        window = _same_length(length, mem_len, h.device)
        if mask is None:
            mask = window
        else:
            mask = (mask if isinstance(mask, Tensor) else mask.to_bool("query")) & window.to_bool()
    if padding is None:
        return mask
    if mask is None:
        everything = RankMask.padding(attention_mask=~padding, mem_len=mem_len)
        return RankMask(everything.query_rank, everything.key_rank)  # a query row sees its token, as published
    hidden = F.pad(padding, (mem_len, 0))
    if isinstance(mask, Tensor):
        return mask & ~hidden[:, None]
    mask = mask.expand(batch)
    return RankMask(mask.query_rank, mask.key_rank.masked_fill(hidden, HIGHEST), mask.query_floor)


def _with_memory(mask: RankMask, length: int, mem_len: int) -> RankMask:
    """The mask with all memory visible where it has the segment's keys only, as with perm_mask."""
    if not mem_len or mask.key_rank.shape[1] != length:
        return mask
    if mask.query_floor is not None:
        raise ValueError(
            f"mask has a query_floor: with memory it must have M + L = {mem_len + length} key ranks, got {length}"
        )
    key_rank = F.pad(mask.key_rank, (mem_len, 0), value=LOWEST)
    return RankMask(mask.query_rank, key_rank, one_stream=mask.one_stream)


def _same_length(length: int, mem_len: int, device: torch.device) -> RankMask:
    """Mask where every position sees itself and the M keys before it, in both streams."""
    row = torch.arange(length, dtype=torch.int32, device=device)[None]
    key = torch.arange(mem_len + length, dtype=torch.int32, device=device)[None]
    return RankMask(row + mem_len + 1, key, query_floor=row)


def find_targets(target_mapping: Tensor | None, target_positions: Tensor | None, h: Tensor, as_given: bool) -> Targets:
    """Positions of content and query rows (B, L + N) or None; the mapping if dense; the mask of empty targets."""
    if target_mapping is not None and target_positions is not None:
        raise ValueError("target_mapping and target_positions are one thing: give one of them")
    batch, length = h.shape[:2]
    content = torch.arange(length, device=h.device).expand(batch, -1)
    if target_positions is not None:
        check_tensor("target_positions", target_positions, (batch, "targets"), h, integers=True)
        check_range("target_positions", target_positions, 0, length)
        return torch.cat([content, target_positions.long()], 1), None, None
    if target_mapping is None:
        return None, None, None
    if isinstance(target_mapping, Tensor) and target_mapping.dim() == 3 and target_mapping.shape[2] > length:
        # As in transformers, columns count from the end: the last is the last token, with any number in front.
        before = target_mapping[:, :, :-length]
        if readable(before) and before.any():
            raise ValueError(
                f"target_mapping has {target_mapping.shape[2]} columns for {length} tokens: the last {length} are the "
                f"tokens, and those in front of them, which stand for no token, must be zero"
            )
        target_mapping = target_mapping[:, :, -length:]
    check_tensor("target_mapping", target_mapping, (batch, "targets", length), h)
    found = None if as_given else _one_hot_positions(target_mapping)
    if found is None:
        return torch.cat([content, content], 1), target_mapping.to(h.dtype), None
    return torch.cat([content, found[0]], 1), None, found[1]


def flag_targets(targets: Targets, h: Tensor) -> Tensor | None:
    """Mask (B, L) bool, True where a token is predicted, of `find_targets`' result."""
    positions, mapping, empty = targets
    if mapping is not None:
        return (mapping != 0).any(1)
    if positions is None:
        return None
    places = positions[:, h.shape[1] :]
    counts = torch.ones_like(places) if empty is None else (~empty).long()
    return torch.zeros(h.shape[:2], dtype=torch.long, device=h.device).scatter_add(1, places, counts) > 0


def find_output_rows(output_rows: Tensor | None, rows: Tensor, first: int) -> Tensor | None:
    """Indices (B, n) of the returned rows among the stacked rows, counted from `first`; None for all."""
    batch, total = rows.shape[:2]
    if output_rows is None:
        return torch.arange(first, total, device=rows.device).expand(batch, -1) if first else None
    one_for_all = isinstance(output_rows, Tensor) and output_rows.shape[:1] == (1,)
    check_tensor("output_rows", output_rows, (1 if one_for_all else batch, "rows"), rows, integers=True)
    check_range("output_rows", output_rows, first - total, total - first)
    output_rows = output_rows.long()
    return (output_rows + torch.where(output_rows < 0, total, first)).expand(batch, -1)


def _one_hot_positions(mapping: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Positions (B, N) if every row is one-hot or zero without repeated positions; and the mask of zero rows, if any.

    None for any other mapping, and for unreadable values.
    """
    if not readable(mapping):
        return None
    ones = mapping == 1
    plain = (ones | (mapping == 0)).all() & (ones.sum(-1) <= 1).all() & (ones.sum(-2) <= 1).all()
    empty = ~ones.any(-1)
    plain, some_empty = torch.stack([plain, empty.any()]).tolist()  # one synchronisation
    return (ones.int().argmax(-1), empty if some_empty else None) if plain else None


def stack_rows(
    h: Tensor,
    mem_len: int,
    n_head: int,
    *,
    mask: RankMask | Tensor | None,
    targets: Targets,
    token_type_ids: Tensor | None,
) -> tuple:
    """Attention inputs of every layer for the L content rows and the query rows after them.

    Args:
        h: (B, L, d_model), for its shape and device.
        mask: from `find_mask`, targets: from `find_targets`.

    Returns:
        mask, segment_rows, positions and mapping for `TwoStreamAttention.attend`, and the mask (B, N) of empty targets
        among query rows, or None.
    """
    positions, mapping, empty = targets
    mask = stack_mask(mask, positions, h, n_head, mem_len)
    if empty is not None:
        mask = hide_from_rows(mask, F.pad(empty, (h.shape[1], 0)), mem_len + h.shape[1])
    segment_rows = None
    if token_type_ids is not None:
        check_tensor("token_type_ids", token_type_ids, h.shape[:2], h, integers=True)
        segment_rows = stack_segments(token_type_ids, positions, mem_len)
    return mask, segment_rows, None if positions is None else RowPositions(positions), mapping, empty


def hide_from_rows(mask: RankMask | Tensor | None, rows: Tensor, keys: int) -> RankMask | Tensor:
    """The mask of all rows with `rows` (B, rows) fully masked: they give zeros, like zero rows in a mapping."""
    if isinstance(mask, Tensor):
        return mask & ~rows[:, None, :, None]
    if mask is None:
        key_rank = torch.full((rows.shape[0], keys), LOWEST, dtype=torch.int32, device=rows.device)
        mask = RankMask(torch.zeros_like(rows, dtype=torch.int32), key_rank)
    # sees_self is False in query rows already
    return RankMask(mask.query_rank.masked_fill(rows, LOWEST), mask.key_rank, mask.query_floor, mask.sees_self)
