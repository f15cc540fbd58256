"""Machine code of NVIDIA GPUs (SASS) as cuobjdump prints it: instructions, ways through them, the loop over tiles."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

# Tensor cores by one warp, by four (sm_90), by one thread (sm_100); and multiply-add without them.
PRODUCTS = ("HMMA", "HGMMA", "UTCHMMA", "FFMA")
# Classes of instructions by how their names begin; the first that fits counts.
INSTRUCTIONS = {
    "products": ("HMMA", "HGMMA", "UTCHMMA"),
    "spills": ("LDL", "STL"),
    "memory": ("LD", "ST", "RED", "ATOM", "CCTL", "UTM", "UBLKCP", "SYNCS", "MOVM"),
    "shuffles": ("SHFL",),
    "exponentials": ("MUFU",),
    "selections": ("SEL", "FSEL", "USEL"),
    "float": ("F", "HADD", "HMUL", "HFMA", "HMNMX", "R2F"),
    "control": ("B", "EXIT", "WARP", "DEPBAR", "NOP", "CS2R", "S2", "YIELD", "CALL", "RET", "ERRBAR", "MEMBAR"),
    "integer": ("",),
}


class Instruction(NamedTuple):
    address: int
    predicate: str
    name: str
    operands: str


def parse(sass: str) -> list[Instruction]:
    """The instructions in the output of cuobjdump -sass."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?\w+)?\s*([A-Z][A-Za-z0-9_.]*)([^;]*);", sass, re.M)
    return [Instruction(int(address, 16), predicate, name, operands) for address, predicate, name, operands in found]


def functions(sass: str) -> dict[str, list[Instruction]]:
    """The instructions of each function of a cubin, by its name."""
    _, *parts = re.split(r"Function : (\w+)", sass)
    return {name: parse(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def successors(code: list[Instruction]) -> list[list[int]]:
    """For each instruction the numbers of those that may follow it."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    found: list[list[int]] = []
    for i, (_, predicate, name, operands) in enumerate(code):
        to = re.search(r"0x([0-9a-f]+)\s*$", operands)
        jumps = name.startswith(("BRA", "CALL")) and to  # a loop may be left by a call that does not return
        after = [index[int(to[1], 16)]] if jumps else []
        # BRA.DIV jumps only where the threads of a warp have parted
        ends = name.startswith(("BRA", "EXIT")) and ".DIV" not in name
        always = ends and not predicate and not re.search(r"\bU?P\d", operands)
        found.append(after + ([] if always or i + 1 == len(code) else [i + 1]))
    return found


def loop_over_tiles(code: list[Instruction]) -> dict[str, Counter]:
    """Instructions by class in the innermost loop with most products: on the shortest way through it and the longest.

    A loop is what leads back to the target of a backward branch. The shortest way is that of a tile that all rows see,
    of one segment; the longest takes every branch, those that exclude each other too.
    """
    leads = successors(code)
    comes: list[list[int]] = [[] for _ in code]
    for i, after in enumerate(leads):
        for j in after:
            comes[j].append(i)

    def body(head: int, latch: int) -> set[int]:
        inside, todo = {head}, [latch]
        while todo:
            i = todo.pop()
            if i not in inside:
                inside.add(i)
                todo += comes[i]
        return inside

    names = [name.split(".")[0] for _, _, name, _ in code]
    product = [name for name in PRODUCTS if name in names][0]

    def products(loop: set[int]) -> int:
        return sum(names[i] == product for i in loop)

    loops = [(head, latch, body(head, latch)) for latch in range(len(code)) for head in leads[latch] if head <= latch]
    own = [loop for loop in loops if products(loop[2]) and 0 not in loop[2]]  # entered at their heads alone
    # or else elsewhere, where a compiler has turned a loop round: what its head leads to, too
    loops = own or [(head, latch, inside & _reached(head, leads)) for head, latch, inside in loops if products(inside)]
    if not loops:
        return {}
    # A loop around all has two over tiles at most, of memory and of keys; loops over chunks of a tile have less.
    most = max(products(inside) for *_, inside in loops)
    loops = [loop for loop in loops if 3 * products(loop[2]) >= most]
    innermost = [loop for loop in loops if not any(other[2] < loop[2] for other in loops)]
    head, latch, inside = max(innermost, key=lambda loop: products(loop[2]))
    return {
        name: Counter(classify(code[i][2]) for i in _way(head, latch, inside, leads, choose))
        for name, choose in (("shortest", min), ("longest", max))
    }


def _reached(start: int, leads: list[list[int]]) -> set[int]:
    """The instructions that one leads to."""
    found, todo = {start}, [start]
    while todo:
        after = [j for j in leads[todo.pop()] if j not in found]
        found.update(after)
        todo += after
    return found


def _way(head: int, latch: int, inside: set[int], leads: list[list[int]], choose) -> list[int]:
    """The instructions from head to latch on the way that `choose` takes; loops inside are passed once."""
    length: dict[int, float] = {latch: 1}
    follow: dict[int, int] = {}
    todo, open_ = [head], set()
    while todo:
        i = todo[-1]
        if i in length:
            todo.pop()
            continue
        after = [j for j in leads[i] if j in inside and j != head and (j not in open_ or j in length)]
        missing = [j for j in after if j not in length]
        if missing and i not in open_:
            open_.add(i)
            todo += missing
            continue
        ends = [j for j in after if length.get(j, -1) > 0]
        if ends:
            follow[i] = choose(ends, key=length.__getitem__)
            length[i] = length[follow[i]] + 1
        else:
            length[i] = -1  # leads nowhere
        todo.pop()
    way = [head]
    while way[-1] != latch:
        way.append(follow[way[-1]])
    return way


def classify(name: str) -> str:
    return next(kind for kind, starts in INSTRUCTIONS.items() if name.startswith(starts))
