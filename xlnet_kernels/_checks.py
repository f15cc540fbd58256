"""Argument checks shared by several modules. Each raises ValueError with the value it got and the value it needs."""

from __future__ import annotations

import numbers
import reprlib
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ._torch import is_wrapped

# torch's other unsigned integers have neither comparisons nor room in the kernels' int32.
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 100


def shortened(value: object) -> str:
    """The value as messages quote it: arrays by type and shape, long or deeply nested values with dots."""
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__} of shape {tuple(shape)}" if shape else _short.repr(value)


def check_rank(name: str, tensor: Tensor, rank: int) -> torch.Size:
    """Require a tensor of `rank` dimensions; returns its shape."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    check_not_nested(name, tensor)
    if tensor.dim() != rank:
        raise ValueError(f"{name} must have {rank} dimensions, got shape {tuple(tensor.shape)}")
    return tensor.shape


def check_not_nested(name: str, tensor: Tensor) -> None:
    if tensor.is_nested:
        raise ValueError(
            f"{name} is a nested tensor: put its sequences one after the other in a row and give RankMask.packed, or "
            f"pad them (torch.nested.to_padded_tensor) and give RankMask.padding"
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got {tensor.layout}: give {name}.to_dense()")


def check_matrix(name: str, values: Tensor | None) -> Tensor:
    """Require a tensor (batch, length)."""
    if not isinstance(values, Tensor) or values.dim() != 2:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name} must be a 2-dimensional tensor (batch, length), got {got}")
    return values


def check_range(name: str, values: Tensor, least: int, end: int) -> None:
    """Require integers in [least, end), where reading them costs no synchronisation."""
    if not readable(values) or values.device.type != "cpu" or not values.numel():
        return
    low, high = (int(bound) for bound in values.aminmax())
    if low < least or high >= end:
        raise ValueError(f"{name} must lie in [{least}, {end}), got values from {low} to {high}")


def check_bool_mask(mask: object, like: Tensor, name: str) -> Tensor:
    """Require a bool tensor on the device of `like`, the argument `name`; the error says how to convert other masks."""
    wanted = "mask must be a RankMask or a bool tensor (True = may attend)"
    if not isinstance(mask, Tensor):
        raise ValueError(f"{wanted}, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        convert = "mask == 0, of one that is added to scores" if mask.is_floating_point() else "mask.bool(), if 1 = see"
        raise ValueError(f"{wanted}, got {mask.dtype}: give {convert}")
    check_not_nested("mask", mask)
    if mask.device != like.device:
        raise ValueError(f"mask must be on {name}'s device {like.device}, got {mask.device}")
    return mask


def check_not_padding(mask: Tensor, batch: int, length: int, keys: int) -> None:
    """Refuse a 2-dimensional mask that may be padding (B, L), because it would broadcast as (L, M + K)."""
    if mask.dim() == 2 and batch > 1 and mask.shape[0] == batch and (batch == length or mask.shape[1] > 1):
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} may be padding of {batch} sequences, but 2 dimensions mean (L, M + K), "
            f"{(length, keys)} here: give RankMask.padding(attention_mask=...), or mask[None, None] for rows and keys"
        )


def check_dense_mask(mask: object, query: Tensor, keys: int) -> Tensor:
    """Require a bool tensor that broadcasts to (B, H, L, M + K) of a query (B, H, L, D) in one way only."""
    mask = check_bool_mask(mask, query, "query")
    batch, heads, length, _ = query.shape
    check_not_padding(mask, batch, length, keys)
    full = (batch, heads, length, keys)
    if mask.dim() == 3 and 1 < batch == heads == mask.shape[0]:
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} may be of {batch} sequences or of {heads} heads: give mask[:, None] "
            f"for sequences, mask[None] for heads"
        )
    if mask.dim() > 4 or any(
        size != 1 and size != want for size, want in zip(mask.shape[::-1], full[::-1], strict=False)
    ):
        raise ValueError(f"mask must broadcast to (B, H, L, M + K) = {full}, got {tuple(mask.shape)}")
    return mask


def is_integer(value: object) -> TypeGuard[int]:
    """Whether the value is an int (Python's or numpy's) or a symbolic size of torch.export."""
    return isinstance(value, (int, torch.SymInt)) or isinstance(value, numbers.Integral)


def as_python(value: Any) -> Any:
    """Convert a numpy number or flag to Python's; other values pass unchanged."""
    if value is None or isinstance(value, (int, float, torch.SymInt, torch.SymFloat, Tensor)):
        return value
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 else value


def readable(values: Tensor) -> bool:
    """Whether the values can be read: not in a compiler, a fake mode, vmap or on the meta device."""
    if torch.compiler.is_compiling() or type(values) not in (Tensor, torch.nn.Parameter):
        return False
    return values.device.type != "meta" and not is_wrapped(values)
