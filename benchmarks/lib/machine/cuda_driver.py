"""The CUDA backend on the machine: its host code as it is, what nvcc compiles of its kernels executed on the CPU.

The host code is linked with a stand-in for the CUDA runtime (cuda/runtime.cpp), which gives launches back to Python.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import struct
import subprocess
from pathlib import Path

import torch

from lib.machine.machine import Counts, Fault, Module
from lib.machine.triton_driver import SHARED_MEMORY, Launch, Record
from lib.own_cache import own_cache
from lib.simt import simt_build
from xlnet_kernels import ops
from xlnet_kernels._precision import float32_precision
from xlnet_kernels.call import Call, replace

HERE = Path(__file__).resolve().parent
CSRC = simt_build.ROOT / "csrc"
NVCC = shutil.which("nvcc")
FLAGS = ["-std=c++20", "-lineinfo", "-Xcompiler", "-fPIC", f"-I{CSRC}", f"-I{CSRC / 'cuda'}"]
FLAGS += ["-DXLNET_KERNELS_CUDA_ARCHITECTURES=8.0;9.0a"]
PTX = ["-O3", "-ptx"]
# The host's code: quickly, because it only launches. Its device code is there for registration alone, for the oldest
# architecture.
HOST = ["-O1", "-Xcicc", "-O0", "-gencode", "arch=compute_80,code=compute_80", "-c"]
# The architecture that kernels are compiled for: setup.py's where it has features of its own.
COMPILED_FOR = {80: "80", 90: "90a"}
_OPERATOR = "rel_attention_machine"  # as in cuda/torch_device.h
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint * 3),
    ctypes.POINTER(ctypes.c_uint * 3),
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_void_p),
)

_kernels = ops.define(_OPERATOR)  # what register.cpp implements
_known = ops.define(f"{_OPERATOR}_call")  # the same, with its inputs known to the machine


def rel_attention(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    return _known(replace(call, float32_precision=float32_precision("cuda")))


def unavailable() -> str | None:
    """Why it cannot be used, or None."""
    if NVCC is None:
        return "no nvcc: set PATH to where CUDA's compiler is"
    return simt_build.NO_COMPILER if simt_build.COMPILER is None else None


class Device:
    """Where launches go: the record in use, and what failed."""

    record: Record | None = None
    names: list[str] | None = None  # a list: launches leave their names there and do nothing
    fault: Exception | None = None
    size = (3, 4)  # see package.serving
    inputs: dict[str, torch.Tensor] = {}


def _nvcc(source: Path, *options: str) -> None:
    done = subprocess.run([NVCC, *FLAGS, *options, str(source)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


@functools.cache
def _folder() -> Path:
    """For what is compiled of these very sources."""
    found = hashlib.sha256(
        repr((FLAGS, PTX, HOST, COMPILED_FOR, subprocess.check_output([NVCC, "--version"]))).encode()
    )
    for path in sorted([*CSRC.glob("*.h"), *CSRC.glob("cuda/**/*")]):
        if path.suffix in (".h", ".cuh", ".cu"):
            found.update(repr(path.relative_to(CSRC).as_posix()).encode() + path.read_bytes())
    return own_cache(f"machine-nvcc-{found.hexdigest()[:16]}")


def _sources() -> list[Path]:
    return sorted((CSRC / "cuda").rglob("*.cu"))


Kernel = tuple[str, Module, list[tuple[int, int]]]


@functools.cache
def kernel(architecture: int, name: str) -> Kernel:
    """The PTX that a kernel is in, that as a module, and (bytes, alignment) of its parameters.

    Sources are compiled one after the other until it is found, those first whose own names are in the kernel's.
    """
    dtype = "bfloat16" if "BFloat16" in name else "float16" if "Half" in name else "float32"
    words = {dtype}
    if "process_kernel" in name or "warpgroup" in name:  # sm90/ has what prepares too, and compiles faster
        words.add("warpgroup")
    if "backward" in name or "postprocess" in name:
        words.add("backward")
    sources = sorted(_sources(), key=lambda source: len(words ^ set(source.stem.split("_")) - {"forward"}))
    return next(found[name] for source in sources if name in (found := _kernels(source, architecture)))


def compiled(source: Path, architecture: int) -> Path:
    """The PTX of a source of kernels."""
    path = _folder() / f"{source.stem}.{architecture}.ptx"
    with simt_build._locked(path.with_suffix(".lock")):
        if not path.exists():
            with simt_build._complete(path) as partial:
                _nvcc(source, *PTX, f"-arch=compute_{COMPILED_FOR[architecture]}", "-o", str(partial))
    return path


@functools.cache
def _kernels(source: Path, architecture: int) -> dict[str, Kernel]:
    ptx = compiled(source, architecture).read_text()
    module, found = Module(ptx, architecture), {}
    for name, parameters in re.findall(r"^(?:\.\w+ )*\.entry (\w+)\((.*?)\)", ptx, re.M | re.S):
        found[name] = ptx, module, [_layout(line) for line in parameters.split(",") if line.strip()]
    return found


def _layout(parameter: str) -> tuple[int, int]:
    """Bytes and alignment of `.param .align 8 .b8 name[576]` or `.param .u64 name`."""
    size = int(re.search(r"\.[busf](\d+) ", parameter)[1]) // 8
    count, align = re.search(r"\[(\d+)\]", parameter), re.search(r"\.align (\d+)", parameter)
    return size * int(count[1] if count else 1), int(align[1]) if align else size


def _host_object(name: str, sources: list[Path]) -> Path:
    """The host's code of all these sources."""
    path = _folder() / f"{name}.o"
    with simt_build._locked(path.with_suffix(".lock")):
        if not path.exists():
            all_of_them = path.with_suffix(".cu")
            all_of_them.write_text("".join(f'#include "{source}"\n' for source in sources))
            with simt_build._complete(path) as partial:
                _nvcc(all_of_them, *HOST, "-o", str(partial))
    return path


