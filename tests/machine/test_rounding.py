"""The rule for random problems: what rounding does is allowed, what is wrong is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases import COMPILED, make
from tests.machine import rounding

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.skipif("cpu" not in COMPILED, reason="the CPU kernels are not compiled")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_what_rounding_does_is_allowed(dtype, seed):
    problem = make(2, 2, 60, mem=20, width=32, mask="ranks", positions=True, dtype=dtype, seed=seed)
    rounding.assert_right(problem, "cpu", with_lse=True)


@pytest.mark.skipif("cpu" not in COMPILED, reason="the CPU kernels are not compiled")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_that_cancel(dtype):
    """Rows that see one key: P is 1, dS is exactly 0, and its sums are nothing but rounding."""
    problem = make(2, 2, 40, width=64, dtype=dtype).with_options(mask=torch.eye(40).bool())
    exact, allowed = rounding.allowances(problem, with_lse=False, tf32=False)
    for name in ("query", "key", "segment_bias", "content_bias"):
        assert exact[f"grad {name}"].abs().max() < 1e-14 < 1e-8 < allowed[f"grad {name}"].max()
    rounding.assert_right(problem, "cpu", with_lse=False)


def test_the_reference_rounds_too():
    """All are of one segment: grad segment_embed[0] is what float64 leaves of rows of dS, which sum to 0."""
    problem = make(2, 1, 16, mem=80, width=24, dtype=torch.bfloat16)
    problem.query_ids, problem.key_ids = (torch.zeros_like(ids) for ids in (problem.query_ids, problem.key_ids))
    exact, allowed = rounding.allowances(problem, with_lse=False, tf32=False)
    assert 0 < exact["grad segment_embed"].abs().max() < 1e-14
    assert (exact["grad segment_embed"].abs() <= allowed["grad segment_embed"]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tf32", [False, True])
def test_what_is_wrong_is_not(dtype, tf32):
    """One pair of 3,200 too many is seen, in the results of its row and its key and in nothing else."""
    tf32 = tf32 and dtype == torch.float32
    problem = make(1, 2, 40, width=32, segments=False, biases=False, dtype=dtype)
    visible = torch.ones(1, 2, 40, 40, dtype=torch.bool).tril()
    more = visible.clone()
    more[0, 0, 20, 21] = True
    exact, allowed = rounding.allowances(problem.with_options(mask=visible), with_lse=True, tf32=tf32)
    wrong = problem.with_options(mask=more).to(torch.float64).results("reference", grad_dtype=dtype)
    off = {name: (wrong[name] - value).abs() > allowed[name] for name, value in exact.items()}
    for name in ("out", "lse", "grad query"):
        assert off[name][0, 0, 20].any() and off[name].sum() == off[name][0, 0, 20].sum(), name
    for name in ("grad key", "grad value"):
        assert off[name][0, 0, 21].any() and not off[name][0, 1].any(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_gradient_is_held_to_a_bound(dtype):
    """None passes that is too large by this share of itself."""
    problem = make(2, 2, 60, mem=20, width=32, mask="causal", dtype=dtype)
    exact, allowed = rounding.allowances(problem, with_lse=True, tf32=False)
    share = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype]
    for name, value in exact.items():
        finite = value.isfinite()
        assert (share * value.abs() > allowed[name])[finite].any(), name


def test_probabilities_below_the_smallest_normal_number():
    """Small float16 numbers have a step of 2^-24: half of it, times gradients of size 1, is missed."""
    problem = make(1, 1, 2, width=8, segments=False, biases=False, dtype=torch.float16)
    mask = torch.tensor([[True, True], [False, True]])
    leaves = {name: torch.zeros_like(leaf) for name, leaf in problem.leaves.items()}
    leaves["query"][..., 0, 0], leaves["key"][..., 0, 0] = 8.0, -5.0  # of key 0 the first row has P = 7e-7
    problem = replace(problem, leaves=leaves).with_options(mask=mask)
    exact, allowed = rounding.allowances(problem, with_lse=False, tf32=False)
    found, allowed = exact["grad value"][0, 0, 0].abs().max(), allowed["grad value"][0, 0, 0].max()
    assert found < 3e-6 and allowed > 7 * 2**-24 / 12**0.5 * found / 7.2e-7 > 0


def test_a_position_bias_has_a_sum_of_its_own_where_keys_are_cut():
    """The gradient of a rel_key near zero is near zero; a difference of sums would have the cut keys' part."""
    problem = make(1, 1, 30, width=8, segments=False)
    problem = replace(problem, leaves=problem.leaves | {"rel_key": 1e-6 * problem.leaves["rel_key"]})
    keys = problem.leaves["key"].contiguous().view(torch.int32) & ~0x1FFF  # TF32's eleven bits
    cut = replace(problem, leaves=problem.leaves | {"key": keys.view(torch.float32)})
    _, allowed = rounding.allowances(problem, with_lse=False, tf32=True)
    exact, off = (case.to(torch.float64).results("reference")["grad content_bias"] for case in (problem, cut))
    assert ((exact - off).abs() > 100 * allowed["grad position_bias"]).all()
