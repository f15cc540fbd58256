"""When the CUDA backend can be used, and what it says when it cannot; the kernels have tests of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from xlnet_kernels import _extension
from xlnet_kernels.backends import cuda

ARCHITECTURES = "8.0;9.0a;10.0+PTX"


@pytest.mark.parametrize(
    "architectures, device, runs",
    [
        (ARCHITECTURES, (7, 5), False),
        (ARCHITECTURES, (8, 0), True),
        (ARCHITECTURES, (8, 9), True),  # code for sm_80 runs on any 8.x
        (ARCHITECTURES, (9, 0), True),
        (ARCHITECTURES, (10, 3), True),
        (ARCHITECTURES, (12, 0), True),  # by PTX
        ("9.0a", (10, 0), False),
        ("9.0", (8, 0), False),
        ("8.6", (8, 0), False),
        ("10.0f", (10, 3), True),
        ("10.0a", (10, 3), False),
        ("8.0+PTX", (9, 0), True),
    ],
)
def test_which_gpus_the_compiled_code_runs_on(architectures, device, runs):
    assert cuda._runs_on(architectures, device) is runs


@pytest.mark.parametrize(
    "module, available, capability, reason",
    [
        (None, False, None, "the C++ extension is not loaded"),
        (SimpleNamespace(cuda_version=None), False, None, "the extension was built without CUDA"),
        ("built", False, None, "compiled for sm_80, sm_90a, sm_100 and PTX, no CUDA device"),
        ("built", True, (7, 5), "compiled for sm_80, sm_90a, sm_100 and PTX, this GPU has sm_75"),
        ("built", True, (9, 0), None),
    ],
    ids=["no-extension", "no-cuda", "no-gpu", "old-gpu", "ready"],
)
def test_says_why_it_is_unavailable(monkeypatch, module, available, capability, reason):
    if module == "built":
        module = SimpleNamespace(cuda_version="13.0", cuda_architectures=ARCHITECTURES)
    monkeypatch.setattr(_extension, "module", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    cuda._unavailable.cache_clear()
    try:
        found = cuda.unavailable()
    finally:
        cuda._unavailable.cache_clear()
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("capability, widths", [((9, 0), (128, 128)), ((8, 0), (128, 128)), ((8, 6), (64, 64))])
def test_wide_heads_need_much_shared_memory(monkeypatch, capability, widths):
    """Also where torch cannot say how much there is: 2.6 has no shared_memory_per_block_optin."""
    monkeypatch.setattr(_extension, "module", SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    cuda._max_width.cache_clear()
    try:
        assert tuple(cuda.max_width(dtype) for dtype in (torch.bfloat16, torch.float32)) == widths
    finally:
        cuda._max_width.cache_clear()


def test_the_extension_is_asked_how_wide_heads_may_be(monkeypatch):
    asked = SimpleNamespace(cuda_max_head_dim=lambda itemsize, device: 1000 * device + itemsize)
    monkeypatch.setattr(_extension, "module", asked)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    try:
        assert cuda.max_width(torch.float32) == 3004
    finally:
        cuda._max_width.cache_clear()
