"""Weight files: tensors by name, each in its own memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .._checks import shortened
from .files import open_regular, parse_json, read_json

WEIGHTS, _OLD_WEIGHTS = "model.safetensors", "pytorch_model.bin"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SAFE_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
NEEDED = "float16, bfloat16, float32 or float64"
_LARGEST_HEADER = 100_000_000  # bytes, the format's own limit


def read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The path of the weight file, and its tensors by name: strided, on the CPU, independent of the file.

    Raises:
        FileNotFoundError: a file is missing.
        OSError: it cannot be read.
        ValueError: it is damaged, or holds other things than such tensors; the text names it.
    """
    index = f"{WEIGHTS}.index.json"
    readers = ((WEIGHTS, _read_safetensors), (index, _read_shards), (_OLD_WEIGHTS, _read_pickled))
    for name, read in readers:
        path = folder / name
        # lexists, because a broken link should be an error with its name.
        if os.path.lexists(path):
            return path, read(path)
    raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {index} nor {_OLD_WEIGHTS}")


def _read_shards(index: Path) -> dict[str, Tensor]:
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(shard, str) for shard in names.values()):
        raise ValueError(f'{index} must hold {{"weight_map": {{tensor: file, ...}}}}, got {shortened(content)}')
    state: dict[str, Tensor] = {}
    for shard in sorted(set(names.values())):
        # Only files beside the index are read, to avoid loading unintended files from other folders.
        if shard in ("", ".", "..") or not shard.isprintable() or Path(shard).name != shard:
            raise ValueError(f"{index} must name files of its own folder, got {shard!r}")
        path = index.with_name(shard)
        found = _read_safetensors(path)
        differ = found.keys() ^ {name for name, its in names.items() if its == shard}
        if differ:
            raise ValueError(f"{path} and {index.name} disagree on where these tensors are: {some(differ)}")
        state |= found
    return state


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    # Not by the library, because it maps the file: tensors would change with it, and a truncated file ends the process.
    state: dict[str, Tensor] = {}
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise _damaged(path, f"a header of {length} bytes does not fit into its {size} bytes")
        header = parse_json(file.read(length), f"the header of {path}")
        if not isinstance(header, dict):
            raise _damaged(path, f"its header must be a dictionary, got {shortened(header)}")
        header.pop("__metadata__", None)
        plan = sorted((_entry(path, name, entry) for name, entry in header.items()), key=lambda entry: entry[:2])
        place = 0
        for begin, end, name, _, _ in plan:
            if begin != place:
                raise _damaged(path, f"{name} must begin at byte {place} of the tensors, got {begin}")
            place = end
        if place != size - 8 - length:
            raise _damaged(path, f"its tensors have {place} bytes, the file has {size - 8 - length} for them")
        for begin, end, name, dtype, shape in plan:
            data = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
            if end > begin and file.readinto(data.numpy()) != end - begin:  # type: ignore[attr-defined]
                raise _damaged(path, "it was cut while it was read")
            state[name] = data.view(dtype).view(shape)
    return state


def _entry(path: Path, name: str, entry: Any) -> tuple[int, int, str, torch.dtype, list[int]]:
    """Begin, end, name, dtype and shape of a tensor, from a safetensors header."""
    kind, shape, place = (entry.get(k) if isinstance(entry, dict) else None for k in ("dtype", "shape", "data_offsets"))
    if not (isinstance(kind, str) and _are_sizes(shape) and _are_sizes(place) and len(place) == 2):
        raise _damaged(path, f"{name} must have a dtype, a shape and data_offsets, got {shortened(entry)}")
    if kind not in _SAFE_DTYPES:
        raise ValueError(f"{path}: {name} must be of {NEEDED}, got {shortened(kind)}")
    dtype, (begin, end) = _SAFE_DTYPES[kind], place
    if end - begin != math.prod(shape) * dtype.itemsize or math.prod(max(size, 1) for size in shape) >= 2**60:
        raise _damaged(path, f"{name} of {kind} and shape {shortened(shape)} does not fit into {end - begin} bytes")
    return begin, end, name, dtype, shape


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _read_pickled(path: Path) -> dict[str, Tensor]:
    with open_regular(path) as file:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        # Every exception, because damaged bytes can make the unpickler raise anything.
        except Exception as error:
            raise _damaged(path, error) from error
    if not isinstance(state, dict) or not all(isinstance(x, Tensor) for x in state.values()):
        raise ValueError(f"{path} must hold tensors by name, got {type(state).__name__}")
    if not all(isinstance(name, str) for name in state):
        raise ValueError(f"{path} must hold tensors by name, got {shortened(list(state))} as names")
    for name, x in state.items():
        if type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided or x.is_nested or x.is_meta:
            kind = "nested" if x.is_nested else "on the meta device" if x.is_meta else f"{type(x).__name__}, {x.layout}"
            raise ValueError(f"{path}: {name} must be a strided tensor with values, got one that is {kind}")
    return state


def owned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous, each with its own storage, so that parameters made from them are independent."""
    seen, found = set(), {}
    for name, x in state.items():
        x, storage = x.detach(), x.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != x.nbytes or not x.is_contiguous() or x.is_neg():
            x = x.clone(memory_format=torch.contiguous_format)
        seen.add(x.untyped_storage().data_ptr())
        found[name] = x
    return found


def some(names: Iterable[str], most: int = 8) -> str:
    """The first names in alphabetical order, and the number of further names."""
    listed = sorted(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _damaged(path: Path, why: object) -> ValueError:
    return ValueError(f"{path} is damaged or no checkpoint: {why}")
