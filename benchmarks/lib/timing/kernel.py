"""Predicted time of a kernel: its main loop and what is around it, simulated for the blocks of one multiprocessor.

Simplified: all warps take the usual way, which is the most frequent successor at each branch. Warps without products
(a producer of a kernel with warpgroups) are left out, and the data that they load are there in time. Loads come from
the level-2 cache. Banks of registers, fetching of instructions and power do not limit anything. All blocks of a
multiprocessor begin together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from compiled.sass import PRODUCTS, main_loop, successors, way
from lib import bounds
from lib.machine.machine_code import MachineCode
from lib.timing.operations import LATENCIES, operations
from lib.timing.simulator import Deadlock, Multiprocessor, Operation

# Limits of a multiprocessor (CUDA C++ programming guide, technical specifications by compute capability).
REGISTERS, THREADS, BLOCKS = 65536, 2048, 32
SHARED_MEMORY = {80: 164 * 1024, 90: 228 * 1024}
RESERVED = 1024  # bytes of shared memory of each block
PASSES = (3, 7)  # of the loop, simulated; time is linear between


@dataclass(frozen=True)
class Pace:
    """Cycles of `resident` blocks that run side by side: of one pass of the loop by each, and of all around it."""

    resident: int
    loop: float
    around: float
    warps: int  # of a block, those with products
    products: int  # of a warp in one pass
    instructions: tuple[int, int]  # of a warp: in one pass, and around the loop


@dataclass(frozen=True)
class Work:
    """The executions of all blocks of a launch."""

    blocks: float
    products: float  # of all warps
    instructions: float


def resident_blocks(code: MachineCode, threads: int, dynamic_bytes: int, architecture: int) -> int:
    """Blocks of a kernel that fit on a multiprocessor."""
    registers = -(-code.registers // 8) * 8 * threads
    shared = code.shared_bytes + dynamic_bytes + RESERVED
    return min(REGISTERS // registers, SHARED_MEMORY[architecture] // shared, THREADS // threads, BLOCKS)


def usual_way(code: MachineCode, often: Sequence[float]) -> tuple[list[int], list[int], list[int]] | None:
    """Instructions before the main loop, of one pass of it, and after it; None without such a loop."""
    instructions = [step.instruction for step in code.steps]
    leads = successors(instructions)
    loop = main_loop(instructions, leads) if instructions else None
    if loop is None or not any(instructions[i].name.startswith(PRODUCTS) for i in loop[2]):
        return None

    def usual(numbers: list[int], key) -> int:
        return max(numbers, key=lambda number: (often[number], -key(number)))

    head, latch, inside = loop
    outside = set(range(len(instructions))) - inside
    before = way(0, head, outside | {head}, leads, usual)[:-1] if head else []
    ends = [i for i in outside if instructions[i].name.startswith("EXIT")]
    leaves = [j for i in inside for j in leads[i] if j in outside and j not in before]
    after: list[int] = []
    for start in sorted(leaves, key=lambda j: -often[j])[:1]:
        end = max((i for i in ends if i >= start), key=lambda i: often[i], default=start)
        after = way(start, end, outside, leads, usual)
    return before, way(*loop, leads, usual), after


@functools.cache
def _simulated(
    before: tuple[Operation, ...], loop: tuple[Operation, ...], after: tuple[Operation, ...], warps: int, blocks: int,
    architecture: int,
) -> tuple[float, float]:  # fmt: skip
    """Cycles of a pass, and of what is around all passes."""
    few, many = (
        Multiprocessor([*before, *loop * passes, *after], warps, blocks, LATENCIES[architecture].barrier).run()
        for passes in PASSES
    )
    of_pass = (many - few) / (PASSES[1] - PASSES[0])
    return of_pass, few - PASSES[0] * of_pass


def pace(code: MachineCode, often: Sequence[float], threads: int, dynamic_bytes: int, architecture: int) -> Pace | None:
    """How fast a kernel's blocks go; None where there is no loop with products, or its warps wait for ever.

    `often`: see MachineCode.often.
    """
    parts = usual_way(code, often)
    resident = resident_blocks(code, threads, dynamic_bytes, architecture)
    if parts is None or resident == 0:
        return None
    names = [[code.steps[i].instruction.name for i in part] for part in parts]
    warps, products = threads // bounds.WARP, sum(map(is_product, names[1]))
    if any("SETMAXREG" in step.instruction.name for step in code.steps):  # one warpgroup of three loads
        warps -= 4
    done = [tuple(operations([code.steps[i] for i in part], architecture)) for part in parts]
    try:
        of_pass, around = _simulated(*done, warps, resident, architecture)
    except Deadlock:
        return None
    return Pace(resident, of_pass, around, warps, products, (len(names[1]), len(names[0]) + len(names[2])))


def is_product(name: str) -> bool:
    return name.startswith(("HMMA", "HGMMA"))


def cycles(pace: Pace, work: Work) -> float:
    """Cycles of one multiprocessor for all blocks of a launch, many enough that it is never idle.

    Instructions beside the usual way, such as those of masked tiles, take as long as those of the loop.
    """
    passes = work.products / pace.products  # of warps
    usual = passes * pace.instructions[0] + work.blocks * pace.warps * pace.instructions[1]
    of_instruction = pace.loop / (pace.resident * pace.warps * pace.instructions[0])
    of_loop = passes / pace.warps * pace.loop / pace.resident
    return of_loop + work.blocks * pace.around / pace.resident + max(work.instructions - usual, 0) * of_instruction
