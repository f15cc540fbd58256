"""The operator as torch.onnx.export gets it: results, cost, refusals. integrations/test_onnx.py makes the files."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import xlnet_kernels as xk
from tests.cases import MASKS, make
from xlnet_kernels import call_checks
from xlnet_kernels.backends import exported

WINDOWS = {"both-sides": (5, 9), "before": (6, 7), "after": (0, 4), "own-key": (0, 1), "unequal": (14, 16)}


@pytest.fixture(autouse=True)
def exporting(monkeypatch):
    """Small blocks, to have several of a short sequence."""
    for module in (import_module("xlnet_kernels.backends"), call_checks):
        monkeypatch.setattr(module, "exports_to_onnx", lambda: True)
    monkeypatch.setattr(exported, "LEAST_ROWS", 4)


def assert_equals_reference(problem) -> None:
    for found, wanted in zip(problem.run(None, "cpu"), problem.run("reference", "cpu"), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)  # float64


@pytest.mark.parametrize("length", [1, 2, 13])
@pytest.mark.parametrize("mem", [0, 3])
@pytest.mark.parametrize("rows", ["bi", "uni", "conformer", "far"])
@pytest.mark.parametrize("mask", MASKS)
def test_every_pair(length, mem, rows, mask):
    extra = {"conformer": -1, "far": 4}.get(rows)
    table = "uni" if rows == "uni" else "bi"
    problem = make(
        length=length, mem=mem, mask=mask, rel_rows=table, extra_distance=extra, width=4, dtype=torch.float64
    )
    assert_equals_reference(problem)


@pytest.mark.parametrize("length", [24, 29, 45])
@pytest.mark.parametrize("mem", [0, 3])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "dense"])
def test_windows_in_blocks(length, mem, window, mask, monkeypatch):
    monkeypatch.delattr(exported, "_EveryPair")
    shape = dict(length=length, mem=mem, window=WINDOWS[window], rel_batch=length == 24, width=4)
    assert_equals_reference(make(**shape, mask=mask, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(1, 1, 1, 48), (2, 2, 1, 48), (2, 1, 1, 1), (48,)], ids=str)
def test_a_window_and_one_dense_row_for_all_queries(shape, monkeypatch):
    monkeypatch.delattr(exported, "_EveryPair")
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    problem = make(length=45, mem=3, window=(5, 9), width=4, dtype=torch.float64).with_options(mask=mask)
    assert_equals_reference(problem)


@pytest.mark.parametrize("case", ["positions", "fewer-queries", "far-window"])
def test_other_calls_are_the_references(case):
    shape = {"positions": dict(positions=True), "fewer-queries": dict(keys=50), "far-window": dict(window=(40, 9))}
    assert_equals_reference(make(length=45, mask="padding", width=4, dtype=torch.float64, **shape[case]))


@pytest.mark.parametrize("window", [None, (5, 9)], ids=["every-pair", "window"])
def test_padding_may_be_nan(window):
    problem = make(length=45, mask="padding", window=window, width=4)
    hidden = problem.options["mask"].key_rank == xk.masks.HIGHEST
    for name in ("key", "value"):
        problem.leaves[name].masked_fill_(hidden[:, None, :, None], torch.nan)
    out, lse = problem.run(None, "cpu")
    assert out.isfinite().all() and not lse.isnan().any()


class Largest(TorchDispatchMode):
    """The most numbers that any operator's result has."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.count = max(self.count, found.untyped_storage().size() // found.itemsize)
        return found


def test_a_window_is_linear_in_length():
    largest = {}
    for length in (200, 2000):
        problem = make(1, 2, length, window=(5, 9), mask="padding", width=4, segments=False)
        with Largest() as seen:
            problem.run(None, "cpu")
        largest[length] = seen.count
    blocks = -(-2000 // 5) + 1, -(-200 // 5) + 1  # of 5 queries with 13 keys of 4 numbers each, and an empty one
    assert largest[2000] * blocks[1] == largest[200] * blocks[0]


def test_a_dense_mask_is_refused_with_a_window():
    problem = make(length=45, mask="dense", window=(5, 9), width=4)
    with pytest.raises(ValueError, match=r"mask must be a RankMask or have one row .* got shape \(2, 2, 45, 45\)"):
        problem.run(None, "cpu")
