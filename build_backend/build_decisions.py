"""What the build decides, as plain functions of what it finds: extension or not, CUDA or not, how many jobs.

Imports nothing but the standard library, so that the PEP 517 backend, setup.py and the tests can all use it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

MIN_TORCH = (2, 6)
TORCH_REQUIREMENT = f"torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}"
# A translation unit that includes torch's headers and many template instances peaks at 1-2 GB.
BYTES_PER_JOB = 2 * 2**30
# Compiles csrc/cpu/bfloat16/native.cpp with its instructions
BFLOAT16_MACRO = "XLNET_KERNELS_BFLOAT16_INSTRUCTIONS"


class Decision(NamedTuple):
    build: bool
    reason: str

    def __str__(self) -> str:
        return f"{'yes' if self.build else 'no'}, because {self.reason}"


def torch_version() -> str | None:
    """Version of the importable torch, found without importing it; None if there is none."""
    if util.find_spec("torch") is None:
        return None
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:  # e.g. torch run from its own source tree
        import torch

        return torch.__version__


def torch_is_usable(version: str | None) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return found is not None and (int(found[1]), int(found[2])) >= MIN_TORCH


def find_compiler(environ: Mapping[str, str] = os.environ) -> tuple[str, str | None]:
    """Name of the C++ compiler that torch's cpp_extension will call, and where it is (None: nowhere)."""
    name = environ.get("CXX") or "c++"
    return name, shutil.which(name, path=environ.get("PATH"))


def openmp_flags(environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> list[str]:
    """What compiles at::parallel_for, which lives in torch's headers, where torch has OpenMP.

    Not for the linker: the symbols then come from the OpenMP runtime that torch itself has loaded, so there is one
    thread pool and not two. Clang calls a runtime of its own, which torch has not loaded, and Apple's takes no such
    flag: register.cpp then uses plain threads.
    """
    path = find_compiler(environ)[1]
    if platform != "linux" or path is None:
        return []
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    return [] if "clang" in version else ["-fopenmp"]


def extension_decision(environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Decision:
    """Whether to compile `xlnet_kernels._C`. What torch there is does not matter here: the backend asks for one."""
    if environ.get("XLNET_KERNELS_SKIP_EXT", "0") not in ("", "0"):
        return Decision(False, "XLNET_KERNELS_SKIP_EXT is set")
    if platform == "win32":
        return Decision(False, "the kernels are written for GCC and Clang, torch on Windows is built for MSVC")
    name, path = find_compiler(environ)
    if path is None:
        return Decision(False, f"there is no C++ compiler: '{name}' was not found (install one, or set CXX)")
    return Decision(True, f"there is a C++ compiler: {path}")


def bfloat16_decision(
    source: Path,
    environ: Mapping[str, str] = os.environ,
    system: str = platform.system(),
    machine: str = platform.machine(),
) -> Decision:
    """Whether the compiler and its assembler know the matrix instructions of `source`: it is compiled to find out.

    That is for x86-64; those of ARM are written as numbers.
    """
    name, path = find_compiler(environ)
    if path is None:
        return Decision(False, f"there is no C++ compiler: '{name}' was not found")
    if system in ("Linux", "Darwin") and machine in ("aarch64", "arm64"):
        return Decision(True, "any compiler takes those of ARM")
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        return Decision(False, "they are of x86-64 and ARM processors, the former asked for in Linux's way")
    command = [path, "-x", "c++", "-std=c++17", "-O1", f"-D{BFLOAT16_MACRO}", "-c", str(source), "-o", os.devnull]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode != 0:
        first = next((line for line in found.stderr.splitlines() if "rror" in line), "no message")
        return Decision(False, f"{path} does not compile {source.name} ({first.strip()})")
    return Decision(True, f"{path} compiles {source.name}")


def cuda_decision(
    environ: Mapping[str, str], torch_cuda: str | None, nvcc: str | None, cuda_sources: list[str]
) -> Decision:
    """Whether CUDA sources join the extension.

    A visible GPU is no condition: containers are built without one. FORCE_CUDA=1 or TORCH_CUDA_ARCH_LIST ask for
    CUDA, so that what is missing is an error (ValueError) and not a silent CPU build; FORCE_CUDA=0 rules it out.
    """
    force = environ.get("FORCE_CUDA", "")
    if force == "0":
        return Decision(False, "FORCE_CUDA=0")
    if force:
        asked = f"FORCE_CUDA={force}"
    else:
        asked = "TORCH_CUDA_ARCH_LIST is set" if environ.get("TORCH_CUDA_ARCH_LIST") else ""
    if not cuda_sources:
        return Decision(False, "this version has no CUDA sources" + (f" ({asked} changes nothing)" if asked else ""))
    missing = []
    if torch_cuda is None:
        missing.append("torch is a build without CUDA")
    if nvcc is None:
        missing.append("nvcc was not found (set CUDA_HOME)")
    if not missing:
        return Decision(True, f"torch is built for CUDA {torch_cuda} and there is {nvcc}")
    if asked:
        raise ValueError(f"{asked}, but {' and '.join(missing)}; FORCE_CUDA=0 builds without CUDA")
    return Decision(False, " and ".join(missing))


def cuda_home(environ: Mapping[str, str] = os.environ) -> str | None:
    """The CUDA toolkit that the nvcc on PATH belongs to, also where that is a link or a script; None if unknown."""
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cu") as source:  # it says where it lives before it would compile
        said = subprocess.run([nvcc, "--dryrun", source.name], capture_output=True, text=True).stderr
    found = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return str(Path(found[1].strip()).resolve()) if found else None


def nvcc_version(nvcc: str) -> str | None:
    """ "12.6" of an nvcc; None if it does not say."""
    found = re.search(r"release (\d+\.\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)
    return found[1] if found else None


def cuda_architectures(seen: Collection[tuple[int, int]], *cuda_versions: str | None) -> list[str]:
    """What to compile for: the GPUs seen here, or else all that every one of these CUDA versions, torch's and nvcc's,
    knows, with PTX of the last for those to come."""
    if seen:
        return [_architecture(*capability) for capability in sorted(seen)]
    versions = [tuple(map(int, version.split("."))) for version in cuda_versions if version]
    # compute_100 came with CUDA 12.8 (release notes)
    # and sm_90a's PTX is of use on no other GPU: that of sm_80 is then for those to come
    return ["8.0", "9.0a", "10.0+PTX"] if all(version >= (12, 8) for version in versions) else ["8.0+PTX", "9.0a"]


def _architecture(major: int, minor: int) -> str:
    """As TORCH_CUDA_ARCH_LIST has it: wgmma of csrc/cuda/sm90 is part of 9.0a, not of 9.0."""
    return "9.0a" if (major, minor) == (9, 0) else f"{major}.{minor}"


def max_jobs(cores: int, free_bytes: int | None) -> int:
    """Compilers to run at once: one per core, as far as memory lasts, at least one."""
    return max(1, cores if free_bytes is None else min(cores, free_bytes // BYTES_PER_JOB))


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes this process may still use: the machine's free memory or the container's limit; None if unknown."""
    bounds = []
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
        bounds += [int(found[1]) * 1024] if found else []
    except OSError:
        pass
    try:
        bounds.append(int((root / "sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no cgroup v2, or the word "max"
        pass
    return min(bounds, default=None)
