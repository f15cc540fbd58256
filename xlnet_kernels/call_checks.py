"""Checks and defaults of a call's arguments, in loops over the table of call.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._checks import (
    as_python,
    check_dense_mask,
    check_not_nested,
    check_range,
    check_rank,
    is_integer,
    shortened,
)
from ._precision import float32_precision
from ._torch import autocasts, exports_to_onnx, is_free_in_onnx
from .call import PLACE, ROWS, TENSORS, Call, replace

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_REST = tuple(name for name in TENSORS if name not in (*ROWS, "rel_key", "mask", "query_positions", "dropout_state"))
_QUICK = {
    name: (PLACE[name], argument.axes.upper(), argument.is_floating)
    for name, argument in TENSORS.items()
    if name in ROWS or name in _REST
}


def cast(call: Call) -> Call:
    """The call under autocast: floating tensors in its dtype, except float64."""
    if not isinstance(call.query, Tensor) or not autocasts(call.query.device.type):
        return call
    dtype = torch.get_autocast_dtype(call.query.device.type)
    changes = {}
    for name, argument in TENSORS.items():
        x = getattr(call, name)
        if argument.is_floating and isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64:
            changes[name] = x.to(dtype)
    return replace(call, **changes)


def check(call: Call) -> Call:
    """The checked call, with defaults filled in and masks expanded to every sequence.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value; the text names it.
    """
    query = call.query
    sizes = dict(zip("BHLD", check_rank("query", query, 4), strict=True)) | {"S": 2, "M": 0}
    if query.dtype not in _DTYPES:
        raise ValueError(f"query must be float16, bfloat16, float32 or float64, got {query.dtype}")
    if sizes["D"] == 0:
        raise ValueError(f"query must have a head_dim D of at least 1, got shape {tuple(query.shape)}")
    sizes["K"] = check_rank("key", call.key, 4)[2]
    if call.memory_key is not None:
        sizes["M"] = check_rank("memory[0]", call.memory_key, 4)[2]
    sizes["T"] = sizes["M"] + sizes["K"]
    values: list[Any] = list(call)
    _check_all(values, ROWS, sizes)
    _check_positions(call, sizes)
    max_distance = _check_rel_key(call, sizes)
    _check_all(values, _REST, sizes)
    if call.mask is not None:
        shape = tuple(sizes[axis] for axis in "BHLT")
        mask = check_dense_mask(call.mask, query, sizes["T"])
        # Not expanded for ONNX, because the file would hold the whole L x (M + K) mask of each head.
        values[PLACE["mask"]] = mask[(None,) * (4 - mask.dim())] if exports_to_onnx() else mask.expand(shape)
    values[len(TENSORS) :] = max_distance, *_numbers(call, sizes["D"])
    # Because max_distance is a constant in a trace: with other lengths it would make a window.
    if torch.jit.is_tracing():
        for name in ("key", "rel_key", "memory_key"):
            x = values[PLACE[name]]
            if x is not None:
                values[PLACE[name]] = x.unflatten(-2, (int(x.shape[-2]),))
    return Call(*values)


def _check_all(values: list[Any], names: tuple[str, ...], sizes: dict[str, int]) -> None:
    """Check the tensors of these names, and expand them to their sizes, in place."""
    query = values[0]
    device, dtype = query.device, query.dtype
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        index, axes, is_floating = _QUICK[name]
        tensor = values[index]
        if tensor is None and name in Call._field_defaults:
            continue
        if axes not in shapes:
            shapes[axes] = tuple([sizes[axis] for axis in axes])
        is_right = isinstance(tensor, Tensor) and tensor.shape == shapes[axes] and tensor.device == device
        is_right = is_right and tensor.layout == torch.strided and (not is_floating or tensor.dtype == dtype)
        # One flag for all checks, because small calls have no time for more.
        if not is_right:
            values[index] = _check(tensor, name, query, sizes)


def _check(tensor: Tensor, name: str, query: Tensor, sizes: dict[str, int]) -> Tensor:
    """Check a tensor's sizes, device and (if floating) dtype against query's; returns it expanded."""
    argument = TENSORS[name]
    axes = argument.axes_of(tensor) if isinstance(tensor, Tensor) else argument.axes.removeprefix("[B]")
    shape = tuple([sizes[axis] for axis in axes.upper()])
    check_rank(argument.label, tensor, len(shape))
    is_whole = tensor.shape == shape
    if not is_whole and not fits(axes, tensor.shape, shape):
        raise ValueError(f"{argument.label} must have shape {_text(axes, shape)}, got {tuple(tensor.shape)}")
    if argument.is_floating and tensor.dtype != query.dtype:
        raise ValueError(f"{argument.label} must be {query.dtype} as query is, got {tensor.dtype}")
    _check_device(argument.label, tensor, query)
    return tensor if is_whole else tensor.expand(shape)


def fits(axes: str, found: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether sizes equal the wanted ones, or are 1 where the axis allows it."""
    return len(found) == len(wanted) and all(
        size == want or (axis.islower() and size == 1) for axis, size, want in zip(axes, found, wanted, strict=True)
    )


def _text(axes: str, shape: tuple[int, ...]) -> str:
    """The text of a shape in errors."""
    sizes = (
        f"M + K = {n}" if x in "tT" else f"{n} or 1" if x.islower() else f"{n}"
        for x, n in zip(axes, shape, strict=True)
    )
    return f"({', '.join(sizes)})"


