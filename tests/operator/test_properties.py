"""Random shapes, strides and masks: every backend computes what the reference does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import COMPILED, MASKS, assert_close, assert_right, make

# Empty problems have tests of their own and would take half of the examples.
SIZES = dict(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    length=st.one_of(st.integers(1, 9), st.integers(10, 150)),
    extra_keys=st.one_of(st.just(0), st.integers(0, 140)),
    mem=st.one_of(st.just(0), st.integers(1, 80)),
    width=st.sampled_from([1, 2, 3, 8, 16, 24, 33, 64]),
)
CHOICES = dict(
    mask=st.sampled_from(MASKS),
    rel_rows=st.sampled_from(["bi", "uni"]),
    rel_batch=st.booleans(),
    biases=st.booleans(),
    segments=st.booleans(),
    positions=st.booleans(),
    extra_distance=st.sampled_from([None, -1, 0, 5]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)


@pytest.mark.parametrize("backend", COMPILED)
@settings(max_examples=100)
@given(sizes=st.fixed_dictionaries(SIZES), choices=st.fixed_dictionaries(CHOICES))
def test_any_shape_and_mask(backend, sizes, choices):
    keys = sizes["length"] + sizes["extra_keys"]
    sizes = {name: size for name, size in sizes.items() if name != "extra_keys"}
    assert_right(make(**sizes, keys=keys, **choices), backend)


@st.composite
def layouts(draw):
    """A way to lay out a tensor in memory: order of the dimensions, gaps, an offset."""
    return draw(st.randoms(use_true_random=False)), draw(st.integers(1, 3)), draw(st.integers(0, 3))


def lay_out(x: torch.Tensor, layout) -> torch.Tensor:
    """Equal to x, stored as `layout` says, NaN in the gaps."""
    random, gap, offset = layout
    order = random.sample(range(x.dim()), x.dim())
    store = torch.full([x.shape[dim] * gap + offset for dim in order], torch.nan, dtype=x.dtype)
    view = store[tuple(slice(offset, offset + x.shape[dim] * gap, gap) for dim in order)]
    return view.permute([order.index(dim) for dim in range(x.dim())]).copy_(x)


@pytest.mark.parametrize("backend", COMPILED)
@given(
    layout=layouts(),
    length=st.integers(1, 70),
    mem=st.integers(0, 40),
    width=st.sampled_from([3, 16, 24]),
    mask=st.sampled_from(MASKS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_strides(backend, layout, length, mem, width, mask, dtype):
    problem = make(2, 2, length, mem=mem, width=width, mask=mask, dtype=dtype)
    exact = problem.to(torch.float64).results("reference")
    strided = problem.map(lambda leaf: lay_out(leaf, layout))
    assert_close(strided.results(backend), exact, problem)


@given(
    length=st.integers(1, 12),
    mem=st.integers(0, 5),
    mask=st.sampled_from(MASKS),
    shift=st.floats(-50, 50),
    seed=st.integers(0, 99),
)
def test_softmax_ignores_a_constant_per_row(length, mem, mask, shift, seed):
    # the same vector added to every key adds a constant to each row's content scores: only the lse may change
    problem = make(1, 2, length, mem=mem, mask=mask, seed=seed, dtype=torch.float64)
    moved = {n: leaf + shift if n in ("key", "memory_key") else leaf for n, leaf in problem.leaves.items()}
    found = replace(problem, leaves=moved).call("reference")[0]
    assert torch.allclose(found, problem.call("reference")[0], atol=1e-8)
