"""The library of kernels is for every Python and every torch from MIN_TORCH on; `pip wheel` makes one wheel of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import ROOT
from tests.packaging import test_install
from tests.packaging.test_install import NOT_ISOLATED, compiler, run, tools, tree, with_torch  # noqa: F401
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, compiler, with_torch, tools):  # noqa: F811
    """As .github/workflows/wheels.yml makes it, but for auditwheel."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = test_install.Environment(folder / "env", compiler, borrow=[with_torch.packages, tools])
    source = shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(".*", "build", "*.so", "__pycache__"))
    options = {"XLNET_KERNELS_FAST_PATH": "0", "FORCE_CUDA": "0"}
    environment.pip("wheel", *NOT_ISOLATED, "-w", folder / "wheels", source, **options)
    (made,) = (folder / "wheels").iterdir()
    return made


@pytest.mark.slow
def test_wheel_is_for_every_python(wheel, tmp_path):
    assert re.fullmatch(r"xlnet_kernels-[\d.]+-py3-none-(linux|macosx)_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as opened:
        libraries = [name for name in opened.namelist() if name.endswith(".so")]
        opened.extractall(tmp_path)
    assert libraries == ["xlnet_kernels/_kernels.so"]
    assert_is_stable(tmp_path / libraries[0])


@pytest.mark.slow
def test_operator_of_the_wheel(wheel, tmp_path, compiler, with_torch):  # noqa: F811
    """The operator's tests of its kernels pass in an environment of its own, with the torch that runs these tests."""
    ours = [Path(entry) for entry in sys.path if entry.endswith("-packages")]  # pytest and its plugins
    environment = test_install.Environment(tmp_path / "env", compiler, borrow=[with_torch.packages, *ours])
    environment.pip("install", "--no-deps", wheel)
    for name in ("tests", "csrc", "build_backend", "benchmarks/lib"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    facts = environment.facts()
    assert facts["backends"]["cpu"] == "ready" and "it was not built" in facts["no_fast_path_because"]
    environment.run("-m", "pytest", "-q", "-x", "tests/operator/test_operator.py", "-k", "[cpu-", cwd=tmp_path)
