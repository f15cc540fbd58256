"""How well causal calls fill a GPU by the order of their blocks, simulated: no GPU is needed.

    python benchmarks/block_order.py

Blocks of 128 rows or keys, of a cost proportional to the pairs that are seen, on 132 multiprocessors. Each has one
block at a time (kernels of sm_90a) or two.
"""

from __future__ import annotations

from lib import block_order

CALLS = ((512, 16), (1024, 64), (2048, 16), (2048, 64), (4096, 64))  # length, B H
BLOCK, PROCESSORS = 128, 132


def rows() -> list[dict]:
    found = []
    for kernel in (block_order.FORWARD, block_order.BACKWARD):
        for length, heads in CALLS:
            tiles = length // BLOCK
            before = block_order.one_head_after_the_other(1, heads, tiles)
            items, together = block_order.block_items(kernel, 1, heads, length, tiles)
            for at_once in (1, 2):
                efficiencies = {
                    name: round(block_order.efficiency(kernel, order, tiles, PROCESSORS * at_once), 2)
                    for name, order in (("one head after the other", before), ("heads fastest", items))
                }
                call = {"kernel": kernel, "length": length, "heads": heads, "together": together, "at once": at_once}
                found.append(call | efficiencies)
    return found


if __name__ == "__main__":
    for row in rows():
        print(*(f"{name}: {value}" for name, value in row.items()), sep="; ")
