"""The CPU kernels as a program of their own (harness.cpp): other compilers, and other processors by emulation.

A `Build` is a compiler with its flags and what its programs run under. `Harness` is a running program; under `backend`
it is one of the package's backends, so that `tests.cases` compares it with the reference like any other.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from lib.own_cache import own_cache
from lib.simt import simt_build
from tests import ROOT
from xlnet_kernels import ops
from xlnet_kernels.call import DIFFERENTIABLE, INPUT_NAMES, ROWS

SOURCES = [*sorted(ROOT.glob("csrc/cpu/kernels_*.cpp")), ROOT / "csrc/cpu/dispatch.cpp"]
SOURCES += [*sorted(ROOT.glob("csrc/cpu/bfloat16/*.cpp")), Path(__file__).with_suffix(".cpp")]
FLAGS = ("-std=c++17", "-O3", "-Wno-psabi", "-DXLNET_KERNELS_BFLOAT16_INSTRUCTIONS")  # as setup.py has them
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # in the order of csrc/rel_attention.h
THREADS = 2


@dataclass(frozen=True)
class Build:
    """A compiler and its flags, the emulator that its programs need, and the objdump that reads them."""

    compiler: str
    flags: tuple[str, ...] = ()
    emulator: tuple[str, ...] = ()
    objdump: str = "objdump"

    def missing(self) -> str | None:
        """Why the build cannot be made or run here, or None."""
        if simt_build.COMPILER is None:
            return simt_build.NO_COMPILER
        needed = {self.compiler, self.objdump, *self.emulator[:1]}
        if any("aarch64" in flag for flag in self.flags):
            needed.add("aarch64-linux-gnu-g++")  # whose libraries Clang links
        absent = sorted(name for name in needed if shutil.which(name) is None)
        return f"not installed: {', '.join(absent)}" if absent else None

    def compiled(self, source: Path) -> Path:
        cache = own_cache("harness")
        flags = [*FLAGS, f"-I{ROOT / 'csrc'}", *self.flags]
        return simt_build._compile(source, flags, cache, self.compiler)

    def program(self) -> Path:
        objects = [*map(self.compiled, SOURCES)]
        key = hashlib.sha256(b"".join(path.read_bytes() for path in objects)).hexdigest()[:16]
        result = objects[0].parent / f"harness-{key}"
        with simt_build._locked(result.with_suffix(".lock")):
            if not result.exists():
                with simt_build._complete(result) as partial:
                    command = [self.compiler, *self.flags, "-static", "-pthread", "-o", partial, *objects]
                    simt_build._run(command)
        return result


_ARM = ("qemu-aarch64-static", "-cpu")
_ARM_OBJDUMP = "aarch64-linux-gnu-objdump"
GCC = Build("g++")
CLANG = Build("clang++")
ARM_GCC = Build("aarch64-linux-gnu-g++", (), (*_ARM, "max"), _ARM_OBJDUMP)
ARM_CLANG = Build("clang++", ("--target=aarch64-linux-gnu",), (*_ARM, "max"), _ARM_OBJDUMP)


class Harness:
    """The program of a build, with the kernels that XLNET_KERNELS_CPU asks for; `processor` is one that is emulated."""

    def __init__(self, build: Build, kernels: str = "", processor: str | None = None):
        emulator = build.emulator if processor is None else (*build.emulator[:-1], processor)
        environment = os.environ | {"XLNET_KERNELS_CPU": kernels}
        pipe = subprocess.PIPE
        command = [*emulator, str(build.program())]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
        found = self.process.stdout.readline().split()
        if not found:
            raise RuntimeError(self.process.stderr.read().decode())
        self.kernels, self.products = (name.decode() for name in found)

    def close(self) -> None:
        self.process.communicate()

    def call(self, kind: bytes, numbers: bytes, tensors: Sequence[Tensor | None], outputs: Sequence[Tensor | None]):
        """`outputs`, as the kernels left them."""
        records = b"".join(_record(tensor) for tensor in (*tensors, *outputs))
        self.process.stdin.write(kind + numbers + records)
        self.process.stdin.flush()
        found = []
        for output in outputs:
            if output is None:
                found.append(None)
                continue
            data = self.process.stdout.read(output.nbytes)
            if len(data) < output.nbytes:
                raise RuntimeError(f"the harness has ended: {self.process.communicate()[1].decode()}")
            found.append(torch.frombuffer(bytearray(data), dtype=output.dtype).view(output.shape) if data else output)
        return found


def _record(tensor: Tensor | None) -> bytes:
    """As harness.cpp reads it: strides, bytes, contents."""
    if tensor is None:
        return struct.pack("<5q", 0, 0, 0, 0, -1)
    tensor = tensor.detach().contiguous()
    strides = [0] * (4 - tensor.dim()) + list(tensor.stride()) if tensor.dim() <= 4 else []
    return struct.pack("<5q", *strides, tensor.nbytes) + tensor.view(-1).view(torch.uint8).numpy().tobytes()


def _inputs(inputs: Sequence) -> tuple[bytes, list[Tensor | None]]:
    """The operator's arguments as csrc/call.cpp reads them."""
    *tensors, max_distance, dropout_p, scale, _deterministic, _float32_precision = inputs
    named = dict(zip(ops.INPUT_NAMES, tensors, strict=True))
    query, key, rel_key = named["query"], named["key"], named["rel_key"]
    mem_len = 0 if named["memory_key"] is None else named["memory_key"].shape[2]
    (batch, heads, length, width), key_len = query.shape, key.shape[2]
    sizes = [batch, heads, length, key_len, mem_len, rel_key.shape[-2], width, max_distance]
    numbers = struct.pack("<10q2d", THREADS, DTYPES.index(query.dtype), *sizes, dropout_p, scale)
    positions, order = named.pop("query_positions"), named.pop("query_order")
    if positions is not None and order is None:
        positions, order = positions.sort(dim=1, stable=True)
    state = named.pop("dropout_state")
    if named["mask"] is not None:
        named["mask"] = named["mask"].expand(batch, heads, length, mem_len + key_len)
    for name in ("query_ids", "key_ids", "query_rank", "key_rank", "query_floor"):
        named[name] = None if named[name] is None else named[name].int()
    order, positions = (None if x is None else x.int() for x in (order, positions))
    return numbers, [*named.values(), positions, order, state]


