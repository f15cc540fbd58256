"""Compiles the Triton kernels without a GPU and tells what came out.

    python -m benchmarks.compiled.triton_report 80 90 100 --output benchmarks/results/triton-compiled.json
    python -m benchmarks.compiled.triton_report gfx942 gfx950 --output benchmarks/results/triton-compiled-amd.json

compiles every configuration of the table for these architectures; without --output it prints one JSON object a line.
AMD's, of which nothing is promised but that they compile, get the tiles of sm_80, and float32 those without tensor
cores: their compiler does not know tf32x3. What their code objects say is reported: registers, spills, local data share
(shared memory). There is no disassembler for it here.
Calls go through the operator's own launches and Triton's own just-in-time compiler; a driver that loads and launches
nothing stands in for CUDA's. Runs in a process of its own: within the tests Triton interprets.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from xlnet_kernels.backends import triton as backend
from xlnet_kernels.backends.triton import launch, launch_cache, tuning
from xlnet_kernels.call import Call

from .sass import PRODUCTS, loop_over_tiles, parse
from .wgmma_hazards import hazards

OPERATOR = "xlnet_kernels::rel_attention_triton"
in_quads = tuning.in_quads
precision_of = launch_cache.precision_of
DTYPES = {"16-bit": torch.bfloat16, "float32": torch.float32, "ieee": torch.float32}
CLASSES = sorted({(kind, head_dim) for _, kind, head_dim in tuning.TABLE})
# Limits of a program (CUDA programming guide, compute capabilities): sm_80 shares its entries with sm_86, sm_89 and
# sm_120, which have the least of all from sm_80 on.
# AMD CDNA 3 and 4 instruction set architecture, "local data share".
SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, "gfx942": 64 * 1024, "gfx950": 160 * 1024}
AMD = ("gfx942", "gfx950")


class Driver:
    """A driver for Triton that keeps the binaries that it is given instead of running them."""

    def __init__(self, architecture: int | str) -> None:
        self.architecture = architecture
        self.binaries: dict[str, tuple[bytes, int]] = {}  # kernel's name -> (cubin, bytes of shared memory)
        self.launches: list[str] = []
        self.utils = self
        self.launcher_cls = functools.partial(_launcher, self)

    def get_current_target(self) -> GPUTarget:
        if self.architecture in AMD:
            return GPUTarget("hip", self.architecture, 64)
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int | str:
        return self.architecture  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict:
        known = self.architecture in SHARED_MEMORY
        limit = self.architecture if known else tuning.family(divmod(self.architecture, 10))
        return {"max_shared_mem": SHARED_MEMORY[limit]}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple:
        self.binaries[name] = cubin, shared
        # Module, function, registers, spills, threads in a block: of NVIDIA's as many as have room for 255 registers
        return 1, 1, 255, 0, 1024 if self.architecture in AMD else 256

    def unload_module(self, module: int) -> None:
        pass


def leaves(name: str, value) -> list[tuple]:
    """(name, member) of whatever lies inside of tuples."""
    if not isinstance(value, tuple):
        return [(name, value)]
    names = getattr(value, "_fields", range(len(value)))
    return [leaf for field, member in zip(names, value, strict=True) for leaf in leaves(f"{name}.{field}", member)]


def _launcher(driver: Driver, source, metadata):
    """Checks that every argument is what its type in the kernel's signature can hold."""
    types = [leaf for name, kind in source.signature.items() for leaf in leaves(name, kind)]

    def run(x, y, z, stream, function, packed, launch_metadata, enter_hook, exit_hook, *arguments):
        assert x > 0 and y == z == 1, (x, y, z)
        values = [value for argument in arguments for _, value in leaves("", argument)]
        for (name, kind), value in zip(types, values, strict=True):
            if kind.startswith("*"):
                assert isinstance(value, torch.Tensor), (name, kind, value)
            elif kind in ("i32", "i64"):
                most = 2 ** (int(kind[1:]) - 1)
                assert isinstance(value, int) and -most <= value < most, (name, kind, value)
            else:
                assert kind == "constexpr" or (kind == "fp32" and isinstance(value, float)), (name, kind, value)
        driver.launches.append(metadata.name)

    return run