def _check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on query's device {query.device}, got {tensor.device}")


def _check_positions(call: Call, sizes: dict[str, int]) -> None:
    positions = call.query_positions
    if positions is None:
        if sizes["L"] > sizes["K"]:
            raise ValueError(
                f"query has {sizes['L']} rows but key only {sizes['K']}: more rows than positions need query_positions"
            )
        return
    _check(positions, "query_positions", call.query, sizes)
    if positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"query_positions must hold int32 or int64, got {positions.dtype}")
    check_range("query_positions", positions, 0, sizes["K"])


def _check_rel_key(call: Call, sizes: dict[str, int]) -> int:
    """Check rel_key and max_distance; returns max_distance."""
    rel_key, query = call.rel_key, call.query
    max_distance = as_python(call.max_distance)
    if torch.jit.is_tracing() and isinstance(max_distance, Tensor):  # sizes are tensors there
        max_distance = int(max_distance)
    if max_distance is not None and (not is_integer(max_distance) or abs(max_distance) >= 2**30):
        raise ValueError(f"max_distance must be an integer below 2^30, got {shortened(max_distance)}")
    if not isinstance(rel_key, Tensor) or rel_key.dim() not in (3, 4):
        got = f"shape {tuple(rel_key.shape)}" if isinstance(rel_key, Tensor) else type(rel_key).__name__
        if isinstance(rel_key, Tensor) and rel_key.dim() == 2 and rel_key.shape[1] == sizes["H"] * sizes["D"]:
            got += f": give rel_key.unflatten(1, ({sizes['H']}, {sizes['D']})).transpose(0, 1)"
        raise ValueError(f"rel_key must be (H, P, D) or (B, H, P, D), got {got}")
    check_not_nested("rel_key", rel_key)
    heads, length = sizes["H"], sizes["L"]
    found, rows, width = rel_key.shape[-3:]
    if found != heads and rows == heads and width == sizes["D"]:
        raise ValueError(
            f"rel_key has {found} heads and query, of shape {tuple(query.shape)}, {heads}: rel_key must be (H, P, D); "
            f"of (P, H, D) give rel_key.transpose(-3, -2)"
        )
    # In this order, because exported lengths then stay free.
    if found != heads and found == length:
        raise ValueError(
            f"rel_key has {length} heads and query, of shape {tuple(query.shape)}, {heads}: query, key and value must "
            f"be (B, H, L, D); of (B, L, H, D) give query.transpose(1, 2), and so on"
        )
    max_distance = _check_distances(rel_key, sizes["K"], sizes["M"], max_distance)
    _check(rel_key, "rel_key", query, sizes | {"P": rows})
    return max_distance


def _numbers(call: Call, width: int) -> tuple[float, float, bool, int]:
    """Checked values or defaults of dropout_p, scale, deterministic and float32_precision."""
    dropout_p, scale, deterministic = map(as_python, (call.dropout_p, call.scale, call.deterministic))
    if scale is None:
        # int, because the root of a traced size has 32 bits.
        scale = (int(width) if torch.jit.is_tracing() else width) ** -0.5
    elif not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {shortened(scale)}")
    if not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {shortened(dropout_p)}")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    elif not isinstance(deterministic, bool):
        raise ValueError(f"deterministic must be a bool or None, got {shortened(deterministic)}")
    precision = call.float32_precision
    if precision is None:
        precision = float32_precision(call.query.device.type)
    return float(dropout_p), float(scale), deterministic, precision


def _check_distances(rel_key: Tensor, key_len: int, mem_len: int, max_distance: int | None) -> int:
    """Check the number of rel_key's rows; returns max_distance."""
    rows, farthest = rel_key.shape[-2], mem_len + key_len
    is_window = max_distance is not None
    if isinstance(rows, int) and isinstance(max_distance, int) and is_free_in_onnx(key_len):
        return max_distance  # a window in a file for all lengths, some of them shorter than the window
    if max_distance is None:
        max_distance = farthest
    is_whole = rows in (max_distance + key_len, max_distance + 1) and (rows > 0 or key_len == 0)
    if is_whole or is_window and 1 <= rows <= max_distance + key_len:
        return max_distance
    conformer = ""
    if rows == farthest + key_len - 1 and max_distance < farthest - 1:
        conformer = (
            f"; of a Conformer's table, which begins at distance M + K - 1 = {farthest - 1}, give the rows of the "
            f"window, from {farthest - 1 - max_distance} on"
        )
    elif rows == farthest + key_len - 1:
        conformer = f"; a Conformer's table begins at distance M + K - 1: give max_distance={farthest - 1}"
    if max_distance <= -key_len:
        raise ValueError(f"max_distance must be at least -(K - 1) = {1 - key_len}, the last key's, got {max_distance}")
    if is_window:
        raise ValueError(
            f"rel_key must have 1 to {max_distance + key_len} rows from max_distance={max_distance} down to "
            f"-(K - 1) = {1 - key_len}, got shape {tuple(rel_key.shape)}, {rows} rows{conformer}"
        )
    raise ValueError(
        f"rel_key has {rows} rows from distance {max_distance} on, shape {tuple(rel_key.shape)}: it needs "
        f"{max_distance + key_len} to reach down to -(K - 1) = {1 - key_len}, or {max_distance + 1} to end at "
        f"distance 0{conformer}; a window of distances needs max_distance"
    )