@functools.cache
def _operator(name: str):
    """An operator of this name, and what implements it: (how to call it, [the harness that it runs])."""
    call = ops.define(name)
    harness: list[Harness] = []

    def forward(query, *rest):
        *inputs, needs_backward = query, *rest
        work = torch.promote_types(query.dtype, torch.float32)
        rows = [query.new_full(query.shape[:3], torch.nan, dtype=work) for _ in range(3)]
        out = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
        has_residual = needs_backward and query.dtype.itemsize == 2
        numbers, tensors = _inputs(inputs)
        *found, residual = harness[-1].call(b"f", numbers, tensors, [out, *rows, out.clone() if has_residual else None])
        return (*found, query.new_empty(0) if residual is None else residual)

    def backward(grad_out, grad_lse, out, out_residual, row_max, row_sum, needs, *inputs):
        numbers, tensors = _inputs(inputs)
        work = torch.promote_types(out.dtype, torch.float32)
        # With query rows the kernels write each of ROWS, and add to the others.
        before = dict.fromkeys(ROWS if out.shape[2] > 0 else (), torch.nan)
        wanted = [
            tensor.new_full(tensor.shape, before.get(name, 0), dtype=work) if need and tensor is not None else None
            for name, tensor, need in zip(INPUT_NAMES[:DIFFERENTIABLE], inputs[:DIFFERENTIABLE], needs, strict=True)
        ]
        grad_lse = None if grad_lse is None else grad_lse.to(work)
        residual = out_residual if out_residual.numel() else None
        tensors += [grad_out.to(out.dtype), grad_lse, out, residual, row_max, row_sum]
        found = harness[-1].call(b"b", numbers, tensors, wanted)
        return [out.new_empty(0) if gradient is None else gradient.to(out.dtype) for gradient in found]

    for suffix, implementation in (("", forward), ("_backward", backward)):
        torch.library.impl(ops.add_op_namespace_prefix(name + suffix), "CPU")(implementation)
    return call, harness


def backend(monkeypatch, harness: Harness) -> str:
    """The name under which `harness` is a backend until the test ends."""
    call, current = _operator("rel_attention_harness")
    current[:] = [harness]
    module = SimpleNamespace(
        DEVICE="cpu",
        DTYPES=DTYPES,
        max_head_dim=lambda dtype, device=None: None,
        unavailable=lambda device=None: None,
        rel_attention=call,
    )
    monkeypatch.setitem(importlib.import_module("xlnet_kernels.backends")._BACKENDS, "harness", module)
    return "harness"
