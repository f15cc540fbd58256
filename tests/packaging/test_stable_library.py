"""The library of kernels is for every Python and every torch from MIN_TORCH on; test_install.py has its wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from xlnet_kernels import _extension

needs_library = pytest.mark.skipif(
    _extension.module is None or sys.platform != "linux" or shutil.which("nm") is None,
    reason=f"needs the library and nm: {_extension.reason}",
)
STABLE = ROOT / "csrc" / "stable"


def undefined_symbols(library: Path) -> set[str]:
    text = subprocess.run(["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0] for line in text.splitlines()}


def needed_libraries(library: Path) -> set[str]:
    text = subprocess.run(["objdump", "-p", library], check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"NEEDED +(\S+)", text))


def assert_is_stable(library: Path) -> None:
    """It asks for torch's stable interface and the compiler's libraries alone."""
    symbols = undefined_symbols(library)
    assert not {name for name in symbols if re.match(r"_?Py|GOMP_|omp_|__kmpc", name)}
    assert not {name for name in symbols if re.match(r"_Z\w*?(2at|3c10|5torch)\w", name)}
    assert {"torch_library_impl", "torch_parallel_for", "aoti_torch_empty_strided"} <= symbols
    others = {re.sub(r"\.so.*", "", name) for name in needed_libraries(library)}
    allowed = {"libtorch_cpu", "libtorch_cuda", "libcudart", "libstdc++", "libm", "libgcc_s", "libc", "libpthread"}
    assert {name for name in others if not name.startswith("ld-linux")} <= allowed


@needs_library
def test_symbols_of_the_library():
    assert_is_stable(Path(_extension.module.__file__))


def test_sources_include_the_stable_interface_alone():
    """But for csrc/fast_path, which is for one torch."""
    for path in (ROOT / "csrc").rglob("*.*"):
        if path.parent.name != "fast_path":
            found = re.findall(r"#include <((?:ATen|c10|torch|pybind11|Python)[/.][^>]*)>", path.read_text())
            allowed = r"torch/(headeronly|csrc/stable|csrc/inductor/aoti_torch/c)/"
            assert not [name for name in found if not re.match(allowed, name)], path
