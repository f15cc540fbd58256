"""Tile sizes, warps and pipeline stages of the kernels: a table, no search at run time.

Nothing in it is measured yet. The entries are those that compile with the fewest register spills among those that use
the widest matrix instructions, and fit into 99 KB of shared memory, so that they run on every GPU from sm_80 on;
tests/test_triton_compile.py holds the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    """BM query rows by BN keys is a tile; BM is at most 2 BN, and BN at least 32."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


# The classes that the table distinguishes: head width up to, dtype (bfloat16 stands for float16 too).
CLASSES = (
    (64, torch.bfloat16),
    (128, torch.bfloat16),
    (256, torch.bfloat16),
    (64, torch.float32),
    (256, torch.float32),
)
# kernel -> a configuration for each of CLASSES
_TABLE = {
    "forward": ((64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 1), (32, 32, 4, 1), (32, 32, 8, 1)),
    "rows": ((64, 32, 4, 2), (32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 4, 1), (32, 32, 8, 1)),
    "keys": ((64, 64, 4, 2), (32, 32, 8, 1), (16, 32, 8, 1), (32, 32, 4, 1), (16, 32, 8, 1)),
}
_INTERPRETED = Config(64, 64, 4, 1)  # few and large tiles


def choose(kernel: str, dtype: torch.dtype, width: int, interpreted: bool) -> Config:
    """The configuration of `kernel` ("forward", "rows" or "keys")."""
    if interpreted:
        return _INTERPRETED
    kind = torch.float32 if dtype == torch.float32 else torch.bfloat16
    index = next(index for index, (largest, of) in enumerate(CLASSES) if width <= largest and of == kind)
    return Config(*_TABLE[kernel][index])
