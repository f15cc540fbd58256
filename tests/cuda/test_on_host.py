"""The CUDA kernels, run on the host: any schedule of their threads, memory that traps, what they refuse.

operator/test_operator.py asks of them what it asks of every backend.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lib.simt import on_host
from tests.cases import (
    ANY_RANKS,
    NO_ORDERS,
    READY,
    TWO_SCORES,
    assert_close,
    assert_ranks_of_any_size_are_right,
    assert_right,
    assert_two_keys_have_their_weights,
    make,
    run_without_order,
)
from tests.cuda.simt_memory import torch_guarded

if on_host.NAME not in READY:
    pytest.skip(on_host.unavailable(), allow_module_level=True)

SEEDS = range(9)  # every way of ordering threads that benchmarks/lib/simt/schedule.h has
PROBLEMS = {
    "order": dict(length=75, mask="order"),
    "memory-in-the-middle-of-a-tile": dict(length=70, mem=37, mask="ranks"),
    "uni": dict(length=70, rel_rows="uni", rel_batch=True),
    "rows-in-any-order": dict(length=75, keys=75, mem=5, positions=True, mask="ranks"),
    "rows-far-apart": dict(length=20, keys=200, mem=20, positions=True, mask="order"),
    "window": dict(length=140, mem=20, mask="window", extra_distance=-1),  # tiles are skipped, and come again
}


@pytest.fixture
def under_seed(monkeypatch):
    """Sets the schedule that the calls which follow run under."""

    def use(seed: int) -> None:
        monkeypatch.setattr(on_host, "_seeds", iter(lambda: seed, None))

    return use


@pytest.mark.parametrize("problem", PROBLEMS)
def test_results_do_not_depend_on_the_schedule(under_seed, problem):
    given = make(1, 1, width=16, dtype=torch.bfloat16, **PROBLEMS[problem]).with_options(deterministic=True)
    wanted = None
    for seed in SEEDS:
        under_seed(seed)
        found = given.results(on_host.NAME)
        if wanted is None:
            wanted = found
            assert_close(found, given.to(torch.float64).results("reference"), given)
        for name, result in found.items():
            assert torch.equal(result, wanted[name]), f"{name} differs under seed {seed}"


@pytest.mark.parametrize("seed", [0, 4, 8])
@pytest.mark.parametrize("problem", ["order", "rows-in-any-order"])
def test_gradients_added_atomically_are_right_under_any_schedule(under_seed, problem, seed):
    under_seed(seed)
    assert_right(make(2, 2, width=16, **PROBLEMS[problem]).with_options(deterministic=False), on_host.NAME)


def test_several_blocks_share_a_gradient_of_rel_key_in_deterministic_mode():
    """One head, several tiles of keys, which add in a fixed order."""
    problem = make(3, 1, 70, mem=90, width=16).with_options(deterministic=True)
    first, second = (problem.results(on_host.NAME) for _ in range(2))
    assert_close(first, problem.to(torch.float64).results("reference"), problem)
    for name, result in first.items():
        assert torch.equal(result, second[name]), name


@pytest.mark.parametrize("needs", [None, ("content_bias",), ("position_bias",), ("segment_bias",)], ids=str)
def test_sums_over_more_keys_and_rows_than_one_block_has(needs):
    """Several blocks of two batches have parts of a head's sums, of which the last one makes the gradients."""
    assert_right(make(2, 2, 270, mem=20, width=16, window=(25, 32)), on_host.NAME, needs=needs)


