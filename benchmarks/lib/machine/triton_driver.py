"""A driver for Triton that executes kernels on the machine: CPU tensors as pointers, PTX as the compiler left it.

It knows Triton's launcher interface and nothing of the kernels: what a launch gets is what CUDA's driver would get.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from lib.machine.machine import Counts, Module, tensor_map

WARP = 32
LAST_BLOCK_FIRST = 1 << 20  # added to a seed: blocks begin from the last one on (schedule.cpp)
# Limits of a block (CUDA programming guide, technical specifications by compute capability).
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
# How Triton's names of types are packed: struct's letter; two bytes of a 16-bit float come from the upper half of a
# float32 or from struct's own half.
PACKED = {
    "i1": "b", "u1": "B", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
_POINTER = "Q"
# Before 3.9 (3.6.0, 3.7.0 and 3.8.0 were tried) wgmma reads what cp.async wrote without the fence.proxy.async between
# that PTX asks for.
FENCES_COPIES = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


@dataclass
class Launch:
    """One launch: what was run and what the machine counted."""

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    ptx: str
    counts: Counts


@dataclass
class Record:
    """How launches are to be executed, and the launches so far."""

    architecture: int
    seed: int = 0
    round_to_nearest: bool = False
    check: bool = True
    launches: list[Launch] = field(default_factory=list)


@dataclass
class _Function:
    """A loaded kernel, as Triton hands it back to the launcher."""

    ptx: str = ""
    module: Module | None = None


class Driver:
    """Functions that Triton asks of a driver."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.utils = self
        self.launcher_cls = _Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.record.architecture, WARP)

    def get_current_device(self) -> int:
        return self.record.architecture  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict:
        return {"max_shared_mem": SHARED_MEMORY[self.record.architecture], "multiprocessor_count": 2}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple:
        return 1, _Function(), 0, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, module: int) -> None:
        pass


def _keep_ptx(module, function: _Function, name: str, files: dict[str, str], hash: str) -> None:
    """Triton's hook after loading, which alone names the files that the compiler wrote."""
    function.ptx = next(Path(path).read_text() for file, path in files.items() if file.endswith(".ptx"))


class _Launcher:
    """Packs arguments as CudaLauncher and driver.c do: constants dropped, tuples flattened, scratch at the end."""

    def __init__(self, source, metadata) -> None:
        self.names, self.types = zip(*_flatten(source.signature), strict=True) if source.signature else ((), ())
        self.metadata = metadata
        self.descriptors = getattr(metadata, "tensordesc_meta", None) or []

    def __call__(self, x, y, z, stream, function, packed, launch_metadata, enter_hook, exit_hook, *arguments) -> None:
        record = triton.runtime.driver.active.record
        if function.module is None:
            function.module = _module(function.ptx, record.architecture)
        values = list(_values(arguments))
        assert len(values) == len(self.types), (len(values), self.types)
        parameters, regions, descriptors = Parameters(), Regions(), iter(self.descriptors)
        for name, kind, value in zip(self.names, self.types, values, strict=True):
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                _add_descriptor(parameters, regions, name, value, next(descriptors, None))
            elif kind.startswith("*"):
                parameters.add(_POINTER, 0 if value is None else value.data_ptr())
                regions.add(name, value)
            else:
                parameters.add_number(kind, value)
        ctas = getattr(self.metadata, "num_ctas", 1)
        for name in ("global_scratch", "profile_scratch"):
            size = getattr(self.metadata, f"{name}_size", 0)
            scratch = None
            if size:
                align = max(getattr(self.metadata, f"{name}_align", 1), 1)
                room = torch.empty(size * x * y * z * ctas + align, dtype=torch.int8)
                scratch = room[-room.data_ptr() % align :]
                regions.add(name, scratch)
            parameters.add(_POINTER, 0 if scratch is None else scratch.data_ptr())
        grid, threads = (x * ctas, y, z), self.metadata.num_warps * WARP
        counts = function.module.launch(
            self.metadata.name,
            grid,
            (threads, 1, 1),
            bytes(parameters.bytes),
            self.metadata.shared,
            regions.list,
            cluster=(ctas, 1, 1),
            seed=record.seed + len(record.launches),
            round_to_nearest=record.round_to_nearest,
            check=record.check,
            copies_need_fence=FENCES_COPIES,
        )
        ran = Launch(self.metadata.name, grid, threads, self.metadata.shared, function.ptx, counts)
        record.launches.append(ran)


