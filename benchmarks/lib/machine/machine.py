"""A host machine for compiled GPU code: executes PTX as Triton and nvcc emit it, checks it and counts.

    module = Module(ptx_text, 90)
    counts = module.launch("kernel", (8, 1, 1), (128, 1, 1), params, shared_bytes, regions, seed=3)

The machine itself is C++ without torch (the .cpp files beside this one), compiled by the host's compiler when first
used. Addresses are real ones of this process: what the kernel may touch is what `regions` names, nothing else, and each
only by addresses that are computed from a pointer into it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from lib.machine import build

Region = tuple[int, int, bool, str]
"""address, bytes, writable, name: one tensor of the call"""
MESSAGE_BYTES = 4096


class MachineError(Exception):
    """PTX that the machine cannot read, or a launch that it cannot start."""


class UnknownInstruction(MachineError):
    """An instruction, modifier or directive that the machine does not know.

    Attributes: name (opcode with its modifiers), line (in the PTX text, from 1).
    """

    def __init__(self, name: str, line: int, message: str) -> None:
        super().__init__(message)
        self.name, self.line = name, line


class Fault(MachineError):
    """A kernel broke a rule; the launch ended there and its results are worth nothing.

    Attributes: kernel; ptx_line (from 1, 0 when no instruction is at fault); source_file and source_line (of the .loc
    before it, "" and 0 without); block (x, y, z); warp and lane (-1 when it is not one's); kind; message.

    kind is one of: bounds (global memory outside of the pointer's region, or a write into one that is not writable),
    alignment, shared (beyond what was asked for), local, uninitialized (shared memory or a register), divergence (a
    collective that a named lane does not reach), deadlock, race, asynchronous (a copy's data touched before it was
    waited for), in_flight (wgmma operands, used during it or written since the last wgmma.fence), proxy (shared memory
    read by wgmma or a bulk copy without fence.proxy.async), limit (grid, threads, shared memory, registers), assertion
    (the kernel's own), trap, undefined (an operand whose effect PTX leaves undefined).
    """

    def __init__(self, found: _Fault) -> None:
        self.kernel = found.kernel.decode()
        self.ptx_line = found.ptx_line
        self.source_file = found.source_file.decode()
        self.source_line = found.source_line
        self.block = tuple(found.block)
        self.warp, self.lane = found.warp, found.lane
        self.kind = found.kind.decode()
        self.message = found.message.decode()
        source = f", {self.source_file}:{self.source_line}" if self.source_file else ""
        super().__init__(
            f"{self.kind}: {self.message} ({self.kernel}, PTX line {self.ptx_line}{source}; "
            f"block {self.block}, warp {self.warp}, lane {self.lane})"
        )


@dataclass
class Counts:
    """Counts of one launch. Instructions are counted once a warp, as they are issued."""

    instructions: dict[str, int] = field(default_factory=dict)
    """by class: product, shuffle, special, selection, float, integer, conversion, move, global, shared, local, copy,
    control, barrier"""
    tensor: dict[str, int] = field(default_factory=dict)
    """tensor-core instructions of a warp by name, such as mma.m16n8k16.bf16 or wgmma.m64n64k16.f16"""
    tensor_cycles: int = 0
    """cycles of a quarter of a multiprocessor's tensor cores, summed over warps; mma at wgmma's rate"""
    special_operations: int = 0
    """lanes that computed ex2, lg2, rcp, rsqrt, sqrt, sin, cos or tanh"""
    shared_wavefronts: int = 0
    """passes through shared memory's banks, conflicts included; of wgmma's operands 128 bytes each"""
    shared_conflicts: int = 0
    """the part of them that bank conflicts cost"""
    global_sectors_read: int = 0
    global_sectors_written: int = 0
    atomic_sectors: int = 0
    """sectors of 32 bytes, those of each instruction counted once"""
    barriers: int = 0
    """barrier arrivals of warps, bar.sync and mbarrier"""
    local_bytes: int = 0
    """bytes of local memory (spills, arrays) read or written by lanes"""
    lines: dict[int, int] = field(default_factory=dict)
    """instructions issued by line of the PTX text"""

    @property
    def issued(self) -> int:
        return sum(self.instructions.values())


def tensor_map(
    address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], element_bytes: int, swizzle: int = 0
) -> bytes:
    """Stand-in for a CUtensorMap on this machine: 128 bytes for cp.async.bulk.tensor.

    Args: sizes, box: elements by dimension, innermost first, 1 to 5; strides: bytes of all dimensions but the
    innermost; swizzle: bytes of the pattern, 0 (none), 32, 64 or 128.
    """
    rank = len(sizes)
    assert len(strides) == rank - 1 and len(box) == rank <= 5

    def padded(values: Sequence[int], count: int) -> list[int]:
        return [*values, *[0] * (count - len(values))]

    fields = [address, *padded(sizes, 5), *padded(strides, 4), *padded(box, 5), rank, element_bytes, swizzle or 16]
    return struct.pack("<QQ5Q4Q5I4B", 0x70616D726F736E65, *fields, 0).ljust(128, b"\0")


class _Region(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("writable", ctypes.c_int), ("name", ctypes.c_char_p),
    ]  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_char_p), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3), ("params", ctypes.c_char_p), ("param_bytes", ctypes.c_uint64),
        ("shared_bytes", ctypes.c_uint64), ("regions", ctypes.POINTER(_Region)), ("region_count", ctypes.c_uint64),
        ("seed", ctypes.c_uint64), ("round_to_nearest", ctypes.c_int), ("check", ctypes.c_int),
        ("copies_need_fence", ctypes.c_int),
    ]  # fmt: skip


class _Fault(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char * 1024), ("source_file", ctypes.c_char * 1024), ("kind", ctypes.c_char * 64),
        ("message", ctypes.c_char * 1024), ("ptx_line", ctypes.c_int), ("source_line", ctypes.c_int),
        ("block", ctypes.c_uint32 * 3), ("warp", ctypes.c_int), ("lane", ctypes.c_int),
    ]  # fmt: skip


@functools.cache
def core() -> ctypes.CDLL:
    """The compiled machine. Raises RuntimeError when there is no C++ compiler."""
    library = ctypes.CDLL(str(build.library()))
    library.machine_load.restype = ctypes.c_void_p
    library.machine_load.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(_Fault)]
    library.machine_opcodes.restype = ctypes.c_char_p
    library.machine_unload.argtypes = [ctypes.c_void_p]
    library.machine_entries.argtypes = [ctypes.c_void_p]
    library.machine_entries.restype = ctypes.c_char_p
    library.machine_launch.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Launch), ctypes.POINTER(_Fault)]
    library.machine_counts.argtypes = [ctypes.c_void_p]
    library.machine_counts.restype = ctypes.c_char_p
    return library


def opcodes() -> list[str]:
    """First words of the PTX instructions that are known; any other one ends with its name and line."""
    return core().machine_opcodes().decode().split()


class Module:
    """PTX, read and decoded.

    Args: ptx_text: what a compiler emitted, whole; architecture: 80, 90, ..., whose limits and tensor cores are meant.
    Raises: UnknownInstruction; MachineError for text that is not PTX.
    """

    def __init__(self, ptx_text: str, architecture: int) -> None:
        error = _Fault()
        self.architecture = architecture
        self._handle = core().machine_load(ptx_text.encode(), architecture, ctypes.byref(error))
        if not self._handle:
            if error.kind == b"unknown":
                raise UnknownInstruction(error.source_file.decode(), error.ptx_line, error.message.decode())
            raise MachineError(error.message.decode())

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            core().machine_unload(self._handle)

    @property
    def entries(self) -> list[str]:
        """Names of the kernels."""
        return core().machine_entries(self._handle).decode().split()

    def launch(
        self,
        entry: str,
        grid: Sequence[int],
        block: Sequence[int],
        params: bytes,
        shared_bytes: int,
        regions: Sequence[Region],
        *,
        cluster: Sequence[int] = (1, 1, 1),
        seed: int = 0,
        round_to_nearest: bool = False,
        check: bool = True,
        copies_need_fence: bool = True,
    ) -> Counts:
        """Runs one kernel to its end.

        Args:
            entry: its name; grid, block, cluster: up to three sizes each.
            params: the kernel's parameters, laid out as PTX does (each aligned to its own size, in order).
            shared_bytes: dynamic shared memory; what the PTX declares itself is added.
            regions: what the kernel may touch of this process's memory; not writable: stores there are faults.
            seed: chooses the order of blocks and warps and when asynchronous copies land.
            round_to_nearest: sums of tensor cores round in float32 instead of truncating as hardware does.
            check: False leaves out what costs time: races, uninitialized memory, data in flight. Bounds always hold.
            copies_need_fence: wgmma reads what cp.async wrote only after fence.proxy.async, as PTX asks. Triton before
                3.9 leaves such fences out.
        Raises: Fault; MachineError when there is no such entry or the parameters' size is wrong.
        """
        named = (_Region * max(len(regions), 1))(*[(a, n, writable, name.encode()) for a, n, writable, name in regions])

        def sizes(given: Sequence[int]) -> tuple[int, ...]:
            return (*given, *[1] * (3 - len(given)))

        request = _Launch(
            entry.encode(), sizes(grid), sizes(block), sizes(cluster), params, len(params), shared_bytes, named,
            len(regions), seed, round_to_nearest, check, copies_need_fence,
        )  # fmt: skip
        found = _Fault()
        if core().machine_launch(self._handle, ctypes.byref(request), ctypes.byref(found)):
            raise MachineError(found.message.decode()) if found.kind == b"launch" else Fault(found)
        return _counts(core().machine_counts(self._handle).decode())


def _counts(text: str) -> Counts:
    """From lines of `field value` and `field key value`."""
    counts = Counts()
    for line in text.splitlines():
        name, *key, value = line.split()
        if key:
            getattr(counts, name)[int(key[0]) if name == "lines" else key[0]] = int(value)
        else:
            setattr(counts, name, int(value))
    return counts
