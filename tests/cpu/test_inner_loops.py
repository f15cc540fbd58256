"""Machine code of the CPU kernels, from disassembly: evidence about processors that are not here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.cpu.harness import ARM_CLANG, ARM_GCC, CLANG, GCC, Build
from tests.cpu.inner_loops import disassemble, matrix_products


def compiled(build: Build, source: str) -> Path:
    if build.missing():
        pytest.skip(build.missing())
    return build.compiled(ROOT / "csrc" / "cpu" / source)


@pytest.mark.parametrize("build", [ARM_GCC, ARM_CLANG], ids=["gcc", "clang"])
def test_neon_multiplies_and_does_little_else(build):
    """85 of 100 instructions multiply: loads and the loop itself then fit beside them."""
    loops = matrix_products(compiled(build, "kernels_neon.cpp"), build.objdump)
    loops += matrix_products(compiled(build, "bfloat16/arm.cpp"), build.objdump)
    assert all(loop.spills == 0 for loop in loops), [*map(str, loops)]
    panels = ["panel_product<float, true, 2>", "panel_product<float, false, 2>"]
    for name in (*panels, "row_product<float, 0>", "row_product<float, 1>", "multiply_by_bfmmla"):
        assert max(loop.share for loop in loops if name in loop.function) >= 0.85, name


@pytest.mark.parametrize("kernels", ["kernels_avx512.cpp", "kernels_avx2.cpp"])
def test_clang_multiplies_as_gcc_does(kernels):
    """As many instructions in each product's inner loop, or three of them more."""
    sizes = {}
    for build in (GCC, CLANG):
        for loop in matrix_products(compiled(build, kernels), build.objdump):
            if "_product<" in loop.function:
                sizes.setdefault((loop.function, loop.products), {})[build.compiler] = len(loop.instructions)
    assert len(sizes) >= 8
    for loop, found in sizes.items():
        assert found.keys() == {"g++", "clang++"} and found["clang++"] <= found["g++"] + 3, (loop, found)


@pytest.mark.parametrize("build, kernels, one_lane", [
    (CLANG, "kernels_avx512.cpp", r"v?insertps"),
    (CLANG, "kernels_avx2.cpp", r"v?insertps"),
    (ARM_CLANG, "kernels_neon.cpp", r"(?:mov|ins)\s+v\d+\.s\[\d\], v\d+\.s"),
    (ARM_GCC, "kernels_neon.cpp", r"(?:mov|ins)\s+v\d+\.s\[\d\], v\d+\.s"),
])  # fmt: skip
def test_transposition_shuffles_vectors(build, kernels, one_lane):
    """One transposition lane by lane would be a dozen of these."""
    text = disassemble(compiled(build, kernels), build.objdump)
    assert len(re.findall(rf"\s{one_lane}", text)) < 12