def _flatten(signature: dict | tuple, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, type) of every argument, elements of tuples by their names or numbers."""
    items = signature.items() if isinstance(signature, dict) else enumerate(signature)
    names = getattr(signature, "_fields", None)
    for key, kind in items:
        name = f"{prefix}{names[key] if names else key}"
        if isinstance(kind, tuple):
            yield from _flatten(kind, f"{name}.")
        else:
            yield name, kind


def _values(arguments: tuple) -> Iterator:
    for value in arguments:
        if isinstance(value, tuple):
            yield from _values(value)
        else:
            yield value


class Parameters:
    """A kernel's parameters, each aligned to its size."""

    def __init__(self) -> None:
        self.bytes = bytearray()

    def add(self, letter: str, *values) -> None:
        self.add_bytes(struct.pack(letter, *values), struct.calcsize(letter))

    def add_bytes(self, content: bytes, align: int) -> None:
        self.bytes += bytes(-len(self.bytes) % align) + content

    def add_number(self, kind: str, value) -> None:
        if kind == "bf16":
            self.add("H", torch.tensor(float(value), dtype=torch.bfloat16).view(torch.int16).item() & 0xFFFF)
        else:
            self.add(PACKED[kind], float(value) if "f" in kind else int(value))


class Regions:
    """Memory that a launch may touch: the whole storage of every tensor it was given, once."""

    def __init__(self) -> None:
        self.list: list[tuple[int, int, bool, str]] = []

    def add(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            return
        storage = tensor.untyped_storage()
        region = storage.data_ptr(), storage.nbytes(), True, name
        if region[1] and not any(known[:2] == region[:2] for known in self.list):
            self.list.append(region)


def _add_descriptor(parameters: Parameters, regions: Regions, name: str, descriptor, compiled: dict | None) -> None:
    """A TensorDescriptor: a tensor map, or where none was compiled for its base, shape and strides; then these again.

    `compiled`: what the compiler says of the tensor map.
    """
    regions.add(name, descriptor.base)
    shape, strides = list(descriptor.shape), list(descriptor.strides)
    if compiled:
        size = compiled["elem_size"]
        swizzle = (0, 32, 64, 128)[compiled["swizzle"]]
        sizes, box, steps = shape[::-1], compiled["block_size"][::-1], [size * stride for stride in strides[-2::-1]]
        parameters.add_bytes(tensor_map(descriptor.base.data_ptr(), sizes, steps, box, size, swizzle), 64)
    else:
        parameters.add(_POINTER, descriptor.base.data_ptr())
        for number in (*shape, *strides):
            parameters.add("q", number)
        parameters.add("b", descriptor.padding == "nan")
        parameters.add("b", getattr(descriptor, "round_f32_to_tf32", False))
    for number in shape:
        parameters.add("i", number)
    for stride in strides:
        parameters.add("q", stride)


_modules: dict[tuple[str, int], Module] = {}


def _module(ptx: str, architecture: int) -> Module:
    """The parsed kernel; the same text is parsed once."""
    if (ptx, architecture) not in _modules:
        _modules[ptx, architecture] = Module(ptx, architecture)
    return _modules[ptx, architecture]


@contextlib.contextmanager
def on_machine(
    architecture: int, *, seed: int = 0, round_to_nearest: bool = False, check: bool = True
) -> Iterator[Record]:
    """Within it Triton compiles for `architecture` and the machine executes; `seed` chooses schedules.

    With LAST_BLOCK_FIRST added to `seed` blocks begin from the last one on.

    Raises:
        machine.Fault: in the launch that breaks a rule.
    """
    if knobs.runtime.interpret:
        raise RuntimeError("Triton interprets in this process: set TRITON_INTERPRET=0 before it is imported")
    record = Record(architecture, seed, round_to_nearest, check)
    drivers = triton.runtime.driver
    before = drivers._active
    knobs.runtime.kernel_load_end_hook.add(_keep_ptx)
    drivers.set_active(Driver(record))
    try:
        yield record
    finally:
        drivers._active = before
