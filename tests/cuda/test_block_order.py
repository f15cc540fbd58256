"""In which order blocks of the CUDA kernels begin, and what that is worth, simulated."""

from __future__ import annotations

import itertools

import pytest

from lib import block_order
from lib.block_order import BACKWARD, FORWARD, ORDERED, block_items, causal_cost, efficiency, one_head_after_the_other
from lib.simt import simt_build

pytestmark = pytest.mark.skipif(simt_build.COMPILER is None, reason=simt_build.NO_COMPILER)

KERNELS = (FORWARD, BACKWARD, ORDERED)
# batch, heads, length, tiles: one group, several of which the last is smaller, one head each, more than 65,535 of each
CALLS = {
    "one-tile": (1, 1, 5, 1),
    "one-group": (2, 3, 300, 3),
    "groups": (7, 11, 4096, 5),
    "a-head-each": (2, 3, 200_000, 4),
    "many-batches": (70_000, 1, 64, 1),
    "many-heads": (1, 70_000, 64, 1),
    "many-tiles": (1, 1, 70_000 * 64, 70_000),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("call", CALLS)
def test_every_tile_of_every_head_once(call, kernel):
    batch, heads, length, tiles = CALLS[call]
    items, _ = block_items(kernel, batch, heads, length, tiles)
    assert sorted(items) == list(itertools.product(range(tiles), range(batch), range(heads)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_of_all_heads_the_tiles_that_see_most_begin_first(kernel):
    items, together = block_items(kernel, 2, 3, 300, 3)
    costs = [causal_cost(kernel, item.tile, 3) for item in items]
    assert together == 6 and costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD])
def test_heads_of_a_group_fit_in_the_cache(kernel):
    """64 heads of 64, length 2048. One reads 768 KB; in backward it reads and adds to 1.75 MB."""
    items, together = block_items(kernel, 4, 16, 2048, 16)
    groups, most = (4, 21) if kernel == FORWARD else (8, 9)
    assert together == 64 // groups <= most
    for number in range(groups):
        group = items[number * 16 * together : (number + 1) * 16 * together]
        costs = [causal_cost(kernel, item.tile, 16) for item in group]
        assert len({item[1:] for item in group}) == together and costs == sorted(costs, reverse=True)


def test_blocks_that_add_in_order_begin_in_that_order():
    """Each waits for those of its head with earlier keys; of one head as few as possible run at once."""
    items, together = block_items(ORDERED, 4, 16, 2048, 16)
    assert together == 64
    assert [item.tile for item in items] == sorted(item.tile for item in items)


@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD])
@pytest.mark.parametrize("length, heads, before, after", [(2048, 16, 0.64, 0.96), (1024, 64, 0.81, 0.95)])
def test_causal_calls_fill_132_multiprocessors(kernel, length, heads, before, after):
    tiles = length // 128
    items, _ = block_items(kernel, 1, heads, length, tiles)
    assert efficiency(kernel, items, tiles, 132) >= after
    if kernel == FORWARD:
        assert efficiency(kernel, one_head_after_the_other(1, heads, tiles), tiles, 132) <= before


def test_makespan():
    assert block_order.makespan([1, 2, 3], 2) == 4 and block_order.makespan([3, 2, 1], 2) == 3
