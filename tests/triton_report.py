"""Compiles the Triton kernels without a GPU and tells what came out.

    python tests/triton_report.py 80 90 100 --output benchmarks/results/triton-compiled.json

compiles every configuration of the table for these architectures; without --output it prints one JSON object a line.
Runs in a process of its own: within the tests Triton interprets.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xlnet_kernels.backends.triton import launch, tuning

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
DTYPES = {"16-bit": torch.bfloat16, "float32": torch.float32}
CLASSES = sorted({(kind, width) for _, kind, width in tuning.TABLE})
# Tensor cores by one warp, by four (sm_90), by one thread (sm_100); and multiply-add without them.
PRODUCTS = ("HMMA", "HGMMA", "UTCHMMA", "FFMA")


def inputs(width: int, dtype: torch.dtype, stacked: bool) -> list:
    """A call with biases, segments and ranks; `stacked`: memory and query positions too, as for two streams."""
    batch, heads, length, mem = 2, 4, 256, 128 if stacked else 0

    def rows(count: int):
        return torch.zeros(batch, count, heads, width, dtype=dtype).transpose(1, 2)

    keys = mem + length
    return [
        rows(length), rows(length), rows(length), torch.zeros(keys + length, heads, width, dtype=dtype).transpose(0, 1),
        torch.zeros(heads, width, dtype=dtype), torch.zeros(heads, width, dtype=dtype),
        rows(mem) if stacked else None, rows(mem) if stacked else None,
        torch.zeros(2, heads, width, dtype=dtype), torch.zeros(heads, width, dtype=dtype),
        torch.zeros(batch, length, dtype=torch.int64), torch.zeros(batch, keys, dtype=torch.int64),
        torch.zeros(batch, length, dtype=torch.int32), torch.zeros(batch, keys, dtype=torch.int32), None,
        torch.zeros(batch, length, dtype=torch.bool), None,
        torch.zeros(batch, length, dtype=torch.int64) if stacked else None, None,
        keys, 0.0, width**-0.5, False,
    ]  # fmt: skip


def launches(width: int, dtype: torch.dtype, stacked: bool, capability: tuple[int, int]) -> dict[str, tuple]:
    """What a forward and a backward pass launch: kernel's name in the table -> (kernel, configuration, arguments)."""
    found = {}

    def record(self, kernel, grid, config, **arguments):
        name = kernel.__name__.removesuffix("_kernel")
        found[name] = (kernel, config, self.arguments | arguments | config._asdict())

    launch.Call.launch = record
    launch.Call.config = lambda self, kernel: tuning.choose(kernel, dtype, width, capability)
    call = inputs(width, dtype, stacked)
    out, lse = launch.forward(*call)
    launch.backward(torch.zeros_like(out), None, out, lse, [True] * 10, *call)
    return found


def compile_for(architecture: int, kernel, config: tuning.Config, arguments: dict):
    """As Triton's launcher would, with its specialisation on ones and multiples of 16."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        plain_number = isinstance(value, int) and not isinstance(value, bool) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (plain_number and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[index,] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32"
            if plain_number and value % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return triton.compile(
        ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )


def describe(compiled) -> dict:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        sass, usage = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        )
    code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z0-9_]+)", sass, re.M)
    return {
        "instructions": len(code),
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": sum(name in ("LDL", "STL") for name in code),
        "shared_memory": compiled.metadata.shared,
        "products": {name: code.count(name) for name in PRODUCTS if name in code},
    }


def cases(architectures: list[int], sample: bool) -> list[tuple]:
    """(architecture, kind, width, kernel, stacked) of everything, or of each kernel and class on one architecture."""
    every = [
        (architecture, kind, width, kernel, stacked)
        for stacked in (False, True)
        for architecture in architectures
        for kind, width in CLASSES
        for kernel in tuning.KERNELS
    ]
    if not sample:
        return every
    return [
        (architectures[(index + turn) % len(architectures)], *of, kernel, False)
        for index, of in enumerate(CLASSES)
        for turn, kernel in enumerate(tuning.KERNELS)
    ]


def report(architecture: int, kind: str, width: int, kernel: str, stacked: bool) -> dict:
    dtype = DTYPES[kind]
    chosen = launches(width, dtype, stacked, divmod(architecture, 10))[kernel]
    case = {"architecture": architecture, "kernel": kernel, "kind": kind, "width": width, "stacked": stacked}
    return case | chosen[1]._asdict() | describe(compile_for(architecture, *chosen))


if __name__ == "__main__":
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", type=int, nargs="+")
    parser.add_argument("--sample", action="store_true", help="each kernel and class on one of the architectures")
    parser.add_argument("--output", type=Path, help="write all of it into this file")
    options = parser.parse_args()
    rows = []
    for case in cases(options.architectures, options.sample):
        rows.append(report(*case))
        if options.output is None:
            print(json.dumps(rows[-1]), flush=True)
        else:
            lines = ",\n".join(json.dumps(row) for row in rows)
            options.output.write_text(f'{{"triton": "{triton.__version__}", "rows": [\n{lines}\n]}}\n')
