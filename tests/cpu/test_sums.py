"""Long sums are made of short ones: csrc/cpu/gemm.h and few_rows.h take 96 or 48 keys at a time."""

from __future__ import annotations

import pytest
import torch

import xlnet_kernels as xk
from tests.cases import COMPILED

if "cpu" not in COMPILED:
    pytest.skip("the compiled extension is not there", allow_module_level=True)


@pytest.mark.parametrize("length", [1, 12, 64])
def test_a_mean_of_many_values_is_exact_to_a_few_units(length):
    """One running sum of 2304 numbers is off by 28 units of 2^-24 here, 24 sums of 96 by 4, 48 of 48 by 6."""
    keys, width = 2304, 64
    torch.manual_seed(0)
    value, memory = (torch.rand(1, 1, count, width) + 1 for count in (length, keys - length))
    zero = torch.zeros_like(value)
    out = xk.rel_attention(
        zero,
        zero,
        value,
        torch.zeros(1, keys + length, width),
        memory=(torch.zeros_like(memory), memory),
        backend="cpu",
    )
    mean = torch.cat([memory, value], 2).double().mean(2, keepdim=True)
    assert (out / mean - 1).abs().max() < 10 * 2.0**-24
