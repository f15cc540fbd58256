"""Triton's forward: where the shift takes fragments apart, and when the maximum is raised."""

from __future__ import annotations

import math

import pytest
import torch

import xlnet_kernels as xk
from tests.cases import MODULES, READY, TWO_SCORES, assert_two_keys_have_their_weights

pytest.importorskip("triton")
if "triton" not in READY:
    pytest.skip(f"the Triton backend is {xk.backends()['triton']}", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from xlnet_kernels.backends.triton import launch, shift_ptx, tuning  # noqa: E402

DEVICE = MODULES["triton"].DEVICE
interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="asks for float32; this compiles")


@triton.jit
def _split(x, out, BLOCK_M: tl.constexpr):
    index = tl.arange(0, BLOCK_M)[:, None] * 64 + tl.arange(0, 64)[None, :]
    parts = shift_ptx.split_fragment(tl.reshape(tl.load(x + index), (BLOCK_M, 8, 8)))
    place = tl.arange(0, BLOCK_M // 2)[:, None] * 4 + tl.arange(0, 4)[None, :]
    for i in tl.static_range(32):
        tl.store(out + i * BLOCK_M * 2 + place, parts[i])
    tl.store(out + BLOCK_M * 64 + index, tl.reshape(shift_ptx.join_fragment(parts, 8), (BLOCK_M, 64)))


def test_registers_of_fragments_are_where_ptx_looks_for_them():
    """Lane t of four has columns 2 t and 2 t + 1 of each eight, of two rows of every 16."""
    x = torch.arange(32.0 * 64, device=DEVICE).view(32, 64)
    out = torch.empty(2, 32, 64, device=DEVICE)
    _split[(1,)](x, out, 32)
    found = out[0].view(32, 2, 8, 4)  # register, rows of 16, row of its half, lane
    halves = x.view(2, 2, 8, 8, 4, 2)  # rows of 16, half, row, group, lane, column
    for column in (0, 1):
        for half in (0, 1):
            for group in range(8):
                register = shift_ptx._register(column, half, group)
                assert torch.equal(found[register], halves[:, half, :, group, :, column]), (column, half, group)
    assert torch.equal(out[1], x)


@pytest.mark.parametrize("scores", TWO_SCORES, ids=str)
def test_weights_whatever_tile_has_the_larger_score(scores):
    assert_two_keys_have_their_weights(scores, "triton", torch.float32)


@interpreted
@pytest.mark.parametrize(("larger", "row_max"), [(10, 3), (13, 3), (14, 17), (200, 203)])
def test_the_maximum_is_raised_where_exponentials_sum_up_to_too_much(larger, row_max):
    """The score of the first tile's keys is 3, of one key in the second more by `larger`; in units of log 2."""
    rows = 100
    query, key = torch.zeros(2, 1, 1, rows, 16, device=DEVICE)
    query[..., 0], key[..., 0] = 1, 3
    key[..., rows - 1, 0] += larger
    inputs = (query, key, key, torch.zeros(1, 2 * rows, 16, device=DEVICE), *[None] * 16, rows, 0.0, math.log(2), False)
    _, lse, found, row_sum, _ = launch.forward(*inputs, True)
    assert torch.equal(found, torch.full_like(found, row_max))
    exact = math.log(2.0**3 * (rows - 1) + 2.0 ** (3 + larger))
    torch.testing.assert_close(lse, torch.full_like(lse, exact))
    torch.testing.assert_close(found + row_sum.log2(), torch.full_like(lse, exact / math.log(2)))


def test_windows_are_shifted_in_ptx_where_fragments_are_known():
    config = tuning.Config(64, 64, 64, True, num_warps=4, num_stages=1)
    assert tuning.shifts_in_ptx(config, "16-bit", (9, 0)) and tuning.shifts_in_ptx(config, "float32", (9, 0))
    assert not tuning.shifts_in_ptx(config, "ieee", (9, 0))
    for capability in ((8, 0), (10, 0), (12, 0), None):
        assert not tuning.shifts_in_ptx(config, "16-bit", capability), capability
    assert not tuning.shifts_in_ptx(config._replace(BLOCK_N=32), "16-bit", (9, 0))  # blocks of 64 columns alone
    assert not tuning.shifts_in_ptx(config._replace(num_warps=8), "16-bit", (9, 0))


def test_maxima_are_raised_late_where_it_pays():
    config = tuning.Config(64, 64, 64, True, num_warps=4, num_stages=1)
    assert tuning.raises_late(config, (9, 0)) and tuning.raises_late(config, None)  # interpreted
    assert not tuning.raises_late(config, (8, 0)) and not tuning.raises_late(config, (10, 0))
    assert not tuning.raises_late(config._replace(KEEP=False), (9, 0))  # scores that go through branches would spill
