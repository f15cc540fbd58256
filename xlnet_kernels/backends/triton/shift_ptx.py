"""Relative shift in PTX for tiles in the register layout of wgmma: a part of shift.py's `shift_in` and `shift_out`.

Four lanes have eight columns of a row, lane t of them columns 2 t and 2 t + 1 of each *group* of eight. The scores of
a row with shift s are columns s to s + 63 of two blocks of 64. Each register first *takes* the first column from s on
with its place in a group, from the group of s or the next, and further columns in steps of eight. Then the columns of a
pair are exchanged where s is odd, and each is read from its lane. With s = 11:

    lane                  0     0     1     1     2     2     3     3
    place in a group      0     1     2     3     4     5     6     7
    group 1 of blocks                      11    12    13    14    15     places from 11 % 8 on: the group of s
    group 2 of blocks    16    17    18                                   places below: the next group
    taken                16    17    18    11    12    13    14    15
    pairs exchanged      17    16    11    18    13    12    15    14     because 11 is odd
    read from lane        1     2     2     3     3     0     0     1     (place + s) // 2 % 4
    scores               11    12    13    14    15    16    17    18     columns s + place

All groups do so at once, and the next group of scores begins with column 19. The 16 consecutive rows of a warp take the
same registers. A branch finds them, because selections would have to try every bit of the group's number. Backward
*gives* dS back in the opposite order: read from lanes, exchanged, and put where `_take` found it, into the complete
block and the next one. tests/triton/test_shift_ptx.py has a model of both in numpy.

The PTX is elementwise, over tensors that are single registers of a fragment. So it is correct for every layout of the
tensors, and for rows at any positions, which take another branch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .compiler import without_joins

GROUPS = tl.constexpr(8)  # of a block
_REGISTERS = 4 * 8  # of a block: 2 columns of a pair, rows of 2 halves of 16, groups


def _register(column: int, half: int, group: int) -> int:
    """Index in `split_fragment` of a column of the pairs of a group, in rows of one half of 16."""
    return (2 * column + half) * 8 + (group % 2 * 4 + group // 2 % 2 * 2 + group // 4)


def _operand(column: int, half: int, group: int) -> str:
    """The operand with a column of a pair, in one of the 16 groups of both blocks."""
    return f"${(1 + group // 8) * _REGISTERS + _register(column, half, group % 8)}"


def _take(half: int, begin: int) -> list[str]:
    """Lines of PTX that take columns for rows whose shift is in group `begin`."""
    places = [(column, group) for column in (0, 1) for group in range(8)]
    return [
        f"selp.f32 taken{_register(column, half, group)}, {_operand(column, half, begin + group + 1)}, "
        f"{_operand(column, half, begin + group)}, later{column}{half};"
        for column, group in places
    ]


def _one_of(ways: list[list[str]], number: str, name: str, first: int = 0) -> list[str]:
    """Lines of PTX that select ways[number - first] by bisection."""
    if len(ways) == 1:
        return [*ways[0], f"bra {name}_DONE;"]
    middle = len(ways) // 2
    label = f"{name}_{first + middle}"
    return [
        f"setp.ge.s32 choice, {number}, {first + middle};",
        f"@choice bra {label};",
        *_one_of(ways[:middle], number, name, first),
        f"{label}:",
        *_one_of(ways[middle:], number, name, first + middle),
    ]


def _conditions(half: int, shift: str) -> list[str]:
    """Lines of PTX with conditions for rows of one half with a shift.

    These are the group of the shift, the lanes that take from the next group, and whether columns of a pair are
    exchanged.
    """
    lines = [f"shr.u32 begin{half}, {shift}, 3;", f"and.b32 bits, {shift}, 7;"]
    lines += [f"setp.lt.s32 later{column}{half}, column{column}, bits;" for column in (0, 1)]
    return [*lines, f"and.b32 bits, {shift}, 1;", f"setp.ne.b32 odd{half}, bits, 0;"]


def _exchange(half: int) -> list[str]:
    """Lines of PTX that exchange columns of pairs, into the result."""
    pairs = [[_register(column, half, group) for column in (0, 1)] for group in range(8)]
    ways = [way for pair in pairs for way in (pair, pair[::-1])]
    return [f"selp.f32 ${to}, taken{other}, taken{to}, odd{half};" for to, other in ways]


def _program(lines: list[str], lane: str) -> str:
    head = [".reg .pred choice, odd0, odd1, later00, later01, later10, later11;", f".reg .f32 taken<{_REGISTERS}>;"]
    head += [".reg .b32 column0, column1, begin0, begin1, bits, parity;"]
    head += [f"shl.b32 column0, {lane}, 1;", "or.b32 column1, column0, 1;"]
    return "{\n" + "\n".join(head + lines) + "\n}"


def _pick() -> str:
    """PTX of the shift in forward.

    Operands: registers of a block for the result and for both given blocks, the shifts of rows of either half, and the
        lane's number among four.
    """
    lines = [line for half in (0, 1) for line in _conditions(half, f"${3 * _REGISTERS + half}")]
    # consecutive rows: those of the second half begin in an even group, those of the first in the next group
    lines += ["sub.s32 bits, begin0, begin1;", "xor.b32 bits, bits, 1;", "and.b32 parity, begin1, 1;"]
    lines += ["or.b32 bits, bits, parity;", "setp.ne.b32 choice, bits, 0;", "@choice bra APART;"]
    both = [[*_take(0, begin + 1), *_take(1, begin)] for begin in range(0, 8, 2)]
    lines += ["shr.u32 bits, begin1, 1;", *_one_of(both, "bits", "BOTH"), "APART:"]
    for half in (0, 1):
        ways = [_take(half, begin) for begin in range(8)]
        lines += [*_one_of(ways, f"begin{half}", f"HALF{half}"), f"HALF{half}_DONE:"]
    return _program([*lines, "BOTH_DONE:", *_exchange(0), *_exchange(1)], f"${3 * _REGISTERS + 2}")


def _pick_folded() -> str:
    """PTX like `_pick`'s, with one shift for both halves, in the same group for all rows of a warp."""
    lines = _conditions(0, f"${3 * _REGISTERS}")
    lines += [f"mov.pred {name}1, {name}0;" for name in ("later0", "later1", "odd")]
    both = [[*_take(0, begin), *_take(1, begin)] for begin in range(8)]
    lines += [*_one_of(both, "begin0", "BOTH"), "BOTH_DONE:", *_exchange(0), *_exchange(1)]
    return _program(lines, f"${3 * _REGISTERS + 1}")


