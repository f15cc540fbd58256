"""Predicted time of a kernel: the way of an average warp, simulated for the blocks of one multiprocessor.

Simplified: all warps of a block go the same way; what it lacks of all products is as fast. Warpgroups that load for
others are left out, and what they load is there in time. Loads come from the level-2 cache; instructions of a launch
share the sectors that it counted as if each lane had an address of its own. A product of warpgroups reads its operands
from shared memory in one burst, when its turn comes, instead of all the time that it takes. Banks of registers and of
shared memory, fetching of instructions and power do not limit anything. Blocks of a multiprocessor begin together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lib import bounds
from lib.machine.machine import Counts
from lib.machine.machine_code import BlockCount, MachineCode
from lib.timing.flow import average_way
from lib.timing.operations import LATENCIES, operations
from lib.timing.simulator import Deadlock, Multiprocessor, Operation

# Limits of a multiprocessor (CUDA C++ programming guide, technical specifications by compute capability).
REGISTERS, THREADS, BLOCKS = 65536, 2048, 32
SHARED_OF_MULTIPROCESSOR = {80: 164 * 1024, 90: 228 * 1024}
RESERVED = 1024  # bytes of shared memory of each block
PRODUCTS = {"HMMA", "HGMMA"}


@dataclass(frozen=True)
class Prediction:
    """Cycles in which `resident` blocks, which run side by side, end."""

    resident: int
    cycles: float


def resident_blocks(code: MachineCode, threads: int, dynamic_bytes: int, architecture: int) -> int:
    """Blocks of a kernel that fit on a multiprocessor."""
    registers = -(-code.registers // 8) * 8 * threads
    shared = code.shared_bytes + dynamic_bytes + RESERVED
    return min(REGISTERS // registers, SHARED_OF_MULTIPROCESSOR[architecture] // shared, THREADS // threads, BLOCKS)


@dataclass(frozen=True)
class Way:
    """Instructions of an average warp of a kernel, and the number of warps that issue them on a multiprocessor."""

    steps: tuple[int, ...]  # numbers in the machine code
    operations: tuple[Operation, ...]
    warps: int  # of a block, without those that load for others
    resident: int  # blocks


@functools.lru_cache(maxsize=32)  # the plain kernel's launches are asked for twice
def _simulated(trace: tuple[Operation, ...], warps: int, blocks: int, architecture: int) -> float:
    return Multiprocessor(trace, warps, blocks, LATENCIES[architecture].barrier).run()


def way_of(
    code: MachineCode, counts: Counts, grid: int, threads: int, dynamic_bytes: int, architecture: int
) -> Way | None:
    """The way of a kernel's warps; None if no block fits, or if counts give no way. `counts`: of all the grid."""
    resident = resident_blocks(code, threads, dynamic_bytes, architecture)
    warps = threads // bounds.WARP
    blocks = code.block_counts(counts.lines)
    try:
        way = average_way(code.steps, blocks, grid * warps) if code.steps else None
    except np.linalg.LinAlgError:  # counts that balance in no way, or in many
        return None
    if way is None or resident == 0:
        return None
    if any("SETMAXREG" in step.instruction.name for step in code.steps):  # the first warpgroup loads
        warps -= 4
    of_code = with_sectors(operations_of(code, counts, architecture), blocks, counts, architecture)
    return Way(tuple(way), tuple(of_code[i] for i in way), warps, resident)


def operations_of(code: MachineCode, counts: Counts, architecture: int) -> list[Operation]:
    """All operations of a kernel. One under a condition, whose line of PTX never ran, is issued without effect."""
    found = operations(code.steps, architecture)
    for i, step in enumerate(code.steps):
        if step.instruction.predicate and code.is_one_for_one(step) and not counts.lines.get(step.line):
            found[i] = dataclasses.replace(
                found[i], results=None, operands=None, pipe="", units=(), latency=0.0, group="", closes="", barrier=None
            )
    return found


def predict(
    code: MachineCode, counts: Counts, grid: int, threads: int, dynamic_bytes: int, architecture: int
) -> Prediction | None:
    """How long blocks of a kernel take; None if there is no way, or if its warps wait for ever. Arguments: way_of's."""
    way = way_of(code, counts, grid, threads, dynamic_bytes, architecture)
    if way is None:
        return None
    try:
        cycles = _simulated(way.operations, way.warps, way.resident, architecture)
    except Deadlock:
        return None
    names = Counter(code.steps[i].instruction.name.split(".")[0] for i in way.steps)
    executed = code.executed(code.weights(counts.lines), counts.lines)
    return Prediction(way.resident, cycles * _more(executed, names, grid * way.warps))


class Watched(Multiprocessor):
    """A multiprocessor that keeps the cycles from a warp's last instruction to the one at each place of its way."""

    def __init__(self, way: Way, architecture: int) -> None:
        super().__init__(way.operations, way.warps, way.resident, LATENCIES[architecture].barrier)
        self.waits = [0.0] * len(way.operations)  # of an average warp

    def _issue(self, warp, now: float) -> None:
        if warp.position:
            self.waits[warp.position] += (now - warp.issued) / len(self.warps)
        super()._issue(warp, now)


def waits(way: Way, architecture: int) -> dict[int, float]:
    """Cycles that an average warp waits before each instruction, by its number; all of them make the warp's time.

    Raises:
        Deadlock: its warps wait for ever.
    """
    watched = Watched(way, architecture)
    watched.run()
    found: dict[int, float] = {}
    for step, cycles in zip(way.steps, watched.waits, strict=True):
        found[step] = found.get(step, 0.0) + cycles
    return found


def with_sectors(
    of_code: Sequence[Operation], blocks: Sequence[BlockCount], counts: Counts, architecture: int
) -> list[Operation]:
    """Operations that all together hold the level-2 cache, and atomic additions, for the sectors that were counted.

    Each has its share by what it would take alone, if all of its lanes had addresses beside each other.
    """
    gpu = bounds.GPUS[architecture]
    needed = {
        "level-2 cache": (counts.global_sectors_read + counts.global_sectors_written) / gpu.sectors,
        "atomics": counts.atomic_sectors / gpu.atomics,
    }
    assumed: Counter[str] = Counter()
    for block in blocks:
        for operation in of_code[block.first : block.end]:
            for unit, held in operation.units:
                assumed[unit] += block.times * held
    share = {unit: cycles / assumed[unit] for unit, cycles in needed.items() if assumed[unit]}

    def scaled(operation: Operation) -> Operation:
        units = tuple((unit, held * share.get(unit, 1.0)) for unit, held in operation.units)
        return dataclasses.replace(operation, units=units)

    return [scaled(operation) for operation in of_code]


def _more(executed: Counter[str], on_way: Counter[str], warps: int) -> float:
    """Products of all warps for one on their ways, or instructions where there are none: the rest is as fast."""
    for names in (PRODUCTS, set(on_way)):
        passed = sum(on_way[name] for name in names) * warps
        total = sum(executed[name] for name in names) if names == PRODUCTS else sum(executed.values())
        if passed and total:
            return total / passed
    return 1.0
