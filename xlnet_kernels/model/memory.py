"""Segment recurrence: what is kept of a segment, as layer inputs or, at inference, as projected keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from .._torch import register


@register
@dataclass(eq=False)
class ProjectedMemory:
    """Memory that is projected once: stepping through a text with it projects nothing but the new tokens.

    Made by `XLNetModel.project_mems`, given as `mems`, returned by a call that was given one. It belongs to the
    weights it was made with, and gradients do not flow through it. Without gradients, steps write into a buffer twice
    as long as the memory, of which each memory is a window: what a step costs does not grow with M but by its
    attention. A memory stays as it is whatever is made of it later, also when it is used twice.

    Attributes:
        keys, values: per layer (B, H, M, D).
        rel_keys: per layer the projected positions of distances `reach` .. -(behind - 1), (H, P, D), or (2, H, P, D)
            with bi_data. Calls that need more make a larger table.
    """

    keys: list[Tensor]
    values: list[Tensor]
    rel_keys: list[Tensor] = field(default_factory=list)
    reach: int = -1
    behind: int = 0
    written: Tensor | None = None  # on the CPU, where writing into the buffers of keys and values has come to

    @property
    def length(self) -> int:
        """M."""
        return self.keys[0].shape[2]

    def of_layer(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Key, value and rel_key table of one layer."""
        return self.keys[index], self.values[index], self.rel_keys[index] if self.rel_keys else None


def _kept(old: int, new: int, mem_len: int | None, reuse_len: int | None) -> tuple[int, int, int]:
    """Of `old` and `new` positions, how many last old ones stay, and which new ones come: from where on, how many."""
    count = min(reuse_len, new) if reuse_len else new
    first = max(0, count - mem_len) if mem_len else 0
    count -= first
    return min(old, mem_len - count) if mem_len else old, first, count


def keep(previous: Tensor | None, new: Tensor, mem_len: int | None, reuse_len: int | None, dim: int) -> Tensor:
    """The memory after a segment: its first `reuse_len` positions after the old ones, the last `mem_len` of all."""
    old = 0 if previous is None else previous.shape[dim]
    stay, first, count = _kept(old, new.shape[dim], mem_len, reuse_len)
    new = new.narrow(dim, first, count)
    if previous is not None:
        new = torch.cat([previous.narrow(dim, old - stay, stay), new], dim)
    return new.detach()


_CLAIM = Lock()


class Extension:
    """The next memory of a `ProjectedMemory`, layer by layer: its keys and values after a segment of `length`.

    They go behind those of the memory, in its buffers, if nobody has written there and there is room; else into new
    buffers, twice as long. A step copies what it adds, and once in M steps the M positions that stay.
    """

    def __init__(self, memory: ProjectedMemory, length: int, mem_len: int | None, reuse_len: int | None) -> None:
        self._kept = mem_len, reuse_len
        self._buffered = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        self.written: Tensor | None = None
        if not self._buffered:
            return
        self.stay, self.first, self.count = _kept(memory.length, length, mem_len, reuse_len)
        self._in_place = self._claim(memory)
        self.written = memory.written if self._in_place else torch.tensor(self.stay + self.count, device="cpu")

    def _claim(self, memory: ProjectedMemory) -> bool:
        """Takes the place behind this memory, if it is the last one in its buffers and the next fits in there."""
        written, key, every = memory.written, memory.keys[0], (*memory.keys, *memory.values)
        if written is None or written.device.type != "cpu":
            return False
        if any(x.is_inference() for x in every) and not torch.is_inference_mode_enabled():
            return False
        heads, length, width = key.shape[1:]
        offset, strides = key.storage_offset(), key.stride()
        if strides != (heads * strides[1], strides[1], width, 1) or len({x.data_ptr() for x in every}) < len(every):
            return False
        if any((x.storage_offset(), x.stride(), x.shape) != (offset, strides, key.shape) for x in every):
            return False
        end = offset // width + length
        with _CLAIM:  # another thread may go on from the same memory
            if int(written) != end or end + self.count > strides[1] // width:
                return False
            written.add_(self.count)
        return True

    def extend(self, old: Tensor, new: Tensor) -> Tensor:
        """Keys, or values, (B, H, M, D) of the next memory, from those of the memory and of the segment."""
        if not self._buffered:
            return keep(old, new, *self._kept, 2)
        batch, heads, length, width = old.shape
        size = (batch, heads, self.stay + self.count, width)
        if self._in_place:
            begin = old.storage_offset() + (length - self.stay) * width
            # .data: who has saved `old` for gradients need not hear of what is written behind it
            kept = old.data.as_strided(size, old.stride(), begin)
        else:
            kept = new.new_empty(batch, heads, 2 * size[2], width)[:, :, : size[2]]
            kept[:, :, : self.stay] = old[:, :, length - self.stay :]
        kept[:, :, self.stay :] = new[:, :, self.first : self.first + self.count]
        return kept
