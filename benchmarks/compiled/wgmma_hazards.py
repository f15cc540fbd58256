"""Check of machine code: registers of a wgmma product that is not complete, or that no fence has handed over.

A product of a warpgroup (PTX wgmma.mma_async, machine code HGMMA) runs beside the code after it, until a wait for its
group. Until then nothing may write its factor in registers, or touch its accumulator. Assemblers from 12.8 on are
reported to break the first rule (Triton issue 11781). Between other writes of its registers and the product stands a
fence (PTX wgmma.fence, machine code WARPGROUP.ARRIVE).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .sass import Instruction, successors

Registers = frozenset[int]
MOST_GROUPS = 16  # that run at a time; more means that nothing waits for them
# Instructions without a register as their destination
NO_DESTINATION = (
    "ST", "RED", "LDGSTS", "BAR", "SYNCS.PHASECHK", "SYNCS.EXCH", "SYNCS.CCTL", "UTMA", "UBLKCP", "R2UR", "ISETP",
    "FSETP", "BRX", "HSETP2", "DSETP",
)  # fmt: skip
# Registers of destination, factors and sum of a product of one warp: PTX ISA, fragments of mma.m16n8k16 and m16n8k8
HMMA = {
    "HMMA.16816.F32": (4, 4, 2, 4), "HMMA.16816.F16": (2, 4, 2, 2), "HMMA.1688.F32.TF32": (4, 4, 2, 4),
    "HMMA.1684.F32.TF32": (4, 2, 1, 4), "HMMA.1688.F32": (4, 2, 1, 4), "HMMA.1688.F16": (2, 2, 1, 2),
}  # fmt: skip


class Product(NamedTuple):
    """Registers of a warpgroup's product."""

    factor: Registers  # empty if the product reads both factors from shared memory
    accumulator: Registers


class _Effect(NamedTuple):
    """One instruction: the registers that it uses, or its product."""

    reads: Registers
    writes: Registers
    product: Product | None
    ends_group: bool
    waits: int | None  # groups that may still run after it


def _span(first: str, count: int) -> Registers:
    return frozenset(range(int(first), int(first) + count))


def _widths(name: str, operands: int) -> tuple[int, ...]:
    """Registers of each operand, by the instruction's name; too many rather than too few."""
    if name.startswith("HMMA"):
        return next(widths for begin, widths in HMMA.items() if name.startswith(begin))
    # One register has the parity, although the barrier has 64 bits
    if name.startswith("SYNCS.PHASECHK"):
        return (1,) * operands
    # A shift of 64 bits has half of them in each register
    if name.startswith("SHF."):
        return (1,) * operands
    # Factors of IMAD.WIDE have one register, its sum has two
    if ".WIDE" in name:
        return (2, *(1,) * (operands - 2), 2)
    width = 1
    if re.search(r"\.128\b|\.M88\.4|\.MT88\.4|x4\b", name):
        width = 4
    elif name in ("CS2R", "LEPC") or re.search(r"^D[A-Z]|64\b|\.M88\.2|\.MT88\.2|x2\b", name):
        width = 2
    return (width,) * operands


