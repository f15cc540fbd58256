"""Segment recurrence: what is kept of a segment, as layer inputs or, at inference, as projected keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._torch import register


@register
@dataclass(eq=False)
class ProjectedMemory:
    """Memory that is projected once: stepping through a text with it projects nothing but the new tokens.

    Made by `XLNetModel.project_mems`, given as `mems`, returned by a call that was given one. It belongs to the
    weights it was made with, and gradients do not flow through it.

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

    @property
    def length(self) -> int:
        """M."""
        return self.keys[0].shape[2]

    def of_layer(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Key, value and rel_key table of one layer."""
        return self.keys[index], self.values[index], self.rel_keys[index] if self.rel_keys else None


def keep(previous: Tensor | None, new: Tensor, mem_len: int | None, reuse_len: int | None, dim: int) -> Tensor:
    """The memory after a segment: its first `reuse_len` positions after the old ones, the last `mem_len` of all."""
    if reuse_len:
        new = new.narrow(dim, 0, min(reuse_len, new.shape[dim]))
    if mem_len:
        new = new.narrow(dim, max(0, new.shape[dim] - mem_len), min(mem_len, new.shape[dim]))
    if previous is not None:
        old = previous.shape[dim]
        stay = min(old, mem_len - new.shape[dim]) if mem_len else old
        new = torch.cat([previous.narrow(dim, old - stay, stay), new], dim)
    return new.detach()