def _give(half: int, begin: int) -> list[str]:
    """Inverse of `_take` for rows whose shift is in group `begin`, into a complete block and the next one.

    The open block is read up to that group only, and unchanged beyond it.
    """
    lines = []
    for column in (0, 1):
        for group in range(8):
            complete, behind, _, before = (
                f"${block * _REGISTERS + _register(column, half, group)}" for block in range(4)
            )
            given = [f"${2 * _REGISTERS + _register(column, half, k)}" for k in range(8)]
            near, far = group - begin, group - begin + 8
            lines += [
                f"mov.f32 {complete}, {before};" if near < 0
                else f"selp.f32 {complete}, {given[near - 1] if near else before}, {given[near]}, later{column}0;",
                f"mov.f32 {behind}, {before};" if far > 8
                else f"mov.f32 {behind}, {given[7]};" if far == 8
                else f"selp.f32 {behind}, {given[far - 1]}, {given[far]}, later{column}0;",
            ]  # fmt: skip
    return lines


def _give_folded() -> str:
    """PTX of the shift in backward.

    Operands: registers of both blocks for the result, of a given block, of the open block; shift, lane.
    """
    both = [[*_give(0, begin), *_give(1, begin)] for begin in range(8)]
    lines = [*_conditions(0, f"${4 * _REGISTERS}"), *_one_of(both, "begin0", "GIVE"), "GIVE_DONE:"]
    return _program(lines, f"${4 * _REGISTERS + 1}")


PICK = tl.constexpr(_pick())
PICK_FOLDED = tl.constexpr(_pick_folded())
GIVE_FOLDED = tl.constexpr(_give_folded())
OPERANDS = tl.constexpr(",".join(["=&f"] * _REGISTERS + ["f"] * 2 * _REGISTERS + ["r"] * 3))
FOLDED_OPERANDS = tl.constexpr(",".join(["=&f"] * _REGISTERS + ["f"] * 2 * _REGISTERS + ["r"] * 2))
GIVE_OPERANDS = tl.constexpr(",".join(["=&f"] * 2 * _REGISTERS + ["f"] * 2 * _REGISTERS + ["r"] * 2))


@triton.constexpr_function
def _bits(count):
    return count.bit_length() - 1


@triton.constexpr_function
def _in_twos(first, second, count):
    """Shape of (first, second, count), `count` a power of two, with one dimension of two for each of its bits."""
    return (first, second, *[2] * _bits(count))


@triton.jit
def _split(x, COUNT: tl.constexpr):
    """Split of x (A, B, COUNT) into COUNT tensors (A, B), by the lowest bit of the index first."""
    # One reshape for all, because two of Triton's passes take time with the square of the number of operations.
    parts = (tl.reshape(x, _in_twos(x.shape[0], x.shape[1], COUNT)),)
    for k in tl.static_range(_bits(COUNT)):
        found = ()
        for i in tl.static_range(1 << k):
            even, odd = tl.split(parts[i])
            found = found + (even, odd)
        parts = found
    return parts


@triton.jit
def _join(parts, COUNT: tl.constexpr):
    """Inverse of `_split`, with one dimension of two for each bit of the index."""
    for k in tl.static_range(_bits(COUNT)):
        found = ()
        for i in tl.static_range(COUNT >> (k + 1)):
            found = found + (tl.join(parts[2 * i], parts[2 * i + 1]),)
        parts = found
    return parts[0]