def _effect(instruction: Instruction) -> _Effect:
    _, predicate, name, operands = instruction
    nothing: Registers = frozenset()
    if name.startswith("WARPGROUP.DEPBAR") and not predicate:
        found = re.search(r"0x([0-9a-f]+)", operands)
        return _Effect(nothing, nothing, None, False, int(found[1], 16) if found else 0)
    if name.startswith("HGMMA"):
        columns, result = re.search(r"64x(\d+)x\d+\.(F32|F16)", name).groups()
        destination, factor = (part.strip() for part in operands.split(",")[:2])
        in_registers = re.match(r"R(\d+)", factor)
        product = Product(
            _span(in_registers[1], 4) if in_registers else nothing,
            _span(destination[1:], int(columns) // (2 if result == "F32" else 4)),
        )
        return _Effect(nothing, nothing, product, "gsb0" in operands, None)
    seen = [nothing, nothing]
    # Registers in the order of the operands: the first outside of brackets is the destination
    destination_is_due = not name.startswith(NO_DESTINATION)
    parts = [part for part in operands.split(",") if not re.fullmatch(r"\s*!?U?P[T\d]\s*", part)]
    for part, width in zip(parts, _widths(name, len(parts)), strict=False):
        for bracket, register, wide in re.findall(r"(\[?)(?<![A-Z])R(\d+)(\.64)?", part):
            is_destination = destination_is_due and not bracket
            seen[is_destination] |= _span(register, 2 if wide else 1 if bracket else width)
            destination_is_due = destination_is_due and not is_destination
    return _Effect(seen[False], seen[True], None, False, None)


Groups = tuple[frozenset[Product], ...]  # of products, the oldest first; the last one is still open


def _fault(effect: _Effect, groups: Groups) -> str | None:
    for product in (product for group in groups for product in group):
        if effect.product is not None:
            if effect.product.factor & product.accumulator:
                return "reads the accumulator of a product that is not complete as a factor"
            if effect.product.accumulator & product.factor:
                return "accumulates into the factor of a product that is not complete"
            if effect.product.accumulator & product.accumulator and effect.product.accumulator != product.accumulator:
                return "accumulates into a part of another product's accumulator"
        elif effect.writes & product.factor:
            return "writes the factor of a product that is not complete"
        elif (effect.writes | effect.reads) & product.accumulator:
            return "touches the accumulator of a product that is not complete"
    return None


def _after(effect: _Effect, groups: Groups) -> Groups:
    *closed, running = groups
    if effect.product is not None:
        running |= {effect.product}
        if effect.ends_group:
            closed, running = [*closed, running], frozenset()
    elif effect.waits is not None:
        closed = closed[len(closed) - effect.waits :] if effect.waits < len(closed) else closed
    return (*closed, running)


def _unfenced(code: list[Instruction], effects: list[_Effect], leads: list[list[int]]) -> dict[int, str]:
    """Products with registers that some way writes after its last fence."""
    nothing: Registers = frozenset()
    written: list[Registers | None] = [None] * len(code)  # before each instruction, since the last fence
    todo: list[tuple[int, Registers]] = [(0, nothing)] if code else []
    while todo:
        i, registers = todo.pop()
        known = written[i]
        if known is not None and registers <= known:
            continue
        registers |= known or nothing
        written[i] = registers
        is_fence = code[i].name.startswith("WARPGROUP.ARRIVE") and not code[i].predicate
        after = nothing if is_fence else registers | effects[i].writes
        todo += [(j, after) for j in leads[i]]
    return {
        i: "uses a register that was written since the last fence"
        for i, (effect, registers) in enumerate(zip(effects, written, strict=True))
        if effect.product is not None and registers and registers & (effect.product.factor | effect.product.accumulator)
    }


def hazards(code: list[Instruction]) -> list[str]:
    """Faults of all ways through the code, each with the address of its instruction.

    Jumps by a table, and products that no way leads to, are faults too, because they are not checked.
    """
    effects, leads = [_effect(instruction) for instruction in code], successors(code)
    seen: list[set[Groups]] = [set() for _ in code]
    faults: dict[int, str] = {}
    todo: list[tuple[int, Groups]] = [(0, (frozenset(),))] if code else []
    while todo:
        i, groups = todo.pop()
        if groups in seen[i] or i in faults:
            continue
        seen[i].add(groups)
        fault = _fault(effects[i], groups)
        after = _after(effects[i], groups)
        if fault is None and len(after) > MOST_GROUPS:
            fault = "begins a product while no wait ends the ones before"
        if fault is not None:
            faults[i] = fault
            continue
        todo += [(j, after) for j in leads[i]]
    faults = _unfenced(code, effects, leads) | faults
    for i, (_, _, name, _) in enumerate(code):
        if name.startswith("BRX"):
            faults[i] = "jumps by a table"
        elif name.startswith("HGMMA") and not seen[i] and not faults:
            faults[i] = "is a product that no way leads to"
    return [
        f"{code[i].address:04x}: {code[i].name}{code[i].operands.rstrip()} {fault}"
        for i, fault in sorted(faults.items())
    ]
