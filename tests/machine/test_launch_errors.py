"""Errors of launches of the CUDA kernels, on the machine: whose they are."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from lib.machine import cuda_driver  # noqa: E402
from lib.machine.package import serving  # noqa: E402
from tests.cases import make  # noqa: E402

pytestmark = pytest.mark.skipif(cuda_driver.unavailable() is not None, reason=str(cuda_driver.unavailable()))


def test_an_error_that_other_code_left_behind_is_not_ours():
    problem = make(1, 1, 5, width=64, dtype=torch.bfloat16)
    with serving(80):
        wanted = problem.run("cuda", "cpu")
        cuda_driver.library().cudaFuncSetAttribute(None, 8, 0)  # of a function that there is not
        with pytest.raises(RuntimeError, match="an earlier CUDA call or kernel had failed: invalid device function"):
            problem.run("cuda", "cpu")
        assert all(map(torch.equal, problem.run("cuda", "cpu"), wanted))
