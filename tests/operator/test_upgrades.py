"""Gains of newer versions, as `python -m xlnet_kernels.info` tells them, of stand-in machines."""

from __future__ import annotations

import pytest

from xlnet_kernels import info
from xlnet_kernels._upgrades import FIRST_TORCH, upgrades
from xlnet_kernels.backends.triton.features import FEATURES

COMPILED = {"cuda_version": "13.0"}
B200, H100, T4 = "NVIDIA B200 (sm_100)", "NVIDIA H100 (sm_90)", "Tesla T4 (sm_75)"


def found(torch="2.15.0", triton="3.9.0", devices=(H100,), compiled=COMPILED, cuda="ready", **others):
    facts = {"torch": torch, "torch_cuda": "13.0", "triton": triton, "cuda_devices": [*devices], "compiled": compiled}
    return upgrades(facts | {"nvidia_driver": bool(devices), "backends": {"cuda": cuda}} | others)


def test_newest_versions_gain_nothing():
    assert [line.partition(":")[0] for line in found().values()] == ["nothing"] * 3
    assert all(line.startswith("nothing: ") for line in found(devices=()).values())


@pytest.mark.parametrize("triton", ["3.5.1", "not installed"])
def test_triton_before_the_kernels(triton):
    lines = found(torch="2.9.1", triton=triton)
    assert lines["torch"] == "2.10 or later: Triton 3.6 or later, and with it the Triton kernels"
    assert lines["Triton"] == "3.6 or later, as torch 2.10 has: the Triton kernels"


def test_triton_before_the_kernels_of_newer_gpus():
    lines = found(torch="2.12.0", triton="3.7.0", devices=(H100, "NVIDIA GB10 (sm_121)"))
    assert lines["torch"] == "2.13 or later: Triton 3.7.1 or later, and with it the Triton kernels"
    assert lines["Triton"] == "3.7.1 or later, as torch 2.13 has: the Triton kernels"
    assert "the Triton kernels" not in found(triton="3.7.1", devices=(B200,))["Triton"]


@pytest.mark.parametrize(
    ("triton", "device", "names"),
    [
        ("3.6.0", H100, "TF32 with dropout, rotation in quads"),
        ("3.8.1", H100, "rotation in quads"),
        ("3.7.1", B200, "TF32 with dropout, heads over 64 on sm_100"),
    ],
)
def test_features_of_a_newer_triton(triton, device, names):
    line = found(triton=triton, devices=(device,))["Triton"]
    assert line.endswith(f" has: {names} (docs/triton.md)")
    assert line.startswith("3.9 or later, as torch 2.15" if "quads" in names else "3.8 or later, as torch 2.14")


def test_no_line_promises_what_the_newest_triton_has_not():
    assert {feature.since for feature in FEATURES.values()} <= {*FIRST_TORCH}


def test_gpus_that_have_no_kernels():
    lines = found(torch="2.9.1", triton="3.5.1", devices=(T4,))
    assert lines["Triton"] == "nothing: no NVIDIA GPU here has compute capability 8.0 or newer"
    assert lines["torch"] == "2.10 or later: the compiled kernels"
    assert lines["kernels"] == "nothing: compiled kernels need torch 2.10 or later"
    rocm = found(triton="3.5.1", devices=("AMD Instinct MI300X (sm_94)",), torch_cuda=None, nvidia_driver=False)
    assert all(line.startswith("nothing: ") for line in rocm.values())


def test_a_torch_that_cannot_use_the_gpu():
    lines = found(devices=(), nvidia_driver=True, torch_cuda=None)
    assert lines["torch"] == "a build for CUDA: the Triton kernels, on the NVIDIA GPU that this torch cannot use"
    assert lines["Triton"] == "nothing: a torch built for CUDA comes first"


def test_kernels_of_another_installation():
    pure = "a wheel, or another installation with a C++ compiler: the compiled CPU kernels"
    assert found(compiled=None, devices=())["kernels"] == pure
    assert found(compiled=None)["kernels"] == f"{pure}; with CUDA's nvcc also those for the GPU"
    without_cuda = found(compiled={"cuda_version": None}, devices=(H100, "NVIDIA A100 (sm_80)", T4))["kernels"]
    assert without_cuda == "another installation with CUDA's nvcc: the CUDA kernels for sm_80, sm_90"
    other = found(cuda="compiled for sm_80, this GPU has sm_90")["kernels"]
    assert other == "another installation on this machine: the CUDA kernels for sm_90"


def test_info_prints_a_line_for_each():
    facts = info.collect()
    printed = info.render(facts).splitlines()
    for name, line in facts["upgrades"].items():
        assert f"  {name:<13} {line}" in printed
