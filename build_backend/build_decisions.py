"""Decisions of the build, as plain functions of the environment: extension, CUDA, number of jobs.

Imports only the standard library, so that the PEP 517 backend, setup.py and the tests can use it.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

from cuda_architectures import Architectures

# For compiling, because its stable ABI has everything that the kernels need.
MIN_TORCH = (2, 10)
TORCH_REQUIREMENT = f"torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}"
# A translation unit that includes torch's headers and many template instances peaks at 1-2 GB.
BYTES_PER_JOB = 2 * 2**30
# Launchers: programs that call the compiler given after them
LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")
# Macro that enables the instructions in csrc/cpu/bfloat16/x86.cpp
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


def find_compiler(environ: Mapping[str, str] = os.environ) -> tuple[str, list[str] | None]:
    """CXX, called by torch's cpp_extension, and its words (None: not found).

    It is a shell command: a compiler with flags or after a launcher ("ccache g++ -m64"), quoted if its path has spaces.
    A path with spaces is also valid without quotes: `shlex.join` of the words is then the shell command.
    """
    name = environ.get("CXX", "").strip() or "c++"
    words = [name] if Path(name).is_file() else _words(name)
    is_launched = len(words) > 1 and Path(words[0]).name in LAUNCHERS
    found = [shutil.which(word, path=environ.get("PATH")) for word in words[: 1 + is_launched]]
    return name, None if not found or None in found else [*map(str, found), *words[len(found) :]]


def host_compiler(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Flags for nvcc's host compiler if CC is more than a program, because torch passes CC on as a single program."""
    words = _words(environ.get("CC", ""))
    if len(words) < 2:
        return []
    return ["-ccbin", words[Path(words[0]).name in LAUNCHERS]]


def _words(command: str) -> list[str]:
    """The words of a shell command; a single word if a quote is open."""
    try:
        return shlex.split(command)
    except ValueError:
        return [command]


def target_version() -> str:
    """MIN_TORCH for TORCH_TARGET_VERSION, which limits torch's headers to that version's interface."""
    return f"0x{MIN_TORCH[0]:02x}{MIN_TORCH[1]:02x}000000000000"


def extension_decision(
    environ: Mapping[str, str] = os.environ, platform: str = sys.platform, torch: str | None = None
) -> Decision:
    """Whether to compile the library of kernels.

    torch: the installed version. Without one the backend requires one; an old version stays, because another torch
        would compile a library that this torch cannot load.
    """
    skip = environ.get("XLNET_KERNELS_SKIP_EXT", "")
    if skip not in ("", "0"):
        doubt = "" if skip == "1" else f" to {skip!r}, which is neither 0 nor 1 and counts as 1"
        return Decision(False, f"XLNET_KERNELS_SKIP_EXT is set{doubt}")
    if platform == "win32":
        return Decision(False, "the kernels are written for GCC and Clang, torch on Windows is built for MSVC")
    if torch is not None and not torch_is_usable(torch):
        return Decision(False, f'compiled kernels need {TORCH_REQUIREMENT}, found {torch}: backend "torch" serves')
    name, compiler = find_compiler(environ)
    if compiler is None:
        return Decision(
            False,
            f"there is no C++ compiler: '{name}' was not found (install one, or set CXX); backend \"torch\" serves",
        )
    return Decision(True, f"there is a C++ compiler: {shlex.join(compiler)}")


def fast_path_decision(environ: Mapping[str, str] = os.environ) -> Decision:
    """Whether to compile csrc/fast_path, built for one Python and one minor version of torch."""
    wish = environ.get("XLNET_KERNELS_FAST_PATH", "")
    if wish == "0":
        return Decision(False, "XLNET_KERNELS_FAST_PATH=0")
    doubt = "" if wish in ("", "1") else f" (XLNET_KERNELS_FAST_PATH={wish!r} is neither 0 nor 1)"
    return Decision(True, f"small calls are cheaper with it{doubt}")