@triton.jit
def split_fragment(x):
    """Split of (BLOCK_M, GROUPS, 8) into 4 GROUPS of (BLOCK_M / 2, 4), each one register of a fragment.

    A register has one of two columns in a group and every second row of 16.
    """
    ROWS: tl.constexpr = x.shape[0] // 2
    GROUPS: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, (ROWS // 8, 2, 8, GROUPS, 4, 2)), (0, 2, 4, 3, 1, 5))
    return _split(tl.reshape(x, (ROWS, 4, GROUPS * 4)), GROUPS * 4)


@triton.jit
def join_fragment(parts, GROUPS: tl.constexpr):
    """Inverse of `split_fragment`."""
    ROWS: tl.constexpr = parts[0].shape[0]
    x = tl.reshape(_join(parts, GROUPS * 4), (ROWS // 8, 8, 4, GROUPS, 2, 2))
    x = tl.permute(x, (0, 4, 1, 3, 2, 5))
    return without_joins(tl.reshape(x, (ROWS * 2, GROUPS, 8)))


@triton.jit
def shift_blocks_in_ptx(first, second, shift):
    """out[i, c] = blocks[i, shift[i] + c] where blocks is `first` and `second` (BLOCK_M, 64) side by side.

    Shifts (BLOCK_M,) are from 0 to 63.
    """
    shape: tl.constexpr = (first.shape[0], GROUPS, 8)
    lower = split_fragment(tl.reshape(first, shape))
    upper = split_fragment(tl.reshape(second, shape))
    shifts = split_fragment(shift[:, None, None] + tl.zeros((1, 1, 8), tl.int32))  # column of a pair, half
    lane = tl.arange(0, 4)[None, :]
    operands = lower + upper + (shifts[0], shifts[1], lane)
    taken = tl.inline_asm_elementwise(PICK, OPERANDS, operands, (tl.float32,) * 32, is_pure=True, pack=1)
    found = ()
    for i in tl.static_range(32):
        source = (2 * lane + i // 16 + shifts[i // 8] >> 1) & 3
        found = found + (tl.gather(taken[i], source, 1),)
    return tl.reshape(join_fragment(found, GROUPS), (first.shape[0], 64))


@triton.jit
def shift_folded(delayed, old, new):
    """Scores (128, 64) of a folded tile (see `rows_of_tile`), and `delayed` for the next tile of keys.

    Row i takes columns from 63 - i % 64 on of the blocks `old` and `new` (128, 64) side by side. Rows of the second
    half of the tile are one block ahead: their scores are kept for the next tile of keys.
    """
    shape: tl.constexpr = (old.shape[0], GROUPS, 8)
    blocks = split_fragment(tl.reshape(old, shape)) + split_fragment(tl.reshape(new, shape))
    lane = tl.arange(0, 4)[None, :]
    shift = 63 - tl.arange(0, 64)[:, None] + tl.zeros_like(lane)
    taken = tl.inline_asm_elementwise(
        PICK_FOLDED, FOLDED_OPERANDS, blocks + (shift, lane), (tl.float32,) * 32, is_pure=True, pack=1
    )  # fmt: skip
    before = split_fragment(tl.reshape(delayed, shape))
    found = ()
    for i in tl.static_range(32):
        source = (2 * lane + i // 16 + shift >> 1) & 3
        if i // 8 % 2 == 0:
            found = found + (tl.gather(taken[i], source, 1),)
        else:
            found = found + (tl.gather(before[i], source, 1),)
    return tl.reshape(join_fragment(found, GROUPS), old.shape), tl.reshape(join_fragment(taken, GROUPS), old.shape)


@triton.jit
def shift_back_folded(dS, delayed, open):
    """Transpose of `shift_folded`: add a folded tile of dS (128, 64) to the band; returns both blocks.

    The result is the complete block and the open one. The first half comes from `delayed`, dS of the previous tile of
    keys, the second half from dS.
    """
    shape: tl.constexpr = (dS.shape[0], GROUPS, 8)
    now = split_fragment(tl.reshape(dS, shape))
    before = split_fragment(tl.reshape(delayed, shape))
    lane = tl.arange(0, 4)[None, :]
    shift = 63 - tl.arange(0, 64)[:, None] + tl.zeros_like(lane)
    given = ()
    for i in tl.static_range(32):
        source = (2 * lane + i // 16 - shift >> 1) & 3
        if i // 8 % 2 == 0:
            column = tl.where((shift & 1) != 0, before[(i + 16) % 32], before[i])
        else:
            column = tl.where((shift & 1) != 0, now[(i + 16) % 32], now[i])
        given = given + (tl.gather(column, source, 1),)
    operands = given + split_fragment(tl.reshape(open, shape)) + (shift, lane)
    found = tl.inline_asm_elementwise(GIVE_FOLDED, GIVE_OPERANDS, operands, (tl.float32,) * 64, is_pure=True, pack=1)
    complete = ()
    behind = ()
    for i in tl.static_range(32):
        complete = complete + (found[i],)
        behind = behind + (found[32 + i],)
    return tl.reshape(join_fragment(complete, GROUPS), dS.shape), tl.reshape(join_fragment(behind, GROUPS), dS.shape)
