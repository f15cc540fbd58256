"""The harness that runs CUDA kernels on the host: accesses outside of memory, and what is compiled when."""

from __future__ import annotations

import ctypes
import re
from itertools import product

import pytest
import torch

from lib.simt import simt_build
from tests import ROOT
from tests.cuda.simt_kernels import SELFTEST, Access, Kernels
from tests.cuda.simt_memory import guarded, torch_guarded

pytestmark = pytest.mark.skipif(simt_build.COMPILER is None, reason=simt_build.NO_COMPILER)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels(simt_build.library([SELFTEST], "selftest"))


@pytest.mark.parametrize("bytes_", [256, 4096, 4096 + 64])
@pytest.mark.parametrize("write", [True, False])
def test_access_behind_shared_memory(kernels, bytes_, write):
    out = torch.zeros(1)
    for beyond in (0, 12, 4092):
        text = kernels("access", Access, (out, None, (bytes_ + beyond) // 4, 33, write), bytes_)
        access = rf"thread 33 .*{'writes' if write else 'reads'} shared memory"
        assert re.search(rf"{access}, {beyond} bytes beyond its end of {bytes_} bytes", text), text
        assert "after sync_block at selftest.cu" in text
    assert kernels("access", Access, (out, None, bytes_ // 4 - 1, 33, write), bytes_) is None


def test_access_before_shared_memory(kernels):
    out = torch.zeros(1)
    # Whole pages: it begins where a page that traps ends. Else it is found afterwards.
    assert "shared memory, 4 bytes before its start" in kernels("access", Access, (out, None, -1, 3, True), 4096)
    assert "shared memory was written 4 bytes before" in kernels("access", Access, (out, None, -1, 3, True), 256)
    assert kernels("access", Access, (out, None, -1, 3, False), 256) is None and out.isnan()


def test_shared_memory_starts_as_nan(kernels):
    out = torch.zeros(1)
    assert kernels("access", Access, (out, None, 5, 0, True), 64) is None
    assert kernels("access", Access, (out, None, 5, 0, False), 64) is None and out.isnan()


@pytest.mark.parametrize("count", [3, 1024, 1500])
def test_access_outside_a_tensor(kernels, count):
    out = torch.zeros(1)
    for at_start, index, write in product((False, True), (-1, count), (True, False)):
        tensor = guarded(kernels.library, torch.ones(count), at_start=at_start)
        text = kernels("access", Access, (out, tensor, index, 8, write), 0)
        where = "4 bytes before its start" if index < 0 else f"0 bytes beyond its end of {4 * count} bytes"
        if text is None:  # not at the page that traps: a read gives NaN, a write is found after the launch
            assert out.isnan() and not write and (at_start == (index > 0) or index == count == 3)
        else:
            assert "global memory" in text and where in text, text
        assert kernels("access", Access, (out, tensor, count - 1, 8, False), 0) is None or write
        assert out.item() == 1 or write
        del tensor


def test_guarded_keeps_strides_and_values(kernels):
    matrix = torch.randn(4, 6)
    for tensor in (matrix.mT, matrix[:, 1:4], matrix[:, None].expand(4, 7, 6), torch.ones(0)):
        copy = guarded(kernels.library, tensor)
        assert torch.equal(copy, tensor) and copy.stride() == tensor.stride()
    flags = torch.tensor([True, False, True])
    assert torch.equal(guarded(kernels.library, flags), flags)


def test_torch_guarded(kernels):
    """Tensors that are made while a kernel's launcher runs, too."""
    extension = Kernels(simt_build.extension([SELFTEST], "selftest-torch"))
    out = torch.zeros(1)
    for at_start, index in ((False, 1000), (True, -1)):
        with torch_guarded(extension.library, at_start):
            tensor = torch.randn(10, 100) @ torch.eye(100)
        text = extension("access", Access, (out, tensor, index, 0, False), 0)
        assert "reads global memory" in text and ("its end of 4000" if index > 0 else "before its start") in text
        assert extension("access", Access, (out, tensor, 999, 0, False), 0) is None
        assert out == tensor[9, 99]
    usual = torch.zeros(1000)
    assert extension("access", Access, (out, usual, 1003, 0, False), 0) is None


def test_library_follows_its_headers(tmp_path):
    (tmp_path / "value.cu").write_text('#include "value.h"\nextern "C" int value() { return VALUE; }\n')
    paths = []
    for value in (1, 1, 2):
        (tmp_path / "value.h").write_text(f"#define VALUE {value}\n")
        paths.append(simt_build.library([tmp_path / "value.cu"], "value"))
        assert ctypes.CDLL(str(paths[-1])).value() == value
    assert paths[0] == paths[1] != paths[2]


def test_what_the_compiler_refuses_is_shown(tmp_path):
    (tmp_path / "wrong.cu").write_text("int f() { return nothing; }\n")
    with pytest.raises(RuntimeError, match="wrong.cu:1:.*nothing"):
        simt_build.library([tmp_path / "wrong.cu"], "wrong")


def test_host_has_every_name_of_the_device():
    """Kernels that compile for one compile for the other."""
    names = r"^(?:DEVICE|inline) [\w:*& ]+?\b(\w+)(?:<\w+>)?\("
    device, host = (
        set(re.findall(names, path.read_text(), re.MULTILINE))
        for path in (ROOT / "csrc" / "cuda" / "primitives.cuh", simt_build.SIMT / "primitives.cuh")
    )
    assert len(device) > 20
    assert host == device