def pretend(architecture: int | str) -> Driver:
    """From here on Triton, and the choice of tiles, take this machine for one with such a GPU."""
    driver = Driver(architecture)
    triton.runtime.driver.set_active(driver)
    launch_cache.plans.clear()
    tiles_of = 80 if isinstance(architecture, str) else architecture
    torch.cuda.get_device_capability = lambda device=None: divmod(tiles_of, 10)
    tuning.in_quads = (lambda *_: False) if architecture in AMD else in_quads  # fragments lie otherwise there
    return driver


def serve_cpu() -> None:
    """From here on backend="triton" takes tensors of the CPU."""
    torch.library.impl(OPERATOR, "cpu", lambda *inputs: launch.forward(*inputs))
    torch.library.impl(f"{OPERATOR}_backward", "cpu", lambda *inputs: launch.backward(*inputs))
    backend.DEVICE, backend.DTYPES = "cpu", (torch.float16, torch.bfloat16, torch.float32)
    backend._unavailable = lambda device: None


# Kinds of calls, each compiled to kernels of its own
CALLS = ("order", "stacked", "plain", "dense", "dropout")


def inputs(head_dim: int, dtype: torch.dtype, call: str) -> Call:
    """A call with biases, and segments and ranks but for "plain".

    "stacked": memory and query positions too, as for two streams; "dense": a dense mask for ranks.
    """
    batch, heads, length, memory = 2, 4, 256, 128 if call == "stacked" else 0
    keys = memory + length

    def rows(count: int) -> torch.Tensor:
        return torch.zeros(batch, count, heads, head_dim, dtype=dtype).transpose(1, 2)

    def integers(count: int) -> torch.Tensor:
        return torch.zeros(batch, count, dtype=torch.int32)

    bias = torch.zeros(heads, head_dim, dtype=dtype)
    given = {
        "query": rows(length), "key": rows(length), "value": rows(length),
        "rel_key": torch.zeros(keys + length, heads, head_dim, dtype=dtype).transpose(0, 1),
        "content_bias": bias, "position_bias": bias.clone(), "max_distance": keys,
        "dropout_p": 0.0, "scale": head_dim**-0.5, "deterministic": False, "float32_precision": 0,
    }  # fmt: skip
    if call != "plain":
        segments = torch.zeros(2, heads, head_dim, dtype=dtype), bias.clone(), integers(length), integers(keys)
        given |= dict(zip(("segment_embed", "segment_bias", "query_ids", "key_ids"), segments, strict=True))
    if call == "dense":
        given["mask"] = torch.zeros(batch, 1, length, keys, dtype=torch.bool)
    elif call != "plain":
        given |= {"query_rank": integers(length), "key_rank": integers(keys), "sees_self": integers(length).bool()}
    if call == "stacked":
        given |= {"memory_key": rows(memory), "memory_value": rows(memory)}
        given |= {"query_positions": integers(length), "query_order": integers(length)}
    if call == "dropout":
        given |= {"dropout_p": 0.1, "dropout_state": torch.zeros(2, dtype=torch.int64)}
    return Call(**given)


class Compiled(NamedTuple):
    """One kernel: tiles, binary, bytes of shared memory, and PTX ("" for AMD)."""

    config: tuning.Config
    binary: bytes
    shared_memory: int
    ptx: str


def compile_kernel(architecture: int | str, kernel: str, call: Call) -> Compiled:
    """One kernel of a forward and backward call.

    "keys" is that of a deterministic call, in two passes; after a single pass over rows it only rounds sums.
    """
    driver = pretend(architecture)
    call = call._replace(deterministic=kernel == "keys")
    configs, texts = [], []

    def only_this(self, jit, count, config, **arguments):
        if architecture in AMD:  # whose compiler knows no limit of registers
            config = config._replace(max_registers=None)
        if jit.__name__ == f"{kernel}_kernel":
            configs.append(config)
            original(self, jit, count, config, **arguments)
            *_, latest = jit.device_caches[architecture][0].values()
            texts.append(latest.asm.get("ptx", ""))

    original, launch.Call.launch = launch.Call.launch, only_this
    try:
        out, _, *saved = launch.forward(*call, True)
        if kernel != "forward":
            row_max, row_sum, out_residual = saved
            launch.backward(torch.zeros_like(out), None, out, out_residual, row_max, row_sum, [True] * 10, *call)
    finally:
        launch.Call.launch = original
    assert driver.launches == [f"{kernel}_kernel"]
    return Compiled(configs[0], *driver.binaries[f"{kernel}_kernel"], texts[0])


