"""Blocks of a causal call on the multiprocessors of a GPU, simulated: each begins where one has ended first."""

from __future__ import annotations

import ctypes
import functools
import heapq
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lib.simt import simt_build

FORWARD, BACKWARD, ORDERED = "forward", "backward", "ordered backward"


class Item(NamedTuple):
    tile: int
    b: int
    h: int


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(simt_build.library([Path(__file__).with_suffix(".cpp")], "block_order")))


def block_items(
    kernel: str, batch: int, heads: int, length: int, tiles: int, head_dim: int = 64
) -> tuple[list[Item], int]:
    """The tile and head of each block of the CUDA kernels, in bfloat16; how many heads begin together."""
    count = tiles * batch * heads
    found = (ctypes.c_int * (3 * count))()
    sizes = [ctypes.c_int64(size) for size in (batch, heads, length, length, head_dim, tiles)]
    together = _library().block_items(kernel != FORWARD, kernel == ORDERED, *sizes, found)
    return [Item(*found[3 * i : 3 * i + 3]) for i in range(count)], together


def one_head_after_the_other(batch: int, heads: int, tiles: int) -> list[Item]:
    """The order of a grid whose first dimension is the tiles."""
    return [Item(tile, b, h) for b in range(batch) for h in range(heads) for tile in range(tiles)]


def causal_cost(kernel: str, tile: int, tiles: int) -> int:
    """Tiles of keys that a tile of rows sees, or of rows that see one of keys."""
    return tile + 1 if kernel == FORWARD else tiles - tile


def makespan(costs: Iterable[float], slots: int) -> float:
    """When the last block ends."""
    free = [0.0] * slots
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def efficiency(kernel: str, items: list[Item], tiles: int, slots: int) -> float:
    """The work's share of what all slots could do until the last block ends."""
    costs = [causal_cost(kernel, item.tile, tiles) for item in items]
    return sum(costs) / (slots * makespan(costs, slots))
