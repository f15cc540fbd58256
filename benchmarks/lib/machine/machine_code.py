"""Machine code that ptxas makes of a kernel's PTX, and its executions in a launch that the machine counted.

ptxas says which line of the PTX each instruction comes from, and the machine how often each line ran. All instructions
of a basic block run equally often: as often as a line of it that is one instruction of the machine for one of PTX, such
as a load or a product, or where there is none, as often as the median of its lines. Where the compiler has copied a
line, unrolling a loop or splitting a way, each copy has its share. So what was moved out of a loop, merged or made
twice counts as it is.
"""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.nvidia import compiler

from compiled.control_codes import Step, schedule
from compiled.sass import successors

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
# Prefix of a PTX instruction's name -> prefix of the machine's name for it
ONE_FOR_ONE = {
    r"mma\.": "HMMA", r"wgmma\.mma_async": "HGMMA", r"ld\.shared": "LDS", r"ldmatrix": "LDSM", r"ld\.global": "LDG",
    r"st\.shared": "STS", r"stmatrix": "STSM", r"st\.global": "STG", r"red\.": "RED", r"atom\.": "ATOM",
    r"cp\.async\.c[ag]": "LDGSTS", r"shfl": "SHFL", r"bar": "BAR", r"vote": "VOTE", r"ex2": "MUFU",
}  # fmt: skip
ENDS_A_BLOCK = ("BRA", "BRX", "EXIT", "RET", "CALL")


@dataclass(frozen=True)
class Line:
    """A line of PTX: its number of statements, and the machine's name for one that is one instruction there, or ""."""

    statements: int
    one: str


class BlockCount(NamedTuple):
    """Executions of the instructions `first` to before `end`; `sure`: from a line that is one instruction there."""

    first: int
    end: int
    times: float
    sure: bool


@dataclass(frozen=True)
class MachineCode:
    registers: int
    spilled_bytes: int
    blocks: list[list[tuple[int, str]]]
    """basic blocks of (line of the PTX, name) for each instruction"""
    lines: dict[int, Line]
    steps: list[Step] = field(default_factory=list)
    """all instructions, with their schedules"""
    shared_bytes: int = 0
    """of shared memory, without what a launch asks for"""

    def weights(self, counted: Mapping[int, int]) -> dict[int, Counter[str]]:
        """By a line of the PTX, what the machine executes for one execution of it. `counted`: Counts.lines."""
        ones = Counter(pair for block in self.blocks for pair in block if self._is_one(*pair))
        others = Counter(pair for block in self.blocks for pair in set(block))
        found: dict[int, Counter[str]] = {}
        for block in self.blocks:
            own = [pair for pair in block if pair in ones]
            copies = ones if own else others
            often = {pair: self._times(pair[0], counted) / copies[pair] for pair in own or block}
            usual = statistics.median_low(often[pair] for pair in own or block)
            chosen = next(pair for pair, times in often.items() if times == usual)
            for _, name in block:
                found.setdefault(chosen[0], Counter())[name] += 1 / copies[chosen]
        return found

    def executed(self, weights: dict[int, Counter[str]], counted: Mapping[int, int]) -> Counter[str]:
        """Instructions of all warps, by name."""
        total: Counter[str] = Counter()
        for line, names in weights.items():
            times = self._times(line, counted)
            for name, weight in names.items():
                total[name] += times * weight
        return total

    def block_counts(self, counted: Mapping[int, int]) -> list[BlockCount]:
        """Executions of the basic blocks of `steps` by all warps, as weights() has them."""
        pairs = [(step.line, step.instruction.name.split(".")[0]) for step in self.steps]
        copies = Counter(pairs)
        leads = successors([step.instruction for step in self.steps])
        begins = {j for i, after in enumerate(leads) for j in {i + 1, *after} if after != [i + 1]}
        found = []
        for first, end in itertools.pairwise(sorted({0, len(pairs), *begins})):
            always = [pairs[i] for i in range(first, end) if not self.steps[i].instruction.predicate]
            own = [pair for pair in always if self._is_one(*pair)]
            # Copies of a line that are not sure may lie where one runs at all times, and the others never
            times = (self._times(pair[0], counted) / (copies[pair] if own else 1) for pair in own or pairs[first:end])
            found.append(BlockCount(first, end, statistics.median_low(times), bool(own)))
        return found

    def _times(self, line: int, counted: Mapping[int, int]) -> float:
        return counted.get(line, 0) / self.lines[line].statements if line in self.lines else 0.0

    def is_one_for_one(self, step: Step) -> bool:
        """Whether the step's line of PTX is exactly one such instruction."""
        return self._is_one(step.line, step.instruction.name.split(".")[0])

    def _is_one(self, line: int, name: str) -> bool:
        one = self.lines[line].one if line in self.lines else ""
        return bool(one) and name.startswith(one)


def assembler(ptx: str, architecture: int) -> list[str]:
    """How the compiler that the text comes from calls ptxas; an older one would not know its version of PTX."""
    if "Generated by NVIDIA NVVM Compiler" in ptx:
        return [shutil.which("ptxas"), "-lineinfo"]
    return [compiler.get_ptxas(architecture).path, "-lineinfo", "--regAllocOptLevel=2"]


@functools.cache
def assemble(ptx: str, name: str, architecture: int) -> MachineCode:
    """One kernel of a PTX text."""
    suffix = "a" if re.search(r"\.target sm_\d+a", ptx) else ""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        options = ["-v", f"--gpu-name=sm_{architecture}{suffix}", "--entry", name, source, "-o", cubin]
        said = _output([*assembler(ptx, architecture), *map(str, options)], "stderr")
        text = _output([NVDISASM, "--print-line-info-ptx", "--print-code", "-hex", cubin], "stdout")
    stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said).groups())
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    static = re.search(r"(\d+) bytes smem", said)
    return MachineCode(
        registers, stores + loads, basic_blocks(text, name), statements(ptx), schedule(text, name),
        int(static[1]) if static else 0,
    )  # fmt: skip


def _output(command: list, which: str) -> str:
    return getattr(subprocess.run(command, capture_output=True, text=True, check=True), which)


def basic_blocks(text: str, kernel: str) -> list[list[tuple[int, str]]]:
    """Instructions of one kernel in the output of nvdisasm, without padding."""
    blocks: list[list[tuple[int, str]]] = [[]]
    line, inside = 0, False
    for row in text.splitlines():
        if row.startswith(".text.") or row.lstrip().startswith(".section"):
            inside = row == f".text.{kernel}:"
        elif not inside:
            continue
        elif found := re.match(r"\s*//## .*, line (\d+)", row):
            line = int(found[1])
        elif re.match(r"\.L_\w+:", row):
            blocks.append([])
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+)?\s*([A-Z0-9_]+)", row):
            if found[1] != "NOP":
                blocks[-1].append((line, found[1]))
            if found[1] in ENDS_A_BLOCK:
                blocks.append([])
    return [block for block in blocks if block]


@functools.cache
def statements(ptx: str) -> dict[int, Line]:
    """By line."""
    found = {}
    for number, row in enumerate(ptx.splitlines(), 1):
        count, one = 0, ""
        for text in re.sub(r"//.*", "", row).split(";"):
            if name := re.match(r"\s*\{?\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)", text):
                count += 1
                one = next((to for begin, to in ONE_FOR_ONE.items() if re.match(begin, name[1])), one)
        if count:
            found[number] = Line(count, one)
    return found
