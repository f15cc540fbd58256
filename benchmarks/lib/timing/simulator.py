"""One multiprocessor, simulated: warps that issue a list of operations on four schedulers, by their control codes.

A warp issues in order: when the stall of its last operation is over, the scoreboards that the next one waits for are
clear, and the operation's pipe is free. Operations of a queue leave their scheduler at once. They queue for all of
their units at the same time, so that no unit idles for an operation that waits elsewhere. Completion of each operation
is known when it is issued, so that only barriers need other warps.

Assumed, as no source at hand says it: the scheduler goes on with its last warp until an operation yields, and then
takes the least recently issued one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

SCHEDULERS = 4
SCOREBOARDS = 6
# Units that the schedulers share; each scheduler has its own of all others.
SHARED_UNITS = ("shared memory", "level-2 cache", "atomics")


@dataclass(frozen=True)
class Operation:
    """An instruction, as a warp issues it."""

    stall: int = 1  # cycles until the warp's next one
    yields: bool = False
    waits: tuple[int, ...] = ()  # scoreboards
    results: int | None = None  # scoreboard that is set until results are there
    operands: int | None = None  # scoreboard that is set until operands are read
    pipe: str = ""  # of its scheduler, must be free when it issues
    held: float = 0.0  # cycles for which it holds the pipe
    units: tuple[tuple[str, float], ...] = ()  # that it queues for at once, and cycles for which it holds each
    latency: float = 0.0  # cycles from when its last unit begins, or from issue, until results are there
    group: str = ""  # kind of asynchronous operations that it belongs to: they are waited for in groups
    closes: str = ""  # kind whose open group it ends
    leaves: tuple[str, int] | None = None  # kind, and how many groups of it may run when it issues
    barrier: tuple[str, int, bool] | None = None  # name, warps that must arrive (0: the block's), whether it waits


@dataclass
class _Groups:
    """Completion of asynchronous operations of one kind and warp."""

    open: float = 0.0
    closed: list[float] = field(default_factory=list)


@dataclass
class _Warp:
    number: int  # in its block
    block: int
    scheduler: int
    position: int = 0
    ready: float = 0.0  # when it may issue, as far as its own past decides
    issued: float = -1.0  # when it issued last
    blocked: bool = False  # by a barrier
    scoreboards: list[float] = field(default_factory=lambda: [0.0] * SCOREBOARDS)
    groups: dict[str, _Groups] = field(default_factory=dict)


class Deadlock(Exception):
    """Warps wait for a barrier that the others do not reach."""


class Multiprocessor:
    """Blocks of one kernel that begin together.

    Args:
        operations: what each warp issues, to its end.
        warps: of a block.
        blocks: on the multiprocessor.
        barrier_latency: cycles from the last arrival at a barrier.
    """

    def __init__(self, operations: Sequence[Operation], warps: int, blocks: int, barrier_latency: float) -> None:
        self.operations, self.warps_of_block, self.barrier_latency = operations, warps, barrier_latency
        self.warps = [_Warp(i % warps, i // warps, i % SCHEDULERS) for i in range(warps * blocks)]
        self.pipes: list[dict[str, float]] = [{} for _ in range(SCHEDULERS)]
        self.units: list[dict[str, float]] = [{} for _ in range(SCHEDULERS)]
        self.shared: dict[str, float] = {}
        self.arrived: dict[tuple, list[_Warp]] = {}
        self.last: list[_Warp | None] = [None] * SCHEDULERS
        self.to_try: list[tuple[float, int]] = [(0.0, number) for number in range(SCHEDULERS)]

    def run(self) -> float:
        """Cycles until the last warp has issued its last operation.

        Raises:
            Deadlock: no warp can issue, and some have not ended.
        """
        of_scheduler: list[list[_Warp]] = [
            [warp for warp in self.warps if warp.scheduler == number] for number in range(SCHEDULERS)
        ]
        end, tried = 0.0, [-1.0] * SCHEDULERS
        while self.to_try:
            now, number = heapq.heappop(self.to_try)
            if now <= tried[number]:
                continue
            chosen, soonest = self._choose(of_scheduler[number], now, number)
            if chosen is None:
                if soonest < math.inf:
                    heapq.heappush(self.to_try, (math.ceil(soonest), number))
                continue
            tried[number] = end = now
            self._issue(chosen, now)
            if chosen.position == len(self.operations):
                of_scheduler[number].remove(chosen)
            heapq.heappush(self.to_try, (now + 1, number))
        if any(of_scheduler):
            raise Deadlock
        return end + 1

    def _choose(self, warps: list[_Warp], now: float, number: int) -> tuple[_Warp | None, float]:
        """The warp to issue now, or none and when there may be one.

        The last one until it yields, else the least recently issued.
        """
        soonest, ready = math.inf, []
        pipes = self.pipes[number]
        for warp in warps:
            if warp.blocked:
                continue
            at = max(warp.ready, pipes.get(self.operations[warp.position].pipe, 0.0))
            if at <= now:
                ready.append(warp)
            elif at < soonest:
                soonest = at
        if not ready:
            return None, soonest
        last = self.last[number]
        if last is not None and last in ready and not self.operations[last.position - 1].yields:
            return last, now
        return min(ready, key=lambda warp: warp.issued), now

    def _issue(self, warp: _Warp, now: float) -> None:
        operation, number = self.operations[warp.position], warp.scheduler
        warp.position, warp.issued, self.last[number] = warp.position + 1, now, warp
        if operation.pipe:
            self.pipes[number][operation.pipe] = now + operation.held
        begin, end = now, now
        for unit, held in operation.units:
            free = self.shared if unit in SHARED_UNITS else self.units[number]
            at = max(now, free.get(unit, 0.0))
            free[unit] = at + held
            begin, end = max(begin, at), max(end, at + held)
        done = max(end, begin + operation.latency)
        for scoreboard, at in ((operation.results, done), (operation.operands, end)):
            if scoreboard is not None:
                warp.scoreboards[scoreboard] = max(warp.scoreboards[scoreboard], at)
        if operation.group:
            group = warp.groups.setdefault(operation.group, _Groups())
            group.open = max(group.open, done)
        if operation.closes:
            group = warp.groups.setdefault(operation.closes, _Groups())
            group.closed.append(group.open)
            group.open = 0.0
        warp.ready = self._ready(warp, now + max(operation.stall, 1))
        if operation.barrier:
            self._arrive(warp, operation.barrier, now)

    def _ready(self, warp: _Warp, at: float) -> float:
        """When its next operation may issue, at the earliest `at`."""
        if warp.position == len(self.operations):
            return at
        following = self.operations[warp.position]
        for scoreboard in following.waits:
            at = max(at, warp.scoreboards[scoreboard])
        if following.leaves is not None:
            kind, most = following.leaves
            closed = warp.groups.get(kind, _Groups()).closed
            at = max([at, *closed[: len(closed) - most]]) if most < len(closed) else at
            del closed[: max(len(closed) - most, 0)]
        return at

    def _arrive(self, warp: _Warp, barrier: tuple[str, int, bool], now: float) -> None:
        """Warps that wait go on when enough have arrived; with fewer than a block's, those with numbers beside it."""
        name, count, waits = barrier
        count = min(count or self.warps_of_block, self.warps_of_block)
        key = warp.block, name, warp.number // count
        arrived = self.arrived.setdefault(key, [])
        arrived.append(warp)
        warp.blocked = waits
        if len(arrived) == count:
            del self.arrived[key]
            for other in arrived:
                if other.blocked:
                    other.blocked, other.ready = False, max(other.ready, now + self.barrier_latency)
                    heapq.heappush(self.to_try, (math.ceil(other.ready), other.scheduler))
