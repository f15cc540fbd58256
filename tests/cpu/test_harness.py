"""The CPU kernels by other compilers and on other processors (harness.py)."""

from __future__ import annotations

import pytest
import torch

from tests.cases import MASKS, assert_close, assert_right, make
from tests.cpu import harness
from tests.cpu.harness import ARM_CLANG, ARM_GCC, CLANG, Build, Harness

BUILDS = {
    "clang-avx512": (CLANG, "avx512"),
    "clang-avx2": (CLANG, "avx2"),
    "clang-generic": (CLANG, "generic"),
    "arm-gcc": (ARM_GCC, "neon_bf16"),
    "arm-gcc-generic": (ARM_GCC, "generic"),
    "arm-clang": (ARM_CLANG, "neon_bf16"),
}
BFLOAT16 = torch.bfloat16


def start(build: Build, kernels: str = "", processor: str | None = None) -> Harness:
    if build.missing():
        pytest.skip(build.missing())
    try:
        return Harness(build, kernels, processor)
    except RuntimeError as error:
        if build.emulator or "names no instruction set" not in str(error):
            raise
        pytest.skip(f"this processor has no {kernels}")


@pytest.fixture(params=BUILDS, scope="module")
def running(request):
    harness = start(*BUILDS[request.param])
    yield harness
    harness.close()


@pytest.fixture
def backend(running, monkeypatch) -> str:
    return harness.backend(monkeypatch, running)


# 4, 12 or 16 numbers are a register tile's width, 8 or 12 rows its height; 48 or 64 rows are a block, 96 keys a group.
@pytest.mark.parametrize("dtype", harness.DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 24, 64, 128])
def test_widths(backend, width, dtype):
    assert_right(make(1, 2, 61, mem=9, width=width, mask="order", dtype=dtype), backend)


@pytest.mark.parametrize("width", [1, 3, 12, 20])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
def test_odd_widths(backend, width, dtype):
    assert_right(make(1, 1, 50, width=width, biases=False, segments=False, dtype=dtype), backend)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
def test_masks(backend, mask, dtype):
    assert_right(make(2, 1, 45, keys=75, mem=37, mask=mask, positions=True, dtype=dtype), backend)


@pytest.mark.parametrize("rows, keys, mem", [(1, 1, 0), (3, 200, 5), (13, 13, 300), (131, 131, 67), (9, 700, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
def test_shapes(backend, rows, keys, mem, dtype):
    """Tiles of several lengths; 700 keys are more than 96, 192, 288 and 576, where products and tiles end."""
    problem = make(1, 1, rows, keys=keys, mem=mem, width=16, mask="causal", positions=keys > rows, dtype=dtype)
    assert_right(problem, backend)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
def test_chunks_with_some_of_the_keys(backend, dtype):
    """The first chunk writes the gradients of all keys, the others add to theirs. 512 rows or more are a chunk."""
    assert_right(make(1, 1, 1100, mem=20, width=16, window=(30, 31), dtype=dtype), backend)


@pytest.mark.parametrize("variant", [{"rel_rows": "uni"}, {"rel_batch": True}, {"window": (30, 31)}, {"biases": False}])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
def test_variants(backend, variant, dtype):
    assert_right(make(2, 2, 70, mem=5, mask="order", dtype=dtype, **variant), backend)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
def test_dropout(backend, dtype):
    problem = make(1, 2, 100, mem=5, mask="order", dtype=dtype).with_options(dropout_p=0.3)
    torch.manual_seed(1)
    exact = problem.to(torch.float64).results("reference")
    torch.manual_seed(1)
    found = problem.results(backend)
    for name, value in exact.items():
        # bfloat16: 3 roundings of 2**-9 (operands and results) of the largest of up to 105 terms
        allowed = 0.02 if dtype == BFLOAT16 else 1e-5
        assert (found[name] - value).abs().max() <= allowed * value.abs().max(), name


PROCESSORS = {
    ("max", ""): ("neon", "neon_bf16"),
    ("max", "neon"): ("neon", "-"),
    ("max", "generic"): ("generic", "-"),
    ("max", "emulated_bf16"): ("neon", "emulated_bf16"),
    ("cortex-a57", ""): ("neon", "-"),  # has no FEAT_BF16
}


@pytest.mark.parametrize("processor, asked_for", PROCESSORS)
def test_the_processor_decides(processor, asked_for):
    running = start(ARM_GCC, asked_for, processor)
    assert (running.kernels, running.products) == PROCESSORS[processor, asked_for]
    running.close()


@pytest.mark.parametrize("processor, asked_for", [("cortex-a57", "neon_bf16"), ("max", "avx2"), ("max", "amx_bf16")])
def test_what_the_processor_lacks_is_refused(processor, asked_for):
    if ARM_GCC.missing():
        pytest.skip(ARM_GCC.missing())
    with pytest.raises(RuntimeError, match="names no instruction set that this processor has"):
        Harness(ARM_GCC, asked_for, processor)


def test_bfmmla_computes_what_its_emulation_does(monkeypatch):
    """The emulation rounds sums otherwise: both are as far from the exact results as they may be."""
    problem = make(2, 1, 75, mem=20, width=40, mask="order", dtype=BFLOAT16)
    exact = problem.to(torch.float64).results("reference")
    results = []
    for kernels in ("neon_bf16", "emulated_bf16"):
        running = start(ARM_GCC, kernels)
        results.append(problem.results(harness.backend(monkeypatch, running)))
        running.close()
        assert_close(results[-1], exact, problem)
    native, emulated = results
    for name, value in exact.items():
        # Roundings of P and dS that fall on the other side are 2**-8 of one term; sums differ by much less than a term.
        assert (native[name] - emulated[name]).abs().max() <= 2**-7 * value[value.isfinite()].abs().max(), name
