"""The CUDA kernels compiled by nvcc, without a GPU and without torch: what the compiler made of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.compiled import ptxas_report
from tests import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: set PATH to where CUDA's compiler is"),
]
SAMPLE = Path(__file__).with_name("sample.cu")
CUDA = ROOT / "csrc" / "cuda"
# (kernel, dtype, head_dim) of the sample; packaging/test_install_cuda.py has all of them for sm_80
KERNELS = {
    (kernel, dtype, width)
    for kernel in ("forward", "backward")
    for dtype, width in (("BFloat16", 64), ("BFloat16", 128), ("float", 64))
}


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_compiles_for_gpus_that_are_not_here(architecture, tmp_path):
    command = [
        "nvcc",
        "-std=c++17",
        "-O3",
        f"-arch={architecture}",
        f"-I{CUDA}",
        "-Xptxas",
        "-v",
        "-cubin",
        SAMPLE,
        "-o",
        tmp_path / "sample",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = ptxas_report.kernels(done.stdout + done.stderr)
    assert {(k.kernel, k.dtype, k.width) for k in found} == KERNELS
    ptxas_report.check(found)
