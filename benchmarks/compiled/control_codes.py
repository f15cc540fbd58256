"""Control codes of machine code: how long a warp waits after an instruction, and for which scoreboards before it.

The compiler schedules NVIDIA GPUs since Maxwell. From Volta on the upper bits of each instruction of 128 bits hold its
schedule. NVIDIA does not document them; they were found by MaxAs (Gray), by Jia et al. (arXiv 1804.06826),
Turingas (Yan) and CuAssembler (cloudcores). From bit 105: stall (4 bits), yield (1), scoreboard of results (3),
scoreboard of operands (3), scoreboards to wait for (6), reuse (4).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .sass import Instruction

FIRST_BIT = 105
SCOREBOARDS = 6
_NONE = 7  # instead of a scoreboard's number


class Control(NamedTuple):
    """The schedule of one instruction."""

    stall: int  # cycles until the warp may issue its next one
    yields: bool  # the scheduler should prefer another warp next; the bit is 0 then
    results: int | None  # scoreboard that is set until results are written
    operands: int | None  # scoreboard that is set until operands are read
    waits: frozenset[int]  # scoreboards that must be clear before
    reuse: int  # a bit for each operand that stays in the cache of operands


def decode(encoding: int) -> Control:
    """The schedule in the 128 bits of an instruction."""
    bits = encoding >> FIRST_BIT

    def scoreboard(shift: int) -> int | None:
        number = bits >> shift & 7
        return None if number == _NONE else number

    waits = frozenset(number for number in range(SCOREBOARDS) if bits >> 11 + number & 1)
    return Control(bits & 15, not bits >> 4 & 1, scoreboard(5), scoreboard(8), waits, bits >> 17 & 15)


def encode(control: Control) -> int:
    """The bits of a schedule, the others 0."""
    results, operands = (_NONE if number is None else number for number in (control.results, control.operands))
    waits = sum(1 << number for number in control.waits)
    bits = control.stall | (not control.yields) << 4 | results << 5 | operands << 8 | waits << 11 | control.reuse << 17
    return bits << FIRST_BIT


class Step(NamedTuple):
    """An instruction, its schedule, and the line of the PTX that it was made from; 0 where that is not known."""

    instruction: Instruction
    control: Control
    line: int


_FIRST = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?\w+)?\s*([A-Z][\w.]*)([^;]*);\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")


def schedule(text: str, kernel: str) -> list[Step]:
    """One kernel in the output of nvdisasm -hex, with labels replaced by addresses as cuobjdump prints them."""
    found: list[Step] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []  # labels of the next instruction
    line, inside, first = 0, False, None
    for row in text.splitlines():
        if row.startswith(".text.") or row.lstrip().startswith(".section"):
            inside = row == f".text.{kernel}:"
        elif not inside:
            continue
        elif at := re.match(r"\s*//## .*, line (\d+)", row):
            line = int(at[1])
        elif label := re.match(r"(\.L_\w+):", row):
            waiting.append(label[1])
        elif first := _FIRST.match(row) or first:
            if second := _SECOND.match(row):
                address, predicate, name, operands, low = first.groups()
                labels |= dict.fromkeys(waiting, int(address, 16))
                instruction = Instruction(int(address, 16), predicate or "", name, operands)
                found.append(Step(instruction, decode(int(second[1], 16) << 64 | int(low, 16)), line))
                waiting, first = [], None
    return [step._replace(instruction=_with_addresses(step.instruction, labels)) for step in found]


def _with_addresses(instruction: Instruction, labels: dict[str, int]) -> Instruction:
    def address(label: re.Match) -> str:
        return f"0x{labels[label[1]]:x}" if label[1] in labels else label[0]

    return instruction._replace(operands=re.sub(r"`\((\.L_\w+)\)", address, instruction.operands).rstrip())
