"""Every gradient against finite differences in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases import MASKS, make

VARIANTS = {
    "xlnet": dict(mem=2),
    "uni": dict(mem=2, rel_rows="uni"),
    "rel-batch-positions": dict(mem=2, rel_batch=True, positions=True),
    "conformer": dict(extra_distance=-1),
}


def check(problem, backend, **options):
    def run(*leaves):
        torch.manual_seed(0)  # the same dropout in every evaluation
        given = replace(problem, leaves=dict(zip(problem.leaves, leaves, strict=True)))
        out, lse = given.call(backend, **options)
        return out, lse.nan_to_num(neginf=0.0)  # a difference of infinities is no number

    inputs = [leaf.requires_grad_() for leaf in problem.leaves.values()]
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-6, rtol=1e-5, nondet_tol=0.0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_argument(backend, variant):
    check(make(2, 2, 3, keys=4, width=2, dtype=torch.float64, **VARIANTS[variant]), backend)


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask])
def test_masks(backend, mask):
    check(make(2, 1, 3, width=2, mask=mask, dtype=torch.float64), backend)


def test_dropout(backend):
    check(make(1, 2, 4, mem=3, width=2, mask="order", dtype=torch.float64), backend, dropout_p=0.4)


def test_without_segments_and_biases(backend):
    check(make(1, 2, 4, width=2, biases=False, segments=False, dtype=torch.float64), backend)
