"""Products of 16-bit operands (csrc/cpu/bfloat16): the best that this processor has.

test_instruction_sets.py runs this file again with each of the others.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

import xlnet_kernels as xk
from tests.cases import COMPILED, assert_right, make
from tests.operator.test_trusted_gradients import OFFSETS, Sums
from xlnet_kernels import _extension

if "cpu" not in COMPILED or _extension.module.cpu_bfloat16_products is None:
    pytest.skip("bfloat16 is converted to float32 here", allow_module_level=True)

BFLOAT16 = torch.bfloat16


# Panels are 16 columns wide, steps 32 deep; 256 is the widest head in use.
@pytest.mark.parametrize("width", [1, 16, 24, 40, 64, 80, 96, 128, 256])
def test_widths(width):
    assert_right(make(1, 2, 37, mem=9, width=width, mask="order", dtype=BFLOAT16), "cpu")


# Rows come in blocks of 64, keys in steps of 32 and tiles of 288 (backward) and 576 (forward).
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65, 97, 130])
@pytest.mark.parametrize("mask", [None, "dense", "ranks", "causal", "padding"])
def test_tails(length, mask):
    assert_right(make(2, 1, length, mem=length % 5, width=16, mask=mask, dtype=BFLOAT16), "cpu")


@pytest.mark.parametrize("mem", [0, 300])
@pytest.mark.parametrize("rel_rows, mask", [("bi", None), ("uni", "window")])
def test_several_tiles_and_chunks(mem, rel_rows, mask):
    assert_right(make(1, 1, 600, mem=mem, width=16, mask=mask, rel_rows=rel_rows, dtype=BFLOAT16), "cpu")


@pytest.mark.parametrize("biases, segments, rel_batch", [*product([False, True], repeat=3)])
def test_terms(biases, segments, rel_batch):
    problem = make(2, 2, 70, mem=3, mask="order", biases=biases, segments=segments, rel_batch=rel_batch, dtype=BFLOAT16)
    assert_right(problem, "cpu")


@pytest.mark.parametrize("keys", [60, 1000])
def test_positions_far_apart(keys):
    """Rows of one block reach further apart than a block may (512), and stand in any order."""
    assert_right(make(2, 1, 50, keys, mem=20, mask="ranks", positions=True, dtype=BFLOAT16), "cpu")


# (max_distance, rows of rel_key): windows begin and end inside of tiles, key steps and groups, or beyond all keys.
@pytest.mark.parametrize("window", [(70, 141), (200, 201), (30, 31), (130, 20), (3, 4), (-100, 60), (9, 17)])
@pytest.mark.parametrize("mask, positions, width", [(None, False, 24), ("causal", False, 16), ("ranks", True, 16)])
def test_windows_of_distances(window, mask, positions, width):
    problem = make(1, 2, 400, mem=50, window=window, mask=mask, positions=positions, width=width, dtype=BFLOAT16)
    assert_right(problem, "cpu")


def test_dropout():
    problem = make(2, 2, 100, mem=5, mask="order", dtype=BFLOAT16).with_options(dropout_p=0.3)
    exact = problem.to(torch.float64).results("reference")
    found = problem.results("cpu")
    for name, value in exact.items():
        # 3 roundings of 2**-9 (operands and results) of the largest of up to 105 terms
        assert (found[name] - value).abs().max() <= 0.02 * value.abs().max(), name


def test_operands_may_be_strided_and_odd():
    problem = make(2, 3, 45, width=24, mask="order", dtype=BFLOAT16)
    strided = problem.map(lambda leaf: torch.stack([leaf, leaf + 1], -1)[..., 0])
    shifted = problem.map(lambda leaf: torch.cat([leaf.new_zeros(1), leaf.flatten()])[1:].view(leaf.shape))
    wanted = problem.results("cpu")
    for other in (strided, shifted):
        assert all(torch.equal(value, wanted[name]) for name, value in other.results("cpu").items())


@pytest.mark.parametrize("length", [256, 1024])
@pytest.mark.parametrize("kind", OFFSETS)
def test_sums_over_rows(kind, length):
    """P and dS are rounded for their products, queries, keys and biases are not. No error has one sign."""
    sums = Sums.make(kind, length, BFLOAT16, heads=1, head_dim=16)
    exact, operands = sums.gradients("reference", torch.float64), sums.with_rounded_operands()
    for name, gradient in sums.gradients("cpu", BFLOAT16).items():
        error, unit = gradient - exact[name], exact[name].norm()
        # with_rounded_operands rounds more. Segments' gradients are one number a row, whose errors scatter.
        allowed = 2.5 if name.startswith("segment") else 1.5
        assert error.norm() <= allowed * (operands[name] - exact[name]).norm(), name
        # The mean of n independent errors is within four of its standard deviations.
        assert abs(error.mean()) <= 4 * error.std() / error.numel() ** 0.5 + 1e-6 * unit, name


def test_calls_beside_torch_products_in_several_threads():
    """oneDNN configures tile registers too: neither finds the other's configuration."""
    problem, x = make(1, 2, 90, mask="order", dtype=BFLOAT16), torch.randn(64, 64).bfloat16()
    wanted, square = problem.results("cpu"), x @ x

    def run(_) -> bool:
        before = torch.equal(x @ x, square)
        found = problem.results("cpu")
        same = all(torch.equal(found[name], value) for name, value in wanted.items())
        return before and same and torch.equal(x @ x, square)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(40)))


def test_nan_and_infinity_are_not_rounded_away():
    problem = make(1, 1, 20, width=16, dtype=BFLOAT16)
    problem.leaves["value"][0, 0, 3, 2] = torch.inf
    problem.leaves["value"][0, 0, 4, 5] = torch.nan
    out = problem.results("cpu", needs=())["out"]
    assert (out[..., 2] == torch.inf).all() and out[..., 5].isnan().all() and out[..., :2].isfinite().all()


def test_what_earlier_calls_left_behind_is_not_read():
    """Windows let tiles begin where a vector of dropout's factors ends between pairs of vectors."""
    nan = [torch.full((1, 2, 700, 64), torch.nan, requires_grad=True) for _ in range(3)]
    for max_distance, rows in product(range(0, 80, 9), range(1, 90, 11)):
        xk.rel_attention(*nan, torch.full((2, 1400, 64), torch.nan), backend="cpu").sum().backward()
        query, key, value = (torch.randn(1, 1, 188, 16, dtype=BFLOAT16, requires_grad=True) for _ in range(3))
        rel_key = torch.randn(1, rows, 16, dtype=BFLOAT16, requires_grad=True)
        inputs = query, key, value, rel_key
        out = xk.rel_attention(*inputs, max_distance=max_distance, dropout_p=0.1, backend="cpu")
        assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.sum(), inputs)))