@functools.cache
def library() -> ctypes.CDLL:
    """The host code, its operator known to torch."""
    sources = [HERE / "cuda/runtime.cpp", *sorted((CSRC / "cuda").glob("*.cpp"))]
    sources += [CSRC / "call.cpp", CSRC / "stable" / "tensor.cpp"]
    # Headers of kernels are parsed once for all instances, which takes a quarter of the time. dispatch.cu stays apart,
    # because beside the templates it would itself make an instance that no source has.
    dispatch = CSRC / "cuda" / "dispatch.cu"
    instances = [source for source in _sources() if source != dispatch]
    path = _link(sources, [_host_object("dispatch", [dispatch]), _host_object("instances", instances)])
    torch.ops.load_library(str(path))
    found = ctypes.CDLL(str(path))
    found.machine_find.restype = ctypes.c_bool
    found.machine_on_launch(_launch)
    return found


def _link(sources: list[Path], objects: list[Path]) -> Path:
    from torch.utils import cpp_extension

    flags = ["-std=c++20", "-O1", "-g0", "-fPIC", f"-I{HERE / 'cuda'}", f"-I{CSRC}"]
    flags += ["-DXLNET_KERNELS_LOOKS_AT_VALUES=false"]  # as on a GPU
    flags += simt_build.of_torch()
    objects = [*objects, *(simt_build._compile(source, flags, _folder()) for source in sources)]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in objects)).hexdigest()[:16]
    result = _folder() / f"{_OPERATOR}-{key}.so"
    folder = cpp_extension.TORCH_LIB_PATH
    libraries = [f"-L{folder}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{folder}", "-Wl,-Bsymbolic"]
    with simt_build._locked(result.with_suffix(".lock")):
        if not result.exists():
            with simt_build._complete(result) as partial:
                simt_build._run([simt_build.COMPILER, "-shared", "-o", partial, *objects, *libraries])
    return result


@_CALLBACK
def _launch(name, grid, block, shared, arguments) -> int:
    """One launch of nvcc's host code."""
    try:
        if Device.names is not None:
            Device.names.append(name.decode())
            return 0
        record = Device.record
        ptx, module, layout = kernel(record.architecture, name.decode())
        parameters = bytearray()
        for number, (size, align) in enumerate(layout):
            parameters += bytes(-len(parameters) % align) + ctypes.string_at(arguments[number], size)
        counts: Counts = module.launch(
            name.decode(),
            tuple(grid.contents),
            tuple(block.contents),
            bytes(parameters),
            shared,
            _regions(parameters),
            seed=record.seed + len(record.launches),
            round_to_nearest=record.round_to_nearest,
            check=record.check,
        )
        ran = Launch(name.decode(), tuple(grid.contents), block.contents[0], shared, ptx, counts)
        record.launches.append(ran)
        return 0
    except Exception as error:
        Device.fault = error
        return 719  # cudaErrorLaunchFailure


def _regions(parameters: bytes) -> list[tuple[int, int, bool, str]]:
    """The tensors, and arrays in the workspace, that some word of the parameters points into."""
    found: dict[int, tuple[int, int, bool, str]] = {}
    storages = {name: tensor.untyped_storage() for name, tensor in Device.inputs.items()}
    place = (ctypes.c_uint64 * 2)()
    for (word,) in struct.iter_unpack("Q", parameters[: len(parameters) // 8 * 8]):
        for name, storage in storages.items():
            if 0 <= word - storage.data_ptr() < storage.nbytes():
                found[storage.data_ptr()] = storage.data_ptr(), storage.nbytes(), True, name
                break
        else:
            if word and library().machine_find(ctypes.c_uint64(word), place):
                found[place[0]] = place[0], place[1], True, f"{place[1]} bytes of device memory"
    return list(found.values())


def _call(operator: str):
    """An implementation of the outer operator: runs the inner one with its inputs known."""

    def run(*inputs):
        inner = getattr(torch.ops.xlnet_kernels, operator)
        names = [argument.name for argument in inner.default._schema.arguments]
        given = zip(names, inputs, strict=True)
        Device.inputs = {name: value for name, value in given if isinstance(value, torch.Tensor)}
        Device.fault = None
        host = library()
        host.machine_device(Device.record.architecture, SHARED_MEMORY[Device.record.architecture])
        host.machine_size(*Device.size)
        host.machine_know()
        try:
            return inner(*inputs)
        except RuntimeError as error:
            if Device.fault is not None:
                raise Device.fault from error
            raise
        finally:
            host.machine_forget()
            Device.inputs = {}

    return run


for _suffix in ("", "_backward"):
    torch.library.impl(f"xlnet_kernels::{_OPERATOR}_call{_suffix}", "cpu", _call(_OPERATOR + _suffix))

__all__ = ["Device", "Fault", "kernel", "library", "rel_attention", "unavailable"]
