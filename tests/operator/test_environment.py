"""The package's environment variables set to nonsense: one line that names the variable, and calls that work."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import pytest
import torch

import xlnet_kernels as xk
from tests import ROOT
from tests.cases import assert_right, make
from xlnet_kernels import _environment, _extension, linear
from xlnet_kernels.backends import blocks, choose, cpu, first_calls

CACHED = _environment.leave_aside, linear.choice, first_calls._wish


@pytest.fixture(autouse=True)
def afresh():
    """Nothing has been said, and nothing chosen."""
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


READS = {
    "XLNET_KERNELS_SELF_CHECK": (first_calls._wish, ("off", "2", " 1")),
    "XLNET_KERNELS_BLOCK_BYTES": (lambda: blocks.budget(), ("0", "-1", "many", "1e6", "12.5")),
    "XLNET_KERNELS_LINEAR": (linear.library, ("blas", "MKL")),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (_, values) in READS.items() for value in values])
def test_nonsense_is_said_once_and_left_aside(monkeypatch, name, value):
    read, _ = READS[name]
    monkeypatch.delenv(name, raising=False)
    wanted = read()
    for function in CACHED:
        function.cache_clear()
    monkeypatch.setenv(name, value)
    line = f"{name} must be {_environment.TAKES[name]}, got {value!r}: it is left aside"
    with pytest.warns(RuntimeWarning, match=f"^{re.escape(line)}$") as said:
        assert read() == wanted == read()
    assert len(said) == 1 and xk.Linear(8, 8)(torch.zeros(1, 8)).shape == (1, 8)
    make().call("torch")


@pytest.mark.skipif(_extension.module is None, reason=str(_extension.reason))
def test_an_unknown_instruction_set_leaves_the_cpu_backend_out(monkeypatch):
    """The process that reads the variable is that of test_instruction_sets.py."""
    monkeypatch.setenv("XLNET_KERNELS_CPU", "avx1024")
    facts = vars(_extension.module) | {"cpu_instruction_set": None}
    monkeypatch.setattr(_extension, "module", SimpleNamespace(**facts))
    reason = "XLNET_KERNELS_CPU names no instruction set that this processor has: avx1024"
    assert str(xk.backends()["cpu"]) == reason
    with pytest.raises(RuntimeError, match=f'^backend="cpu" is unavailable: {reason}$'):
        make().call("cpu")
    assert choose(None, torch.device("cpu"), torch.float32, 8) is not cpu
    assert_right(make(), None)


def test_names_that_are_none_are_said(monkeypatch):
    for name in _environment.OF_TESTS:
        monkeypatch.delenv(name, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _environment.warn_of_names_and_instruction_set(None)
        monkeypatch.setenv("XLNET_KERNELS_SKIP_EXT", "1")
        _environment.warn_of_names_and_instruction_set(None)
    monkeypatch.setenv("XLNET_KERNELS_SELFCHECK", "0")
    with pytest.warns(RuntimeWarning, match="^XLNET_KERNELS_SELFCHECK is no variable of xlnet_kernels .*SELF_CHECK"):
        _environment.warn_of_names_and_instruction_set(None)


def test_every_variable_is_in_the_table_and_read_in_one_place():
    """But for those that C++ and the build read."""
    quoted = re.compile(r"""(?:environ(?:\.get)?\W+|getenv\(")(XLNET_KERNELS_[A-Z_]+)""")
    folders = ("xlnet_kernels", "csrc", "build_backend", "benchmarks", "examples", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".cpp", ".h")]
    found = {file: set(quoted.findall(file.read_text())) for file in [*files, ROOT / "setup.py"]}
    assert set().union(*found.values()) <= {*_environment.TAKES, *_environment.OF_TESTS}
    ours = {file.name: names for file, names in found.items() if names and ROOT / "xlnet_kernels" in file.parents}
    # These two name in an error what C++ has read.
    assert ours == {name: {"XLNET_KERNELS_CPU"} for name in ours} and set(ours) <= {"cpu.py"}
    install = (ROOT / "docs" / "install.md").read_text()
    assert all(f"`{name}" in install for name in _environment.TAKES)
