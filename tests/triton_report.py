"""Compiles the Triton kernels without a GPU and prints what came out, one JSON object a line.

    python tests/triton_report.py [--width 64] 80 90 100

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
MATRIX_INSTRUCTIONS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}


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


def launches(width: int, dtype: torch.dtype, stacked: bool) -> list[tuple]:
    """What a forward and a backward pass launch: (kernel, configuration, arguments)."""
    found = []
    launch.Call.launch = lambda self, kernel, grid, config, **arguments: found.append(
        (kernel, config, self.arguments | arguments | {"BM": config.BM, "BN": config.BN})
    )
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


def describe(compiled, architecture: int) -> dict:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z0-9_]+)", sass, re.M)
    return {
        "instructions": len(code),
        "spills": sum(name in ("LDL", "STL") for name in code),
        "matrix_instructions": code.count(MATRIX_INSTRUCTIONS[architecture]),
        "shared_memory": compiled.metadata.shared,
    }


if __name__ == "__main__":
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", type=int, nargs="+")
    parser.add_argument("--width", type=int, help="only this class of the table, in bfloat16; default: all")
    options = parser.parse_args()
    classes = [(options.width, torch.bfloat16)] if options.width else tuning.CLASSES
    for architecture in options.architectures:
        for width, dtype in classes:
            for stacked in (False, True):
                for kernel, config, arguments in launches(width, dtype, stacked):
                    record = describe(compile_for(architecture, kernel, config, arguments), architecture)
                    name = kernel.__name__.removesuffix("_kernel")
                    case = {"architecture": architecture, "kernel": name, "width": width, "dtype": str(dtype)[6:]}
                    print(json.dumps(case | {"stacked": stacked} | record), flush=True)
