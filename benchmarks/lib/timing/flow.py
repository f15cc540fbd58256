"""The way of an average warp through a kernel, from how often its basic blocks were counted.

Counts of blocks are estimates. How often each branch goes either way is what fits them best of all that balances: as
many warps come to a block as leave it, and all warps come to the first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from compiled.control_codes import Step
from compiled.sass import successors
from lib.machine.machine_code import BlockCount

LONGEST = 500_000  # instructions of a warp
SPIN = 16  # instructions, at most, of a loop that waits for a barrier in memory
SURE = 4.0  # how much more a count weighs that is of one instruction of PTX
FEW = 0.1  # executions by a warp, below which errors are no longer relative
ROUNDS = 15
EQUAL = 1e-3  # relative difference of shares below which errors of the flows would decide
CLOSE = 0.01  # relative error below which a smaller one is no better

Edge = tuple[int, int]  # block, block that follows


def average_way(steps: Sequence[Step], blocks: Sequence[BlockCount], warps: int) -> list[int] | None:
    """Numbers of the instructions that an average warp executes, in order; None if it does not end.

    At a branch the side follows that lags behind: whose turns so far, and one more, are the least share of all that it
    takes. So loops turn, and sides are taken, as often as on average. Loops that wait for memory turn once.
    """
    edges, waiting = _edges(steps, blocks)
    flows = balanced(edges, blocks, warps, waiting)
    turns = dict.fromkeys(edges, 0)
    after: dict[int, list[Edge]] = {}
    for edge in sorted(edges):  # of equal ones a loop turns
        after.setdefault(edge[0], []).append(edge)

    def share(edge: Edge) -> float:
        return (turns[edge] + 1) / flows[edge] if flows[edge] > 1e-6 * warps else math.inf

    found: list[int] = []
    block = 0
    while len(found) < LONGEST:
        found += range(blocks[block].first, blocks[block].end)
        if block not in after:
            return found
        least = min(map(share, after[block]))
        edge = next(edge for edge in after[block] if share(edge) <= least * (1 + EQUAL))
        turns[edge] += 1
        block = edge[1]
    return None


def _edges(steps: Sequence[Step], blocks: Sequence[BlockCount]) -> tuple[list[Edge], set[int]]:
    """From each block to those that may follow it, without the way back to a test of a barrier in memory.

    Also the blocks that such a way leads to or from.
    """
    number = {block.first: i for i, block in enumerate(blocks)}
    leads = successors([step.instruction for step in steps])

    def spins(branch: int, to: int) -> bool:
        near = to <= branch < to + SPIN
        return near and any("PHASECHK" in step.instruction.name for step in steps[to : branch + 1])

    edges, waiting = [], set()
    for i, block in enumerate(blocks):
        for j in leads[block.end - 1]:
            if spins(block.end - 1, j):
                waiting |= {i, number[j]}
            else:
                edges.append((i, number[j]))
    return edges, waiting


def balanced(
    edges: Sequence[Edge], blocks: Sequence[BlockCount], warps: int, unknown: Collection[int] = ()
) -> dict[Edge, float]:
    """How often all warps take each edge: the least sum of the blocks' relative errors, under balance of each block.

    Sums of absolute errors, to avoid that a wrong count among right ones has a say: squares, weighed again and again by
    the errors. Edges that come out negative are left out. `unknown`: blocks that wait, whose counts say nothing; nor do
    those of 0 that are not sure, as of code that the assembler adds.
    """
    first = [
        (SURE if block.sure else 1.0) * math.log2(1 + block.end - block.first) / max(block.times, FEW * warps)
        for block in blocks
    ]
    says_nothing = {i for i, block in enumerate(blocks) if block.times == 0 and not block.sure} | set(unknown)
    weight = np.array([0.0 if i in says_nothing else known for i, known in enumerate(first)])
    used, errors = list(edges), np.ones(len(blocks))
    flows: dict[Edge, float] = {}
    for _ in range(ROUNDS if edges else 0):
        found, through = _least_squares(used, blocks, warps, weight / np.sqrt(np.maximum(errors, CLOSE)))
        errors = weight * abs(through - [block.times for block in blocks])
        flows = dict(zip(used, found, strict=True))
        used = [edge for edge in used if flows[edge] > -1e-3 * warps]
    return {edge: max(flows.get(edge, 0.0), 0.0) for edge in edges}


def _least_squares(
    edges: Sequence[Edge], blocks: Sequence[BlockCount], warps: int, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Flows of the edges and through the blocks."""
    comes, leaves = (np.zeros((len(blocks), len(edges))) for _ in range(2))
    for column, (block, following) in enumerate(edges):
        leaves[block, column] = comes[following, column] = 1
    from_outside = np.zeros(len(blocks))
    from_outside[0] = warps
    inner = leaves.any(axis=1)  # blocks after which a warp goes on
    balance = (leaves - comes)[inner]
    wanted = comes * weight[:, None]
    due = (np.array([block.times for block in blocks]) - from_outside) * weight
    ridge = 1e-9 * np.eye(len(edges)) / warps**2
    nearly = -1e-9 * np.eye(len(balance))  # so that balances that follow from others do no harm
    system = np.block([[wanted.T @ wanted + ridge, balance.T], [balance, nearly]])
    found = np.linalg.solve(system, np.concatenate([wanted.T @ due, from_outside[inner]]))[: len(edges)]
    return found, comes @ found + from_outside
