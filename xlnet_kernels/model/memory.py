"""Memory of segment recurrence: layer inputs or, at inference, projected keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from .._torch import register


@register
@dataclass(eq=False)
class ProjectedMemory:
    """Memory projected once, so that stepping through a text projects only the new tokens.

    `XLNetModel.project_mems` makes it; a call with it as `mems` returns the next. It is valid for the weights it was
    made with, and gradients do not flow through it. Without gradients, steps write into a buffer twice as long as the
    memory, and each memory is a window of it. So only the attention of a step grows with M. A memory is never changed,
    even if used twice.

    Attributes:
        keys, values: per layer (B, H, M, D).
        rel_keys: per layer the projected positions of distances `reach` .. -(behind - 1), (H, P, D), or (2, H, P, D)
            with bi_data. Calls beyond these distances make a larger table.
    """

    keys: list[Tensor]
    values: list[Tensor]
    rel_keys: list[Tensor] = field(default_factory=list)
    reach: int = -1
    behind: int = 0
    written: Tensor | None = None  # on the CPU, the end of the written part of the buffers

    @property
    def length(self) -> int:
        """M, the number of memory positions."""
        return self.keys[0].shape[2]

    def of_layer(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Key, value and rel_key table of one layer."""
        return self.keys[index], self.values[index], self.rel_keys[index] if self.rel_keys else None


def _kept(old: int, new: int, mem_len: int | None, reuse_len: int | None) -> tuple[int, int, int]:
    """The number of last `old` positions that stay, and the first index and number of the `new` positions to add."""
    count = min(reuse_len, new) if reuse_len else new
    first = max(0, count - mem_len) if mem_len else 0
    count -= first
    return min(old, mem_len - count) if mem_len else old, first, count


def keep(previous: Tensor | None, new: Tensor, mem_len: int | None, reuse_len: int | None, dim: int) -> Tensor:
    """Memory after a segment: old positions and the segment's first `reuse_len`, cut to the last `mem_len`."""
    old = 0 if previous is None else previous.shape[dim]
    stay, first, count = _kept(old, new.shape[dim], mem_len, reuse_len)
    new = new.narrow(dim, first, count)
    if previous is not None:
        new = torch.cat([previous.narrow(dim, old - stay, stay), new], dim)
    return new.detach()


_CLAIM = Lock()


class Extension:
    """Builder of the next `ProjectedMemory`, layer by layer: its keys and values after a segment of `length`.

    They go into the memory's buffers, after its positions, if that place is unwritten and large enough; else into new
    buffers, twice as long. A step copies its new positions, and every M steps the M kept positions.
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
        """Claim the place after this memory, if it is the last in its buffers and the next fits; returns success."""
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
        # Locked, because another thread may continue from the same memory.
        with _CLAIM:
            if int(written) != end or end + self.count > strides[1] // width:
                return False
            written.add_(self.count)
        return True

    def extend(self, old: Tensor, new: Tensor) -> Tensor:
        """Keys, or values, (B, H, M, D) of the next memory, from those of this memory and the segment."""
        if not self._buffered:
            return keep(old, new, *self._kept, 2)
        batch, heads, length, width = old.shape
        size = (batch, heads, self.stay + self.count, width)
        if self._in_place:
            begin = old.storage_offset() + (length - self.stay) * width
            # .data, because writing after `old` must not invalidate tensors saved for gradients.
            kept = old.data.as_strided(size, old.stride(), begin)
        else:
            kept = new.new_empty(batch, heads, 2 * size[2], width)[:, :, : size[2]]
            kept[:, :, : self.stay] = old[:, :, length - self.stay :]
        kept[:, :, self.stay :] = new[:, :, self.first : self.first + self.count]
        return kept
