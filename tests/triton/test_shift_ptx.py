"""A model in numpy of the shift in PTX, against plain slices, and the PTX against the model, thread by thread."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("triton")

from xlnet_kernels.backends.triton import shift_ptx  # noqa: E402

REGISTERS = 32  # of a thread for a block: two columns, two halves of 16 rows, eight groups
SHIFTS = range(64)
COLUMN = np.arange(64)
GROUP, PLACE = COLUMN // 8, COLUMN % 8


def swapped(row: np.ndarray, shift: int) -> np.ndarray:
    """Columns of pairs change places where the shift is odd."""
    return row.reshape(-1, 2)[:, ::-1].reshape(-1) if shift % 2 else row


def take(window: np.ndarray, shift: int) -> np.ndarray:
    """The registers of one row after `_take` and `_exchange`.

    Each place in a group takes the first column of the two blocks (128,) from `shift` on that has this place. Then
    follow those in steps of eight.
    """
    later = PLACE < shift % 8
    return swapped(window.reshape(16, 8)[shift // 8 + GROUP + later, PLACE], shift)


def read_lanes(taken: np.ndarray, shift: int) -> np.ndarray:
    """The scores of the row: each register is read from the lane that has it."""
    lane = (PLACE + shift) // 2 % 4
    return taken[8 * GROUP + 2 * lane + PLACE % 2]


def write_lanes(dS: np.ndarray, shift: int) -> np.ndarray:
    """The inverse of `read_lanes` and of the exchange."""
    lane = (PLACE - shift) // 2 % 4
    return swapped(dS, shift)[8 * GROUP + 2 * lane + PLACE % 2]


def give(given: np.ndarray, opened: np.ndarray, shift: int) -> tuple[np.ndarray, np.ndarray]:
    """The block that is complete and the open one behind it, (64,) each; the latter has its first `shift` columns."""
    first = GROUP - shift // 8 - (PLACE < shift % 8)  # groups of dS, in the complete block
    complete = np.where(first < 0, opened, given[8 * np.maximum(first, 0) + PLACE])
    behind = given[8 * np.minimum(first + 8, 7) + PLACE]
    return complete, behind


@pytest.mark.parametrize("shift", SHIFTS)
def test_the_model_shifts(shift):
    window = np.random.default_rng(shift).random(128)
    assert (read_lanes(take(window, shift), shift) == window[shift : shift + 64]).all()


@pytest.mark.parametrize("shift", SHIFTS)
def test_the_model_shifts_back(shift):
    dS, opened = np.random.default_rng(shift).random((2, 64))
    complete, behind = give(write_lanes(dS, shift), opened, shift)
    assert (complete == np.concatenate([opened[:shift], dS[: 64 - shift]])).all()
    assert (behind[:shift] == dS[64 - shift :]).all()


def execute(program: str, operands: dict[str, float]) -> dict[str, float]:
    """The registers of one thread after a program of the few instructions that shift_ptx.py uses."""
    values = dict(operands)
    lines = [line for line in program.strip("{}\n").split("\n") if not line.startswith(".reg")]
    labels = {line[:-1]: number for number, line in enumerate(lines) if line.endswith(":")}

    def value(name: str):
        return values[name] if name in values else int(name)

    def compute(name: str, sources: list):
        return {
            "selp": lambda a, b, condition: a if condition else b,
            "mov": lambda a: a,
            "setp.ge": lambda a, b: a >= b,
            "setp.lt": lambda a, b: a < b,
            "setp.ne": lambda a, b: a != b,
            "shr": lambda a, b: a >> b,
            "shl": lambda a, b: a << b,
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "xor": lambda a, b: a ^ b,
            "sub": lambda a, b: a - b,
        }[name](*sources)

    number = 0
    while number < len(lines):
        line, number = lines[number], number + 1
        jump = re.fullmatch(r"(@choice )?bra (\w+);", line)
        if jump and (not jump[1] or values["choice"]):
            number = labels[jump[2]]
        elif not jump and not line.endswith(":"):
            name, to, sources = re.fullmatch(r"([a-z.]+)\.\w+ ([$\w]+), (.*);", line).groups()
            values[to] = compute(name, [value(source) for source in sources.split(", ")])
    return values


def registers(first: int, halves: list[np.ndarray], lane: int) -> dict[str, float]:
    """A thread's operands from number `first` on: of a block (64,) for each half of 16 rows."""
    return {
        f"${first + shift_ptx._register(column, half, group)}": halves[half][8 * group + 2 * lane + column]
        for column in (0, 1)
        for half in (0, 1)
        for group in range(8)
    }


PAIRS = [(s, s - 8) for s in range(8, 64)] + [(s, (5 * s + 3) % 64) for s in SHIFTS]


@pytest.mark.parametrize("lane", range(4))
def test_ptx_takes_as_the_model(lane):
    """Rows of both halves one after the other, which share a branch, and apart."""
    windows = np.random.default_rng(lane).random((2, 128))
    blocks = registers(REGISTERS, list(windows[:, :64]), lane) | registers(2 * REGISTERS, list(windows[:, 64:]), lane)
    for shifts in PAIRS:
        given = blocks | {f"${3 * REGISTERS + half}": shifts[half] for half in (0, 1)} | {f"${3 * REGISTERS + 2}": lane}
        wanted = registers(0, [take(windows[half], shifts[half]) for half in (0, 1)], lane)
        assert wanted.items() <= execute(shift_ptx.PICK.value, given).items(), shifts
    for shift in SHIFTS:
        given = blocks | {f"${3 * REGISTERS}": shift, f"${3 * REGISTERS + 1}": lane}
        wanted = registers(0, [take(window, shift) for window in windows], lane)
        assert wanted.items() <= execute(shift_ptx.PICK_FOLDED.value, given).items(), shift


@pytest.mark.parametrize("lane", range(4))
def test_ptx_gives_as_the_model(lane):
    dS, opened = np.random.default_rng(lane).random((2, 2, 64))
    blocks = registers(2 * REGISTERS, list(dS), lane) | registers(3 * REGISTERS, list(opened), lane)
    for shift in SHIFTS:
        given = blocks | {f"${4 * REGISTERS}": shift, f"${4 * REGISTERS + 1}": lane}
        complete, behind = zip(*(give(dS[half], opened[half], shift) for half in (0, 1)), strict=True)
        found = execute(shift_ptx.GIVE_FOLDED.value, given)
        assert registers(0, list(complete), lane).items() <= found.items(), shift
        has_come = registers(REGISTERS, [shift > COLUMN] * 2, lane)  # nothing reads the other columns
        wanted = registers(REGISTERS, list(behind), lane)
        assert {name: wanted[name] for name in wanted if has_come[name]}.items() <= found.items(), shift
