"""Compiles the machine's C++ sources, all at once into one library kept by their contents."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.own_cache import own_cache
from lib.simt import simt_build

FOLDER = Path(__file__).resolve().parent
SOURCES = sorted(FOLDER.glob("*.cpp"))
# Contraction off: a PTX mul and add round twice. Aliasing: a register is read as what the instruction says it is.
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-strict-aliasing"]
FLAGS += ["-fno-trapping-math", "-fno-math-errno", "-fvisibility=hidden", f"-I{FOLDER}"]


@functools.cache
def library() -> Path:
    """The shared library. Raises RuntimeError with the compiler's words, or when there is none."""
    if simt_build.COMPILER is None:
        raise RuntimeError(simt_build.NO_COMPILER)
    cache = own_cache(f"machine-{platform.machine()}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: simt_build._compile(source, FLAGS, cache), SOURCES))
    key = hashlib.sha256(b"".join(path.read_bytes() for path in objects)).hexdigest()[:16]
    result = cache / f"machine-{key}.so"
    with simt_build._locked(cache / "machine.lock"):
        if not result.exists():
            with simt_build._complete(result) as partial:
                simt_build._run([simt_build.COMPILER, "-shared", "-o", partial, *objects])
    return result
