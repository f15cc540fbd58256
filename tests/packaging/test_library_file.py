"""The file of a compiled library, looked at before it is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from xlnet_kernels import _extension, _library_file
from xlnet_kernels.call import Call

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ELF files are Linux's")


def test_a_library_is_taken_where_proc_is_not_mounted(tmp_path, monkeypatch):
    python = Path("/proc/self/exe").resolve()
    assert _library_file.fault(python) is None
    monkeypatch.setattr(_library_file, "_SELF", tmp_path / "missing")
    assert _library_file.fault(python) is None
    cut = tmp_path / "cut.so"
    cut.write_bytes(python.read_bytes()[:4096])
    assert "is truncated: it has 4096 bytes" in _library_file.fault(cut)


def test_a_damaged_header_is_named(tmp_path):
    damaged = bytearray(Path("/proc/self/exe").read_bytes())
    damaged[54:56] = bytes(2)  # e_phentsize
    path = tmp_path / "damaged.so"
    path.write_bytes(damaged)
    assert _library_file.fault(path) == "has a damaged header: segments of 0 bytes each"


def test_a_library_of_other_arguments_is_named(tmp_path):
    """A stale one, beside newer Python: torch's registry would end the import."""
    path = tmp_path / "kernels.so"
    path.write_bytes(b"\x7fELF..\0xlnet_kernels::rel_attention:query,key,\0..")
    assert _library_file.takes_other_arguments(path, ["query", "key"]) is None
    other = "is of another version of this package: its operator has other arguments"
    assert _library_file.takes_other_arguments(path, ["query", "key", "value"]) == other
    path.write_bytes(b"\x7fELF without a list")
    assert _library_file.takes_other_arguments(path, ["query"]) == other


@pytest.mark.skipif(_extension.module is None, reason="the library is not there")
def test_the_library_has_the_arguments_of_the_table():
    assert _library_file.takes_other_arguments(Path(_extension.module.__file__), Call._fields) is None
