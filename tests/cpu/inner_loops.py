"""Inner loops of compiled kernels, from their disassembly: how many instructions multiply, and what they spill.

`python -m tests.cpu.inner_loops OBJECT [OBJDUMP]` prints those that multiply matrices; without arguments, those of
every build in harness.py that this machine can make.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PRODUCT = re.compile(r"(fmla|bfmmla|vfmadd\d+p[sd])\b")
_STACK = re.compile(r"\[sp\b|\(%r[sb]p\)")
_LINE = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
_BRANCH = re.compile(r"b\.\w+|b|cbn?z|tbn?z|j\w+")
_TILE = 8  # multiplications in a loop that belongs to a product of matrices, at least


@dataclass(frozen=True)
class Loop:
    """A loop that has none inside."""

    function: str
    instructions: tuple[str, ...]

    @property
    def products(self) -> int:
        return sum(_PRODUCT.match(line) is not None for line in self.instructions)

    @property
    def share(self) -> float:
        return self.products / len(self.instructions)

    @property
    def spills(self) -> int:
        """Instructions that touch the stack."""
        return sum(_STACK.search(line) is not None for line in self.instructions)

    def __str__(self) -> str:
        share = f"{self.products:4} of {len(self.instructions):4}, {self.share:.1%}"
        return f"{share}, {self.spills} spills: {self.function}"


def disassemble(file: Path, objdump: str = "objdump") -> str:
    command = [objdump, "-d", "-C", "--no-show-raw-insn", str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def inner_loops(file: Path, objdump: str = "objdump") -> Iterator[Loop]:
    """The innermost loops of an object or a program, in the order of its code."""
    functions = re.split(r"\n(?=[0-9a-f]+ <)", disassemble(file, objdump))
    named = [(name[1], text) for text in functions if (name := re.match(r"[0-9a-f]+ <(.*)>:\n", text))]
    originals = {_short(name) for name, _ in named if ".constprop" not in name}
    for name, text in named:
        # Copies beside an original are of few rows, whose depth GCC knows: it unrolls what is a loop elsewhere.
        if ".constprop" not in name or _short(name) not in originals:
            yield from _of_function(_short(name), text)


def matrix_products(file: Path, objdump: str = "objdump") -> list[Loop]:
    """Inner loops of register tiles."""
    loops = (loop for loop in inner_loops(file, objdump) if loop.products >= _TILE)
    return [loop for loop in loops if re.search(r"panel_product|row_product|multiply_by", loop.function)]


def _short(name: str) -> str:
    """ "row_product<float, 1>" of what the compiler calls it"""
    name = re.sub(r"xlnet_kernels::|cpu::|\(anonymous namespace\)::| \[clone.*\]|void ", "", name)
    return re.sub(r"\(\w+::A\)|\w+::(?=row_product|panel_product|multiply)", "", name).split("(")[0]


def _of_function(name: str, text: str) -> Iterator[Loop]:
    lines = [found for found in map(_LINE.match, text.splitlines()) if found]
    place = {int(line[1], 16): i for i, line in enumerate(lines)}
    ranges = []
    for i, line in enumerate(lines):
        target = re.search(r"\b([0-9a-f]+) <", line[3])
        if target and _BRANCH.fullmatch(line[2]) and place.get(int(target[1], 16), i + 1) <= i:
            ranges.append((place[int(target[1], 16)], i))
    for start, end in ranges:
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in ranges):
            yield Loop(name, tuple(f"{line[2]} {line[3]}" for line in lines[start : end + 1]))


def main() -> None:
    if sys.argv[1:]:
        print(*matrix_products(Path(sys.argv[1]), *sys.argv[2:3]), sep="\n")
        return
    from tests.cpu import harness

    for build in (harness.GCC, harness.CLANG, harness.ARM_GCC, harness.ARM_CLANG):
        print(f"{' '.join((build.compiler, *build.flags))}: {build.missing() or ''}")
        for file in [] if build.missing() else map(build.compiled, harness.SOURCES):
            print(*(f"  {file.name.split('-')[0]}: {loop}" for loop in matrix_products(file, build.objdump)), sep="\n")


if __name__ == "__main__":
    main()
