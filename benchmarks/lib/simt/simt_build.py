"""Compiles CUDA sources with the host's C++ compiler against the files beside this one, and keeps what it has compiled.

Kept in a folder of the user's under the system's one for temporary files: an object as long as its source and the
headers that it includes are the same, a library under a name made of its objects' contents.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.own_cache import own_cache

SIMT = Path(__file__).resolve().parent
ROOT = SIMT.parents[2]

sys.path.insert(0, str(ROOT / "build_backend"))
from build_decisions import target_version  # noqa: E402

MACHINE = sorted(path for path in SIMT.glob("*.cpp") if path.name != "torch_memory.cpp")
COMPILERS = [os.environ.get("CXX", ""), "c++", "g++", "clang++"] if sys.platform == "linux" else []
COMPILER = next(filter(None, map(shutil.which, COMPILERS)), None)
FLAGS = ["-std=c++17", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", f"-I{SIMT}", f"-I{ROOT / 'csrc'}"]
FLAGS += ["-fstack-clash-protection"]  # large frames touch the page that traps below a fiber's stack
# Undefined behaviour of C++ ends the launch. Misaligned accesses are part of it: x86 allows them, a GPU does not.
SANITIZE = ["-fsanitize=undefined", "-fno-sanitize=vptr"]
NO_COMPILER = "no C++ compiler, or not Linux: benchmarks/lib/simt runs kernels compiled for the host"


def library(sources: Sequence[str | Path], name: str, extra_flags: Sequence[str] = ()) -> Path:
    """A shared library of CUDA (.cu) and C++ sources that run on the host, for ctypes."""
    return _build(sources, name, [*FLAGS, *extra_flags], [])


def of_torch() -> list[str]:
    """Flags for sources that include torch's headers."""
    import torch
    from torch.utils import cpp_extension

    flags = [flag for folder in cpp_extension.include_paths() for flag in ("-isystem", folder)]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", f'-DSIMT_TORCH="{torch.__version__}"']
    return [*flags, f"-DTORCH_TARGET_VERSION={target_version()}"]


def extension(sources: Sequence[str | Path], name: str, extra_flags: Sequence[str] = ()) -> Path:
    """A library of such sources, for torch.ops.load_library."""
    from torch.utils import cpp_extension

    folder = cpp_extension.TORCH_LIB_PATH
    link = [f"-L{folder}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{folder}"]
    return _build([SIMT / "torch_memory.cpp", *sources], name, [*FLAGS, *of_torch(), *extra_flags], link)


def _build(sources: Sequence[str | Path], name: str, flags: list[str], link: list[str]) -> Path:
    if COMPILER is None:
        raise RuntimeError(NO_COMPILER)
    cache = own_cache("simt")
    jobs = [(source, [*FLAGS, "-O3"], cache) for source in MACHINE]
    jobs += [(Path(source).resolve(), flags, cache) for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(_compile, *zip(*jobs, strict=True)))
    contents = hashlib.sha256(repr(link).encode())
    for path in objects:
        contents.update(path.read_bytes())
    result = cache / f"{name}-{contents.hexdigest()[:16]}.so"
    with _locked(cache / f"{name}.lock"):
        if not result.exists():
            with _complete(result) as partial:
                _run([COMPILER, "-shared", "-o", partial, *objects, *link, "-ldl", "-pthread"])
    return result


def _compile(source: Path, flags: list[str], cache: Path, compiler: str | None = COMPILER) -> Path:
    version = _run([compiler, "--version"])
    command = [compiler, *flags, "-x", "c++", "-c", source]
    key = hashlib.sha256(repr([version, *map(str, command)]).encode()).hexdigest()[:16]
    depends = cache / f"{source.stem}-{key}.json"
    with _locked(cache / f"{source.stem}-{key}.lock"):
        if depends.exists():
            known = json.loads(depends.read_text())
            kept = cache / known["object"]
            if kept.exists() and all(_digest(Path(path)) == digest for path, digest in known["files"].items()):
                return kept
        rules = cache / f"{source.stem}-{key}.d"
        partial = cache / f"{source.stem}-{key}.partial"
        started = time.time()
        _run([*command, "-MMD", "-MF", rules, "-o", partial])
        files = [Path(file) for file in rules.read_text().replace("\\\n", " ").split(":", 1)[1].split()]
        kept = cache / f"{source.stem}-{key}-{_digest(partial)[:16]}.o"
        partial.replace(kept)
        if all(file.stat().st_mtime < started for file in files):  # else the compiler may have seen another text
            with _complete(depends) as written:
                written.write_text(json.dumps({"object": kept.name, "files": {str(f): _digest(f) for f in files}}))
    return kept


def _run(command: Sequence[str | Path]) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """A file that has its name only when all of it is there."""
    partial = path.with_suffix(f".{os.getpid()}")
    yield partial
    partial.replace(path)
