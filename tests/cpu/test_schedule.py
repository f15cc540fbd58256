"""How the CPU kernels cut their work: many short sequences share what is loaded, long ones are taken range by range."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases import COMPILED, assert_right, make

if "cpu" not in COMPILED:
    pytest.skip("the compiled extension is not there", allow_module_level=True)


@pytest.mark.parametrize("length", [1, 8, 16, 33])
@pytest.mark.parametrize("variant", [{}, {"rel_batch": True}, {"positions": True}, {"mem": 5, "rel_rows": "uni"}])
def test_short_sequences_that_share_rel_key(length, variant):
    # 9 x 16 heads: 64 runs of 2 sequences, the last of 1
    assert_right(make(9, 16, length, keys=40 if "positions" in variant else None, mask="order", **variant), "cpu")


def test_expanded_rel_key_has_a_gradient_for_each_sequence():
    problem = make(9, 16, 8)
    rel_key = problem.leaves["rel_key"].expand(9, -1, -1, -1)
    # results() detaches the leaves, strides of 0 and all
    assert_right(replace(problem, leaves=problem.leaves | {"rel_key": rel_key}), "cpu")


RANGES = [{}, {"positions": True, "rel_rows": "uni"}, {"segments": False}, {"positions": True, "window": (2400, 2600)}]


@pytest.mark.parametrize("variant", RANGES)
@pytest.mark.parametrize("rows, keys", [(100, 5000), (700, 2600)])
def test_ranges_of_keys(rows, keys, variant):
    # 2304 keys are a range (1152 with AVX2); 512 rows are a chunk, whose blocks go through one range before the next
    assert_right(make(1, 1, rows, keys=keys, mem=30, width=16, mask="order", **variant), "cpu")


def test_ranges_of_keys_that_no_row_sees():
    problem = make(1, 2, 60, keys=5000, width=16, mask="window")
    assert_right(problem, "cpu")
    mask = problem.options["mask"]
    hidden = replace(mask, query_rank=torch.full_like(mask.query_rank, torch.iinfo(torch.int32).min), sees_self=False)
    found = problem.with_options(mask=hidden).results("cpu")
    assert all(value.count_nonzero() == 0 for name, value in found.items() if name != "lse")
