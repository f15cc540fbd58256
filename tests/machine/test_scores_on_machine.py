"""Scores of the GPU kernels on the machine: the same in both passes and all tiles, and of visible pairs alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets in this process", allow_module_level=True)

import xlnet_kernels as xk  # noqa: E402
from lib.machine import cuda_driver  # noqa: E402
from lib.machine.package import serving  # noqa: E402
from tests.cases import make  # noqa: E402

NEEDS_NVCC = pytest.mark.skipif(cuda_driver.unavailable() is not None, reason=str(cuda_driver.unavailable()))
BACKENDS = ["triton", pytest.param("cuda", marks=NEEDS_NVCC)]
# Prefixes of CUDA's kernels, to assert that sm_90a's own kernels run.
NAMED = {80: "", 90: "warpgroup_"}


def assert_names(record, backend: str, architecture: int, forward: int, backward: int | None = None) -> None:
    if backend == "cuda":
        assert f"{NAMED[architecture]}forward_kernel" in record.launches[forward].name
        if backward is not None:
            assert f"{NAMED[architecture]}backward_kernel" in record.launches[backward].name


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "segments", "scale", "deterministic"),
    [
        (torch.bfloat16, False, 1000.0, False),
        (torch.bfloat16, False, 1000.0, True),
        (torch.bfloat16, True, 2.0, False),
        (torch.float16, False, 2.0, False),
        (torch.float16, True, 2.0, False),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_visible_key_of_a_large_score_has_probability_one(
    backend, dtype, segments, scale, deterministic, architecture
):
    """Backward computes scores again: the same numbers, or P would not be 1."""
    if backend == "cuda" and dtype == torch.float16 and segments:
        pytest.skip("CUDA sums what segments add in another order, which float16 shows")
    torch.manual_seed(0)
    rows, width = 80, 64
    query, key, rel_key = (16 * torch.randn(1, 1, n, width, dtype=dtype) for n in (rows, rows, 2 * rows))
    content_bias, position_bias, segment_bias = (4 * torch.randn(1, width, dtype=dtype) for _ in range(3))
    ids = torch.arange(rows)[None].int()
    kinds = xk.Segments(ids, ids.flip(1), 4 * torch.randn(2, 1, width, dtype=dtype), segment_bias)
    value = torch.randn_like(query).requires_grad_()
    grad_out = torch.randn_like(query)
    with serving(architecture) as record:
        out = xk.rel_attention(
            query, key, value, rel_key, content_bias=content_bias, position_bias=position_bias, scale=scale,
            segments=kinds if segments else None, mask=torch.eye(rows).bool(), deterministic=deterministic,
            backend=backend,
        )  # fmt: skip
        (grad,) = torch.autograd.grad(out, value, grad_out)
    assert_names(record, backend, architecture, 1, 3)
    assert torch.equal(out, value) and torch.equal(grad, grad_out)


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_keys_have_equal_weights_however_large_their_score(backend, architecture):
    """In whatever tile of keys: what rounding takes of a score of 10 ** 9 is more than exponentials have room for."""
    torch.manual_seed(0)
    query, key = (torch.randn(1, 4, 1, 64).bfloat16().expand(1, 4, 128, 64).contiguous() for _ in range(2))
    value = (torch.arange(128) // 64).bfloat16()[None, None, :, None].expand_as(query).contiguous()
    rel_key = torch.zeros(1, 4, 256, 64).bfloat16()
    with serving(architecture) as record:
        out = xk.rel_attention(query, key, value, rel_key, scale=1e8, backend=backend)
    assert_names(record, backend, architecture, 1)
    assert (out == 0.5).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("keys", "deterministic"), [(70, False), (70, True), (90, False)])
def test_rows_of_rel_key_that_no_pair_reads_may_hold_anything(backend, keys, deterministic):
    """XLNet's row 0, and more with keys behind the last row: rows of the last tile beyond it would read them."""
    problem = make(1, 1, 70, keys=keys, width=64, segments=False, dtype=torch.bfloat16)
    problem = problem.with_options(deterministic=deterministic)
    wanted = problem.results("reference", with_lse=False)
    problem.leaves["rel_key"][:, : keys - 70 + 1] = torch.nan
    with serving(90) as record:
        found = problem.results(backend, with_lse=False)
    assert_names(record, backend, 90, 1, 3)
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() <= 0.05 * value.abs().max(), name  # a few roundings of 2 ** -8
