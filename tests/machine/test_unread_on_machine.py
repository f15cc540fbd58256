"""Unread keys, values and rows of rel_key on the machine, where the warpgroup kernels and split keys run."""

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
from tests.operator.test_unread import assert_unread_rows_count_as_zeros, dense, empty_columns  # noqa: E402

pytestmark = pytest.mark.skipif(cuda_driver.unavailable() is not None, reason=str(cuda_driver.unavailable()))


def hidden(rows: int, first: int) -> torch.Tensor:
    """Padding from `first` on, and one key before it."""
    which = torch.arange(rows) >= torch.tensor([[first], [first + 1]])
    which[1, first // 2] = True
    return which


BY_WARPGROUPS = {
    "padding": make(2, 1, 140, width=64).with_options(mask=xk.RankMask.padding(hidden(140, 100)), dropout_p=0.3),
    "wide": make(2, 1, 80, mem=9, width=128).with_options(mask=empty_columns(dense(80, 89, 1), 0, 4, 70, 88)),
    "window": make(2, 1, 70, keys=100, width=64, rel_batch=True, window=(3, 6)),
    "positions": make(2, 1, 120, width=64, keys=110, positions=True, window=(5, 9), mask="causal"),
}


@pytest.mark.parametrize("problem", BY_WARPGROUPS.values(), ids=BY_WARPGROUPS.keys())
def test_unread_rows_count_as_zeros_by_warpgroups(problem):
    with serving(90) as record:
        assert_unread_rows_count_as_zeros(problem.with_options(deterministic=False).to(torch.bfloat16), "cuda")
    names = " ".join(launch.name for launch in record.launches)
    assert "warpgroup_forward_kernel" in names and "warpgroup_backward_kernel" in names


def test_unread_keys_count_as_zeros_where_blocks_share_them():
    problem = make(2, 2, 2, mem=600, width=40, dtype=torch.bfloat16)
    mask = torch.ones(2, 1, 2, 602, dtype=torch.bool)
    problem = problem.with_options(mask=empty_columns(mask, 0, 31, 32, 300, 599))
    with serving(80, size=(108, 4)) as record:
        assert_unread_rows_count_as_zeros(problem, "cuda")
    assert any("merge_kernel" in launch.name for launch in record.launches)
