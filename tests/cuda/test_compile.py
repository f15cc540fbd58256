"""The CUDA kernels compiled by nvcc, without a GPU: what the compiler made of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.compiled import ptxas_report
from benchmarks.compiled.sass import functions
from benchmarks.compiled.wgmma_hazards import hazards
from lib.machine import cuda_driver
from tests import ROOT
from tests.wheels import wheel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: set PATH to where CUDA's compiler is"),
]
SAMPLE = Path(__file__).with_name("sample.cu")
CUDA = ROOT / "csrc" / "cuda"
# (kernel, dtype, head_dim) of the sample; thorough tests of packaging/test_install_cuda.py have all for sm_80
KERNELS = {
    (kernel, dtype, width)
    for kernel in ("forward", "backward")
    for dtype, width in (("BFloat16", 64), ("BFloat16", 128), ("float", 64))
}


# Bytes of wide heads where rows have positions, by direction: forward's 48; backward's 536 with dropout, 648 without.
POSITIONS_SPILL = {"forward": 60, "backward": 650, "ordered_backward": 1170}


def check_products(cubin: Path) -> None:
    """No register of a product under way is touched, in any of the kernels."""
    from triton.backends import nvidia

    cuobjdump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    text = subprocess.run([cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    kernels = {name: code for name, code in functions(text).items() if "warpgroup" in name}
    assert len(kernels) == 8, kernels.keys()  # widths, dropout, positions or not
    for name, code in kernels.items():
        assert any(instruction.name.startswith("HGMMA") for instruction in code), name
        assert hazards(code) == [], name


def ptx_of_warpgroups(direction: str, dtype: str) -> Path:
    prefix = "" if direction == "forward" else f"{direction}_"
    return cuda_driver.compiled(CUDA / "sm90" / f"warpgroup_{prefix}{dtype}.cu", 90)


@pytest.mark.parametrize(
    ("direction", "spills"),
    # Ordered backward has backward's consumers; machine/test_ordered_accumulation.py runs it.
    [("forward", 0), ("backward", 200), pytest.param("ordered_backward", 710, marks=pytest.mark.thorough)],
)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.thorough)])
def test_warpgroup_kernels_keep_to_their_registers(direction, spills, dtype, tmp_path):
    """Wide heads spill, in backward or with positions; no wgmma waits for the one before or for what ptxas adds."""
    command = ["nvcc", "-arch=sm_90a", "-Xptxas", "-v", "-cubin", "-o", tmp_path / "cubin"]
    done = subprocess.run([*command, ptx_of_warpgroups(direction, dtype)], capture_output=True, text=True)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "Potential Performance Loss" not in text
    assert "C7519" not in text and "warpgroup.arrive is injected" not in text
    name = rf"Compiling entry function '(\w*warpgroup_{direction.removeprefix('ordered_')}\w+)'"
    spilled = r"(\d+) bytes spill stores, (\d+) bytes spill loads"
    kernels = re.findall(rf"{name}.*?{spilled}.*?Used (\d+) registers", text, re.S)
    assert len(kernels) == 8, kernels  # widths, dropout, positions or not
    for kernel, stores, loads, _ in kernels:
        has_positions = re.search(r"Li\d+ELb[01]ELb1E", kernel)
        most = POSITIONS_SPILL[direction] if has_positions else spills
        if "Li64E" in kernel:  # the producer's alone, where consumers add in order
            most = 420 if direction == "ordered_backward" else 0
        assert int(stores) + int(loads) <= most, kernels
    check_products(tmp_path / "cubin")
    # START_REGISTERS of sm90/tile_sizes.h: with more a block does not fit, with fewer the consumers wait for ever.
    assert all(int(registers) == 65536 // 384 // 8 * 8 for *_, registers in kernels), kernels


@pytest.mark.parametrize("architecture", [pytest.param("sm_90", marks=pytest.mark.thorough), "sm_100"])
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


ASSEMBLERS = [
    ("nvidia-cuda-nvcc-cu12==12.4.131", "cuda_nvcc"),
    pytest.param("nvidia-cuda-nvcc-cu12==12.8.93", "cuda_nvcc", marks=pytest.mark.thorough),
    pytest.param("nvidia-cuda-nvcc-cu12==12.9.86", "cuda_nvcc", marks=pytest.mark.thorough),
    pytest.param("nvidia-cuda-nvcc==13.5.37", "cu13", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("requirement", "folder"), ASSEMBLERS)
@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.thorough)])
def test_other_assemblers_run_products_side_by_side(direction, requirement, folder, tmp_path):
    """No warning that products wait for one another."""
    ptx, cubin = tmp_path / "kernels.ptx", tmp_path / "kernels.cubin"
    # CUDA 12.4 reads versions up to 8.4, which has all instructions of these kernels
    text = ptx_of_warpgroups(direction, "bfloat16").read_text()
    ptx.write_text(re.sub(r"^\.version .*", ".version 8.4", text, flags=re.M))
    ptxas = wheel(requirement) / "nvidia" / folder / "bin" / "ptxas"
    done = subprocess.run([ptxas, "-v", "--gpu-name=sm_90a", ptx, "-o", cubin], capture_output=True, text=True)
    assert done.returncode == 0 and "ptxas info" in done.stderr, done.stderr
    assert not re.search(r"C75\d\d", done.stderr), done.stderr
    check_products(cubin)
