"""Ordered accumulation of the CUDA kernels: the same bits whichever block is ahead.

The machine runs three blocks at a time, in an order and in turns drawn from the seed, and with every second seed lets
additions to global memory come late, until a fence.
"""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

import xlnet_kernels as xk

pytest.importorskip("triton")
import triton  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from lib.machine import cuda_driver  # noqa: E402
from lib.machine.package import serving  # noqa: E402
from lib.machine.triton_driver import LAST_BLOCK_FIRST  # noqa: E402
from tests.cases import Problem, assert_close, make  # noqa: E402
from tests.machine.test_operator_on_machine import STACKED, stacked  # noqa: E402

if cuda_driver.unavailable() is not None:
    pytest.skip(cuda_driver.unavailable(), allow_module_level=True)

SEEDS = (0, 1, 2, LAST_BLOCK_FIRST + 3)
WIDTH = 64
# Several tiles of keys; some hide tiles of rows from blocks: at their beginning, at their end, or between others.
PROBLEMS = {
    "all-seen": dict(batch=2, length=200),
    "causal": dict(batch=1, length=330, rel_rows="uni", rel_batch=True),
    "window": dict(batch=2, length=330, mask="window"),
    "order": dict(batch=2, length=200, mem=70, mask="order"),
    "rows-far-apart": dict(batch=1, length=70, keys=330, positions=True, mask="order"),
}


def skipped(width: int) -> Problem:
    """Five tiles of rows, of which the third sees all keys but 64 to 127: sums kept from the second come before."""
    query_rank = (2 - (torch.arange(320) // 64 == 2).int())[None]
    key_rank = (torch.arange(320) // 64 == 1).int()[None]
    problem = make(2, 1, 320, width=width, dtype=torch.bfloat16)
    return problem.with_options(mask=xk.RankMask(query_rank, key_rank))


# Served by sm_90a's kernels; those of sm_80 serve rows that are far apart.
OF_WARPGROUPS = {name: sizes for name, sizes in PROBLEMS.items() if name != "rows-far-apart"}
OF_WARPGROUPS |= {"skipped": None, "stacked": STACKED["sixth"], "stacked-wide": STACKED["third-dense"]}


def problem_of_warpgroups(name: str, width: int, dtype: torch.dtype) -> Problem:
    if name.startswith("stacked"):
        keys, step, mem, _, mask = OF_WARPGROUPS[name]
        problem = stacked(5, keys, step, mem, width, mask)
    else:
        problem = skipped(width) if name == "skipped" else problem_of(True, width=width, **OF_WARPGROUPS[name])
    return problem.to(dtype).with_options(deterministic=True)


def problem_of(deterministic: bool, *, batch: int, length: int, width: int = WIDTH, **more) -> Problem:
    problem = make(batch, 1, length, width=width, dtype=torch.bfloat16, **more)
    return problem.with_options(deterministic=deterministic)


class Workspace:
    """Arrays of the workspace that the last launch was given, as they were then: (size, address)."""

    def __init__(self, monkeypatch):
        self.arrays: list[tuple[int, int]] = []
        regions = cuda_driver._regions

        def record(parameters):
            known = regions(parameters)
            self.arrays = sorted((size, start) for start, size, _, name in known if "device memory" in name)
            self.contents = {place: ctypes.string_at(place[1], place[0]) for place in self.arrays}
            return known

        monkeypatch.setattr(cuda_driver, "_regions", record)

    def of_size(self, size: int) -> list[bytes]:
        return [self.contents[place] for place in self.arrays if place[0] == size]


def results_and_sums(problem: Problem, seed: int, workspace: Workspace, architecture: int = 80) -> dict:
    """The float32 sums behind the gradients of query and rel_key, because 16 bits would hide most of an order."""
    with serving(architecture, seed=seed) as record:
        found: dict = problem.results("cuda")
    assert any("warpgroup_backward_kernel" in launch.name for launch in record.launches) == (architecture == 90)
    query, rel_key = problem.leaves["query"], problem.leaves["rel_key"]
    batches = (
        query.shape[0]
        if problem.options["deterministic"]
        else rel_key.numel() // (rel_key.shape[-2] * rel_key.shape[-1])
    )
    found["sums for query"] = workspace.of_size(4 * query.numel())
    found["sums for rel_key"] = workspace.of_size(4 * batches * rel_key.shape[-2] * rel_key.shape[-1])
    assert len(found["sums for query"]) == len(found["sums for rel_key"]) == 1, "sizes tell them from other arrays"
    return found


def different(one: dict, other: dict) -> set[str]:
    return {
        name
        for name, value in one.items()
        if not (torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name])
    }


BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
CASES = [pytest.param(80, WIDTH, name, BFLOAT16, marks=pytest.mark.thorough) for name in PROBLEMS]
CASES += [pytest.param(90, width, name, BFLOAT16) for name in OF_WARPGROUPS for width in (64, 128)]
CASES += [pytest.param(90, width, "order", FLOAT16, marks=pytest.mark.thorough) for width in (64, 128)]


@pytest.mark.parametrize(("architecture", "width", "name", "dtype"), CASES)
def test_bits_do_not_depend_on_which_block_is_ahead(architecture, width, name, dtype, monkeypatch):
    problem = problem_of(True, **PROBLEMS[name]) if architecture == 80 else problem_of_warpgroups(name, width, dtype)
    workspace = Workspace(monkeypatch)
    first, *others = (results_and_sums(problem, seed, workspace, architecture) for seed in SEEDS)
    for other in others:
        assert not different(first, other)
    found = {name: value for name, value in first.items() if isinstance(value, torch.Tensor)}
    assert_close(found, problem.to(torch.float64).results("reference"), problem)


@pytest.mark.parametrize("width", [64, 128])
def test_a_block_may_have_no_rows(width):
    """Its warps that keep the order read nothing of a run of rows, because none has come."""
    problem = stacked(5, 200, 6, 0, width, None)
    key_rank = (torch.arange(200) >= 100).int().expand(2, -1)  # no row sees the second block's keys, 128 to 199
    mask = xk.RankMask(torch.ones(problem.leaves["query"].shape[::2], dtype=torch.int32), key_rank)
    problem = problem.with_options(mask=mask, deterministic=True)
    with serving(90) as record:
        found = problem.results("cuda")
    assert any("warpgroup_backward_kernel" in launch.name for launch in record.launches)
    assert_close(found, problem.to(torch.float64).results("reference"), problem)


def test_bits_of_sums_in_any_order_depend_on_it(monkeypatch):
    """Else the test above would show nothing."""
    problem, workspace = problem_of(False, **PROBLEMS["order"]), Workspace(monkeypatch)
    first, *others = (results_and_sums(problem, seed, workspace) for seed in SEEDS)
    for sums in ("sums for query", "sums for rel_key"):
        assert any(sums in different(first, other) for other in others), sums


def test_a_warp_pauses_between_two_looks():
    """Else looks of warps that wait would take L2's time from additions."""
    with serving(80) as record:
        problem_of(True, batch=1, length=70).results("cuda")
    kernel = next(launch for launch in record.launches if "backward_kernel" in launch.name)
    between = r"ld\.acquire(?:(?!\.entry|ld\.acquire).)*nanosleep\.u32"
    assert re.search(between, kernel.ptx, re.S)