def bfloat16_decision(
    source: Path,
    environ: Mapping[str, str] = os.environ,
    system: str = platform.system(),
    machine: str = platform.machine(),
) -> Decision:
    """Whether compiler and assembler know the matrix instructions of `source`, found by compiling it.

    For x86-64 only, because those of ARM are written as numbers.
    """
    name, compiler = find_compiler(environ)
    if compiler is None:
        return Decision(False, f"there is no C++ compiler: '{name}' was not found")
    if system in ("Linux", "Darwin") and machine in ("aarch64", "arm64"):
        return Decision(True, "any compiler takes those of ARM")
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        return Decision(False, "they are of x86-64 and ARM processors, the former asked for in Linux's way")
    command = [*compiler, "-x", "c++", "-std=c++17", "-O1", f"-D{BFLOAT16_MACRO}", "-c", str(source), "-o", os.devnull]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode != 0:
        first = next((line for line in found.stderr.splitlines() if "rror" in line), "no message")
        return Decision(False, f"{shlex.join(compiler)} does not compile {source.name} ({first.strip()})")
    return Decision(True, f"{shlex.join(compiler)} compiles {source.name}")


def cuda_decision(
    environ: Mapping[str, str],
    torch_cuda: str | None,
    nvcc: str | None,
    cuda_sources: list[str],
    nvcc_cuda: str | None = None,
    architectures: Callable[[], Architectures] | None = None,
) -> Decision:
    """Whether CUDA sources join the extension.

    A visible GPU is not required, because containers are built without one. FORCE_CUDA=1 requires CUDA: a missing part
    is then an error (ValueError), not a CPU build. FORCE_CUDA=0 excludes CUDA. TORCH_CUDA_ARCH_LIST alone requires
    nothing, because images set it for all their builds.

    Args:
        torch_cuda, nvcc_cuda: versions, e.g. "12.6"; None where unknown, torch's also without CUDA.
        architectures: function that returns the architectures, called only when all other parts are present.
    """
    force = environ.get("FORCE_CUDA", "")
    if force == "0":
        return Decision(False, "FORCE_CUDA=0")
    if not cuda_sources:
        return Decision(
            False, "this version has no CUDA sources" + (f" (FORCE_CUDA={force} changes nothing)" if force else "")
        )
    missing = []
    if torch_cuda is None:
        missing.append("torch is a build without CUDA")
    if nvcc is None:
        missing.append("nvcc was not found (set CUDA_HOME)")
    if torch_cuda and nvcc_cuda and torch_cuda.split(".")[0] != nvcc_cuda.split(".")[0]:
        missing.append(f"torch is built for CUDA {torch_cuda} and {nvcc} is of CUDA {nvcc_cuda} (set CUDA_HOME)")
    chosen = None if missing or architectures is None else architectures()
    left_out = f"left out: {', '.join(chosen.left_out)}" if chosen and chosen.left_out else ""
    if chosen and not chosen.names:
        missing.append(f"nothing that is asked for can be compiled ({left_out})")
    if missing and force:
        raise ValueError(f"FORCE_CUDA={force}, but {' and '.join(missing)}; FORCE_CUDA=0 builds without CUDA")
    if missing:
        return Decision(False, " and ".join(missing))
    built_for = f", for {', '.join(chosen.names)}" if chosen else ""
    reason = f"torch is built for CUDA {torch_cuda} and there is {nvcc}{built_for}"
    return Decision(True, reason + (f"; {left_out}" if left_out else ""))


def cuda_home(environ: Mapping[str, str] = os.environ) -> str | None:
    """The CUDA toolkit of the nvcc on PATH, also if that is a link or a script; None if unknown."""
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cu") as source:  # a dry run prints its folder
        said = subprocess.run([nvcc, "--dryrun", source.name], capture_output=True, text=True).stderr
    found = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return str(Path(found[1].strip()).resolve()) if found else None


def nvcc_version(nvcc: str) -> str | None:
    """Version of an nvcc, such as "12.6"; None if unknown."""
    found = re.search(r"release (\d+\.\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)
    return found[1] if found else None


def max_jobs(cores: int, free_bytes: int | None) -> int:
    """Number of parallel compilers: one per core, limited by memory, at least one."""
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