def disassemble(cubin: bytes, option: str = "-sass") -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def serialised(ptx: str) -> list[str]:
    """Codes of ptxas' warnings that each product of a warpgroup waits for the one before.

    Assembles the PTX again, because Triton keeps no log of it.
    """
    if "wgmma" not in ptx:
        return []
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert " info " in log, log
    return sorted(set(re.findall(r"C751\d", log)))


def describe(compiled: Compiled) -> dict:
    code = parse(disassemble(compiled.binary))
    names = [name.split(".")[0] for _, _, name, _ in code]
    ways = loop_over_tiles(code)
    return {
        "instructions": len(code),
        "registers": int(re.search(r"REG:(\d+)", disassemble(compiled.binary, "-res-usage"))[1]),
        "spills": sum(name in ("LDL", "STL") for name in names),
        "shared_memory": compiled.shared_memory,
        "serialised": serialised(compiled.ptx),
        "hazards": hazards(code),
        "products": {name: names.count(name) for name in PRODUCTS if name in names},
        "loop": {way: {"all": counts.total()} | counts for way, counts in ways.items()},
    }


def describe_for_amd(compiled: Compiled) -> dict:
    """Registers and spills in the metadata of a code object, a map in MessagePack.

    After a name stands its number: one byte, or more after 0xcc to 0xce.
    """

    def number(name: str) -> int:
        found = re.search(rb"\.%s([\x00-\x7f]|\xcc.|\xcd..|\xce....)" % name.encode(), compiled.binary, re.DOTALL)
        assert found, name
        return int.from_bytes(found[1][1:] or found[1], "big")

    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count"),
        "scratch_bytes": number("private_segment_fixed_size"),
        "shared_memory": compiled.shared_memory,
    }


def cases(architectures: list[int | str], sample: bool) -> list[tuple]:
    """(architecture, kind, head_dim, kernel, call): everything, or each class, and each kernel on each architecture."""
    every = [
        (architecture, kind, head_dim, kernel, call)
        for call in CALLS[:2]
        for architecture in architectures
        for kind, head_dim in CLASSES
        if architecture not in AMD or kind != "float32"
        for kernel in tuning.KERNELS
    ]
    if not sample:
        return every
    pairs = [
        (index + turn, kernel) for turn in range(len(architectures)) for index, kernel in enumerate(tuning.KERNELS)
    ]
    return [
        (architectures[place % len(architectures)], *CLASSES[number % len(CLASSES)], kernel, "order")
        for number, (place, kernel) in enumerate(pairs)
    ]


def report(architecture: int | str, kind: str, head_dim: int, kernel: str, call: str) -> dict:
    launch_cache.precision_of = (lambda *_: "ieee") if kind == "ieee" else precision_of
    compiled = compile_kernel(architecture, kernel, inputs(head_dim, DTYPES[kind], call))
    case = {"architecture": architecture, "kernel": kernel, "kind": kind, "head_dim": head_dim, "call": call}
    return case | compiled.config._asdict() | (describe_for_amd if architecture in AMD else describe)(compiled)


if __name__ == "__main__":
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {str(name): name for name in SHARED_MEMORY}
    parser.add_argument("architectures", choices=known, nargs="+")
    parser.add_argument("--sample", action="store_true", help="each class, and each kernel on each architecture")
    parser.add_argument("--output", type=Path, help="write all of it into this file")
    options = parser.parse_args()
    rows = []
    for case in cases([known[name] for name in options.architectures], options.sample):
        rows.append(report(*case))
        if options.output is None:
            print(json.dumps(rows[-1]), flush=True)
        else:
            lines = ",\n".join(json.dumps(row) for row in rows)
            options.output.write_text(f'{{"triton": "{triton.__version__}", "rows": [\n{lines}\n]}}\n')
