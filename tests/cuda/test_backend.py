"""When the CUDA backend can be used, and what it says when it cannot; the kernels have tests of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from xlnet_kernels import _extension, info
from xlnet_kernels.backends import cuda

ARCHITECTURES = "8.0;9.0a;10.0+PTX"


@pytest.mark.parametrize(
    "architectures, device, code",
    [
        (ARCHITECTURES, (7, 5), None),
        (ARCHITECTURES, (8, 0), "code"),
        (ARCHITECTURES, (8, 9), "code"),  # code for sm_80 runs on any 8.x
        (ARCHITECTURES, (9, 0), "code"),
        (ARCHITECTURES, (10, 3), "code"),
        (ARCHITECTURES, (12, 0), "PTX"),
        ("9.0a", (10, 0), None),
        ("9.0", (8, 0), None),
        ("8.6", (8, 0), None),
        ("10.0f", (10, 3), "code"),
        ("10.0a", (10, 3), None),
        ("8.0+PTX", (9, 0), "PTX"),
        ("8.0+PTX;9.0", (9, 0), "code"),
        ("Hopper", (9, 0), None),  # words of other build systems are no error
        ("Ampere;8.0;", (8, 6), "code"),
        ("", (8, 6), None),
    ],
)
def test_which_gpus_the_compiled_code_runs_on(architectures, device, code):
    assert cuda._code_for(architectures, device) == code


@pytest.mark.parametrize(
    "module, available, capability, reason",
    [
        (None, False, None, "the C++ extension is not loaded"),
        (SimpleNamespace(cuda_version=None), False, None, "the extension was built without CUDA: "),
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
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda._unavailable.cache_clear()
    try:
        found = cuda.unavailable()
    finally:
        cuda._unavailable.cache_clear()
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("named, shown", [("Hopper", "Hopper"), ("Ampere;9.0a+PTX", "Ampere, sm_90a and PTX")])
def test_words_without_a_number_are_shown_as_they_are(named, shown):
    assert cuda._names(named) == shown


@pytest.mark.parametrize("kilobytes, widths", [(227, (128, 128)), (163, (128, 128)), (99, (64, 96))])
def test_wide_heads_need_much_shared_memory(monkeypatch, kilobytes, widths):
    """Each device is asked by itself, through the extension: torch 2.6 has no shared_memory_per_block_optin."""
    if _extension.module is None:
        pytest.skip(f"the kernels' sizes are the extension's: {_extension.reason}")
    limits = {0: 0, 1: kilobytes * 1024}
    kernels = _extension.module.cuda_kernels
    module = SimpleNamespace(cuda_kernels=kernels, cuda_shared_memory=limits.get, cuda_architectures=ARCHITECTURES)
    monkeypatch.setattr(_extension, "module", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(major=9, minor=0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cuda._max_head_dim.cache_clear()
    try:
        for device, wanted in ((0, (0, 0)), (1, widths)):
            monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
            assert tuple(cuda.max_head_dim(dtype) for dtype in (torch.bfloat16, torch.float32)) == wanted
    finally:
        cuda._max_head_dim.cache_clear()


@pytest.mark.skipif(_extension.module is None, reason=str(_extension.reason))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_info_prints_which_kernels_run(direction):
    facts = info.collect()
    table = facts["compiled"][f"cuda_{direction}"]
    assert [line.split(":")[0] for line in table] == ["sm_90a", "sm_80"] and "head_dim 64 and 128" in table[0]
    built = facts["compiled"] | {"cuda_version": "13.0", "cuda_architectures": ARCHITECTURES}
    text = info.render(facts | {"compiled": built})
    assert all(line in text for line in table)
    assert table[0] not in info.render(facts | {"compiled": built | {"cuda_version": None}})