@pytest.mark.parametrize("at_start", [False, True], ids=["beyond-the-end", "before-the-start"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("width", [24, 20])  # in 16 bits the latter is padded to the former
def test_stays_inside_its_tensors(width, problem, dtype, at_start):
    given = make(1, 2, width=width, dtype=dtype, **PROBLEMS[problem]).with_options(dropout_p=0.2)
    library = on_host.library()
    with torch_guarded(library, at_start):
        given = given.map(torch.clone)
        found = given.results(on_host.NAME)
    assert all(result.isfinite().all() for name, result in found.items() if name != "lse")


@pytest.mark.parametrize("at_start", [False, True], ids=["beyond-the-end", "before-the-start"])
@pytest.mark.parametrize("problem", ["rows-in-any-order", "rows-far-apart"])
@pytest.mark.parametrize("how", NO_ORDERS)
def test_stays_inside_its_tensors_whatever_the_order(how, problem, at_start):
    """On a GPU positions and rows are not checked."""
    given = make(1, 2, width=16, dtype=torch.float16, **PROBLEMS[problem]).with_options(dropout_p=0.2)
    with torch_guarded(on_host.library(), at_start):
        run_without_order(given.map(torch.clone), how, on_host.NAME)


def test_strided_and_misaligned_tensors_are_copied():
    problem = make(2, 2, 20, mem=3, width=13)
    odd = problem.map(lambda leaf: torch.stack([leaf, leaf], -1)[..., 0])
    wanted = problem.to(torch.float64).results("reference")
    assert_close(odd.results(on_host.NAME), wanted, problem)


def test_rows_further_apart_than_32_bits_can_say_are_copied():
    problem = make(1, 1, 2, width=16, dtype=torch.float16)
    key = problem.leaves["key"]
    far = torch.empty(2**31 + 16, dtype=key.dtype).as_strided(key.shape, (0, 0, 2**31, 1))  # two pages of it are used
    far = far.copy_(key.detach()).requires_grad_()
    wanted = problem.to(torch.float64).results("reference")
    found = replace(problem, leaves=problem.leaves | {"key": far}).results(on_host.NAME)
    assert_close(found, wanted, problem)


def test_head_widths_beyond_the_compiled_ones_are_refused_by_the_kernels_too():
    problem = make(1, 1, 5, width=136)
    query, key, value, rel_key = (problem.leaves[name] for name in ("query", "key", "value", "rel_key"))
    arguments = [query, key, value, rel_key, *[None] * 16, 10, 0.0, 1.0, True, 0, False]
    on_host.library()
    with pytest.raises(RuntimeError, match="head_dim up to 128, got 136"):
        torch.ops.xlnet_kernels.rel_attention_simt(*arguments)


@pytest.mark.parametrize("query, bias", [((1, 1, 5, 16), ()), ((1, 1, 5, 16), (16,)), ((0,), (1, 16))])
def test_tensors_of_too_few_dimensions_are_refused(query, bias):
    """Before their sizes are read."""
    on_host.library()
    query, key, rel_key, bias = (torch.randn(shape) for shape in (query, (1, 1, 5, 16), (1, 10, 16), bias))
    arguments = [query, key, key, rel_key, bias, *[None] * 15, 5, 0.0, 1.0, True, 0, False]
    with pytest.raises(ValueError, match="has no dimension|must be a cpu Float tensor"):
        torch.ops.xlnet_kernels.rel_attention_simt(*arguments)


def test_float32_sums_over_many_keys_are_not_truncated():
    """Every key counts the same, so that the output is a mean of values of one sign."""
    problem = make(1, 1, 16, keys=736, width=16, biases=False, segments=False)
    with torch.no_grad():
        problem.leaves["query"].zero_()
        problem.leaves["value"].uniform_(1, 2)
    out, _ = problem.run(on_host.NAME, "cpu")
    mean = problem.leaves["value"].double().mean(2, keepdim=True)
    assert ((out / mean - 1).abs() < 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", TWO_SCORES, ids=str)
def test_weights_whatever_tile_has_the_larger_score(scores, dtype):
    assert_two_keys_have_their_weights(scores, on_host.NAME, dtype)


@pytest.mark.parametrize("ranks", ANY_RANKS, ids=str)
def test_ranks_of_any_size(ranks):
    assert_ranks_of_any_size_are_right(*ranks, on_host.NAME, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tf32_is_asked_of_the_interface_that_the_user_has_set(monkeypatch, dtype):
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has the older interface alone")
    problem = make(1, 1, 40, width=16, dtype=dtype)
    wanted, _ = problem.run(on_host.NAME, "cpu")
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        found, _ = problem.run(on_host.NAME, "cpu")
    finally:
        matmul.fp32_precision = before
    assert torch.equal(found, wanted) == (dtype != torch.float32)


@pytest.mark.parametrize(("tf32", "tolerance"), [(False, 1e-5), (True, 1e-2)])
@pytest.mark.parametrize("rel_batch", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_small_gradient_of_position_bias_beside_a_large_one_of_content_bias(
    tf32, tolerance, rel_batch, deterministic
):
    """It is off by a share of its own terms, not of what keys give."""
    problem = make(2, 2, 150, width=16, rel_batch=rel_batch).with_options(deterministic=deterministic)
    problem.leaves["key"] += 5
    problem.leaves["rel_key"] *= 1e-3
    wanted = problem.to(torch.float64).results("reference")["grad position_bias"]
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, tf32
    try:
        found = problem.results(on_host.NAME)["grad position_bias"]
    finally:
        matmul.allow_tf32 = before
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_a_launch_that_fails_says_which_kernel_and_for_what():
    problem = make(1, 1, 5, width=16)
    library = on_host.library()
    library.simt_fail_launches(b"no memory left")
    try:
        with pytest.raises(
            RuntimeError, match="CUDA kernel preprocess for B=1 H=1 L=5 K=5 M=0 D=16 float32.*no memory left"
        ):
            problem.results(on_host.NAME)
    finally:
        library.simt_fail_launches(None)


def test_a_backward_pass_under_autocast_has_the_same_gradients():
    problem = make(1, 2, 40, mem=7, width=32, mask="order").with_options(deterministic=True)
    problem = problem.map(lambda leaf: leaf.requires_grad_())
    out, _ = problem.run(on_host.NAME, "cpu")
    leaves, grad = list(problem.leaves.values()), torch.randn_like(out)
    wanted = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(out, leaves, grad)
    for name, one, other in zip(problem.leaves, found, wanted, strict=True):
        assert torch.equal(one, other), name
