"""Every header of csrc includes what it uses: it compiles alone, as an editor or a reader opens it.

The build compiles headers with which a source of their name begins.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import pytest

from lib.simt import simt_build
from tests import ROOT

CSRC = ROOT / "csrc"
HEADERS = sorted([*CSRC.rglob("*.h"), *CSRC.rglob("*.cuh")])
CPU = sorted((CSRC / "cpu").rglob("*.h"))
INSTRUCTION_SETS = {path.stem.removeprefix("kernels_"): path for path in sorted((CSRC / "cpu").glob("kernels_*.cpp"))}
CUDA = [path for path in HEADERS if path.is_relative_to(CSRC / "cuda")]
OF_TORCH_AND_CUDA = {"torch_device.h"}  # it includes headers that a torch without CUDA does not have
DEVICE_ONLY = [path for path in CUDA if path.parent.name == "sm90" or path.name == "primitives.cuh"]
COMPILERS = sorted({simt_build.COMPILER or "c++", shutil.which("clang++") or "clang++"})
needs_compiler = pytest.mark.skipif(simt_build.COMPILER is None, reason=simt_build.NO_COMPILER)


def assert_compile(compiler: str, sources: Iterable[Path], *flags: str | Path) -> None:
    """Each of the sources, as a translation unit of its own."""
    sources = list(sources)
    assert sources
    command = [compiler, "-fsyntax-only", "-Wno-psabi", f"-I{CSRC}", *flags, "-x", "c++", *sources]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if "error" in line)


@needs_compiler
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda path: Path(path).name)
def test_headers_of_the_cpu(compiler, name, tmp_path):
    """Each in the place of instance.h, after the macros and the target of the instruction set."""
    is_arm = platform.machine() in ("aarch64", "arm64")
    if name == "neon" and not is_arm:
        compiler = "aarch64-linux-gnu-g++"
    if shutil.which(compiler) is None or (name in ("avx2", "avx512") and is_arm):
        pytest.skip(f"no compiler for {name}")
    text = INSTRUCTION_SETS[name].read_text()
    assert text.count('"instance.h"') == 1
    for number, header in enumerate(CPU):
        source = tmp_path / f"{number}_{header.stem}.cpp"
        source.write_text(text.replace('"instance.h"', f'"{header}"'))
    # C++17: torch 2.10 compiles as such, and Clang takes some of C++20 there only from version 16 on
    assert_compile(compiler, tmp_path.glob("*.cpp"), "-std=c++17", f"-I{CSRC / 'cpu'}")


def is_first_in_its_source(header: Path) -> bool:
    """Whether the source of the header's name begins with it, so that the build compiles the header alone."""
    source = header.with_suffix(".cpp")
    lines = source.read_text().splitlines() if source.exists() else []
    return next((line for line in lines if line and not line.startswith("//")), "") == f'#include "{header.name}"'


@needs_compiler
def test_headers_of_torch():
    from torch.utils import cpp_extension

    folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = [flag for folder in folders for flag in ("-isystem", folder)]
    of_the_fast_path = list(CSRC.glob("fast_path/*.h"))
    assert of_the_fast_path and all(map(is_first_in_its_source, of_the_fast_path))
    others = [path for path in (*CSRC.glob("*.h"), *CSRC.glob("stable/*.h")) if not is_first_in_its_source(path)]
    assert_compile(
        simt_build.COMPILER, others, "-std=c++20", f"-DTORCH_TARGET_VERSION={simt_build.target_version()}", *flags
    )


@needs_compiler
def test_headers_of_cuda():
    """On the host, by the primitives of benchmarks/lib/simt."""
    headers = [path for path in CUDA if path not in DEVICE_ONLY and path.name not in OF_TORCH_AND_CUDA]
    assert_compile(simt_build.COMPILER, headers, "-std=c++17", f"-I{simt_build.SIMT}", f"-I{CSRC / 'cuda'}")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: set PATH to where CUDA's compiler is")
@pytest.mark.parametrize("header", DEVICE_ONLY, ids=lambda path: path.relative_to(CSRC).as_posix())
def test_headers_of_the_device(header, tmp_path):
    command = ["nvcc", "-std=c++17", "-arch=sm_90a", f"-I{CSRC}", f"-I{CSRC / 'cuda'}", "-x", "cu", "-ptx", header]
    done = subprocess.run([*command, "-o", tmp_path / "parsed"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_headers_are_guarded():
    assert not [path for path in HEADERS if path.read_text().splitlines().count("#pragma once") != 1]


def test_headers_do_not_include_each_other_in_circles():
    included = {
        path: {
            found.resolve()
            for name in re.findall(r'^ *#include "([^"]+)"', path.read_text(), re.MULTILINE)
            for found in (path.parent / name, CSRC / name, CSRC / "cuda" / name)
            if found.exists()
        }
        for path in HEADERS
    }
    while ends := [path for path, others in included.items() if not others & included.keys()]:
        for path in ends:
            del included[path]
    assert not included


def test_files_that_comments_name_are_there():
    """As schedule.h, which a comment still names after it has been renamed, would not be."""
    names = {path.name for path in CSRC.rglob("*.*")}
    for path in [*HEADERS, *CSRC.rglob("*.c*")]:
        comments = " ".join(re.findall(r"//(.*)", path.read_text()))
        assert not set(re.findall(r"\b(\w+\.(?:h|cuh|cu|cpp))\b", comments)) - names, path
