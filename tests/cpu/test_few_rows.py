"""Calls of up to 12 query rows (4 in 16 bits, csrc/cpu/few_rows.h).

Rows go through the keys 4 at a time. Keys are read where they lie, 48 at a time, in tiles of 576.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
import torch

import xlnet_kernels as xk
from tests.cases import COMPILED, MASKS, assert_right, make

if "cpu" not in COMPILED:
    pytest.skip("the compiled extension is not there", allow_module_level=True)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


# 13 rows go the usual way. 1200 keys are three tiles.
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length, mem", [(1, 0), (1, 1200), (2, 47), (3, 96), (4, 577), (11, 577), (12, 3), (13, 577)])
def test_masks(length, mem, mask):
    assert_right(make(2, 2, length, mem=mem, mask=mask), "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length, width", [(1, 1), (4, 24), (3, 40), (1, 64), (4, 80), (2, 200), (9, 64)])
def test_widths_and_dtypes(length, width, dtype):
    assert_right(make(1, 2, length, mem=130, width=width, mask="ranks", dtype=dtype), "cpu")


@pytest.mark.parametrize("biases, segments, rel_batch", [*product([False, True], repeat=3)])
def test_terms(biases, segments, rel_batch):
    assert_right(make(2, 2, 3, mem=70, biases=biases, segments=segments, rel_batch=rel_batch), "cpu")


# Positions further apart than 48 are taken one after the other.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys, mask", [(3, None), (60, "ranks"), (1000, "causal"), (1000, "dense")])
def test_positions(keys, mask, dtype):
    problem = make(3, 1, 4, keys, mem=20, mask=mask, positions=True, rel_rows="uni", width=64, dtype=dtype)
    assert_right(problem, "cpu")


# (max_distance, rows of rel_key): windows begin and end inside of steps, or beyond all keys.
@pytest.mark.parametrize("window", [(70, 141), (700, 701), (3, 4), (-10, 60), (9, 17), (2000, 2)])
@pytest.mark.parametrize("positions", [False, True])
def test_windows_of_distances(window, positions):
    assert_right(make(1, 2, 4, 400, mem=650, window=window, positions=positions), "cpu")


@pytest.mark.parametrize("length", [1, 4])
def test_dropout(length):
    problem = make(2, 2, length, mem=700, width=64, mask="order").with_options(dropout_p=0.3)
    exact = problem.to(torch.float64).results("reference")
    found = problem.results("cpu")
    for name, value in exact.items():
        assert torch.allclose(found[name].double(), value, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_may_be_strided_and_odd(dtype):
    problem = make(2, 3, 2, mem=100, width=32, mask="order", dtype=dtype)
    strided = problem.map(lambda leaf: torch.stack([leaf, leaf + 1], -1)[..., 0])
    shifted = problem.map(lambda leaf: torch.cat([leaf.new_zeros(1), leaf.flatten()])[1:].view(leaf.shape))
    wanted = problem.results("cpu")
    for other in (strided, shifted):
        assert all(torch.equal(value, wanted[name]) for name, value in other.results("cpu").items())


def test_rows_one_by_one_are_those_of_the_whole_call():
    """Row by row with a memory, as in generation, gives what one call of all rows gives."""
    length, mem = 40, 30
    problem = make(2, 2, length, mem=mem, width=64, rel_rows="uni", segments=False)
    whole, _ = problem.call("cpu")
    leaves = problem.leaves
    keys, values = (torch.cat([leaves[f"memory_{name}"], leaves[name]], 2) for name in ("key", "value"))
    shared = dict(content_bias=leaves["content_bias"], position_bias=leaves["position_bias"], backend="cpu")
    for row in range(length):
        past = mem + row
        memory = keys[:, :, :past], values[:, :, :past]
        own = (x[:, :, row : row + 1] for x in (leaves["query"], leaves["key"], leaves["value"]))
        out = xk.rel_attention(*own, leaves["rel_key"][:, -(past + 2) :], memory=memory, **shared)
        assert torch.allclose(out[:, :, 0], whole[:, :, row], atol=1e-5)


# The usual way packs keys, values and rows of rel_key into memory of its own.
PEAK = """
import resource, torch
import xlnet_kernels as xk
torch.set_num_threads(1)
mem, width = 2**17, 64
x, rel_key = torch.randn(1, 1, 1, width), torch.randn(1, mem + 2, width)
memory = [torch.randn(1, 1, mem, width) for _ in "kv"]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
xk.rel_attention(x, x, x, rel_key, memory=memory, backend="cpu")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, mem * width * 4 // 1024)
"""


def test_nothing_is_packed():
    if sys.platform != "linux":
        pytest.skip("ru_maxrss has other units elsewhere")
    found = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    grown, of_keys = map(int, found.stdout.split())
    assert grown < of_keys / 2
