"""Checks and defaults of the arguments of `TwoStreamAttention`."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import INTEGERS, check_not_nested, check_range
from ._torch import autocasts
from .positions import kept_positions


def check_not_projected(h: Tensor, g: Tensor | None, mask: object) -> None:
    """Refuse query, key and value in the places of h, g and mask."""
    if isinstance(g, Tensor) and isinstance(mask, Tensor) and mask.is_floating_point() and mask.shape == g.shape:
        raise ValueError(
            "TwoStreamAttention makes query, key and value itself: call it with hidden states, attn(h); the second "
            "argument is the query stream g and the third the mask. rel_attention takes query, key and value"
        )


def check_hidden(h: Tensor, g: Tensor | None, mems: Tensor | None, d_model: int, like: Tensor) -> tuple[int, int, int]:
    """Check h, g and mems; returns B, L and M."""
    for name, x in (("h", h), ("g", g), ("mems", mems)):
        if x is None and name != "h":
            continue
        if isinstance(x, Tensor):
            check_not_nested(name, x)
        if not isinstance(x, Tensor) or x.dim() != 3:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor (batch, length, d_model = {d_model}), got {got}")
        if x.shape[0] != h.shape[0] or x.shape[2] != d_model:
            batch = "B" if name == "h" else h.shape[0]
            raise ValueError(f"{name} must have shape ({batch}, length, {d_model}), got {tuple(x.shape)}")
        _check_kind(name, x, like)
    return h.shape[0], h.shape[1], 0 if mems is None else mems.shape[1]


def _check_kind(name: str, x: Tensor, like: Tensor) -> None:
    """Require a floating tensor on the parameters' device, of their dtype unless autocast casts both."""
    if x.device != like.device:
        raise ValueError(f"{name} must be on the parameters' device {like.device}, got {x.device}")
    if x.dtype != like.dtype and not (x.is_floating_point() and autocasts(x.device.type)):
        raise ValueError(f"{name} must be {like.dtype} like the parameters, got {x.dtype}")


def find_rel_pos(rel_pos: Tensor | None, h: Tensor, mem_len: int, like: Tensor) -> Tensor:
    """`rel_pos`, or the default."""
    batch, length, d_model = h.shape
    if rel_pos is None:
        return kept_positions(h, mem_len + length, length, d_model)
    fits = isinstance(rel_pos, Tensor) and tuple(rel_pos.shape[:-2]) in ((), (batch,)) and rel_pos.dim() > 1
    rows = (mem_len + 2 * length, mem_len + length + 1)
    if not fits or rel_pos.shape[-2] not in rows or rel_pos.shape[-1] != d_model:
        got = tuple(rel_pos.shape) if isinstance(rel_pos, Tensor) else type(rel_pos).__name__
        raise ValueError(
            f"rel_pos must be (P, {d_model}) or ({batch}, P, {d_model}) with P = M + 2 L = {rows[0]}, or "
            f"M + L + 1 = {rows[1]} to see nothing ahead, got {got}"
        )
    _check_kind("rel_pos", rel_pos, like)
    return rel_pos


def find_positions(target_positions: Tensor | None, h: Tensor, g: Tensor) -> Tensor:
    """The (B, L + N) positions of all rows, content rows first."""
    batch, length = h.shape[:2]
    content = torch.arange(length, device=h.device).expand(batch, -1)
    if target_positions is None:
        if g.shape[1] != length:
            raise ValueError(
                f"g has {g.shape[1]} rows and h {length}: without target_positions there must be one for each"
            )
        return torch.cat([content, content], 1)
    check_integers("target_positions", target_positions, (batch, g.shape[1]), h)
    check_range("target_positions", target_positions, 0, length)
    return torch.cat([content, target_positions.long()], 1)


def check_integers(name: str, values: Tensor, shape: tuple[int, int], h: Tensor) -> None:
    if not isinstance(values, Tensor) or tuple(values.shape) != shape:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name} must be an integer tensor of shape {shape}, got {got}")
    if values.dtype not in INTEGERS:
        raise ValueError(f"{name} must hold integers, got {values.dtype}")
    if values.device != h.device:
        raise ValueError(f"{name} must be on h's device {h.device}, got {values.device}")
