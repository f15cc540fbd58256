"""Independence of results from threads and concurrent calls, and calls without L x K memory."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import xlnet_kernels as xk
from tests.cases import COMPILED, make

if "cpu" not in COMPILED:
    pytest.skip("the compiled extension is not there", allow_module_level=True)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, "order", "dense"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_results_do_not_depend_on_the_number_of_threads(threads, dtype, mask, deterministic):
    problem = make(2, 3, 300, mem=70, mask=mask, dtype=dtype).with_options(dropout_p=0.2, deterministic=deterministic)
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(problem.results("cpu"))
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(other[name], value), name


def test_same_call_gives_the_same_bits():
    problem = make(1, 2, 200, mem=31, mask="order")
    first, second = problem.results("cpu"), problem.results("cpu")
    assert all(torch.equal(second[name], value) for name, value in first.items())


def test_calls_from_several_threads_do_not_meet(threads):
    """Each thread has its own of the memory that is kept between calls."""
    threads(1)
    problems = [make(1, 2, 20 + 13 * n % 150, width=32, mask="order") for n in range(30)]
    wanted = [problem.results("cpu") for problem in problems]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for found, expected in zip(pool.map(lambda problem: problem.results("cpu"), problems), wanted, strict=True):
                assert all(torch.equal(found[name], value) for name, value in expected.items())


# A process of its own, since the peak that the system reports never falls again. The short run first pays for what
# every first call costs.
PEAK = """
import resource, sys, torch
import xlnet_kernels as xk

def run(length, heads=2, width=64):
    query, key, value = (torch.randn(1, heads, length, width, requires_grad=True) for _ in range(3))
    rel_key = torch.randn(heads, 2 * length, width, requires_grad=True)
    ids = torch.randint(2, (1, length))
    segments = xk.Segments(ids, ids, torch.randn(2, heads, width, requires_grad=True))
    mask = xk.RankMask.from_order(torch.randperm(length)[None])
    out = xk.rel_attention(query, key, value, rel_key, segments=segments, mask=mask, dropout_p=0.1, backend="cpu")
    out.sum().backward()

run(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(int(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("kind", ["local", "chunked", "packed", "packed causal", "global keys"])
def test_tiles_that_no_row_sees_cost_nothing(threads, kind):
    """A 16th of the keys is seen: less than half of the processor's time, however busy the machine is."""
    threads(1)
    length = 2048
    ids = torch.arange(length)[None] // 128
    mask = {
        "local": lambda: xk.RankMask.local(1, length, 64, 63),
        "chunked": lambda: xk.RankMask.chunked(1, length, 64, 1),
        "packed": lambda: xk.RankMask.packed(ids),
        "packed causal": lambda: xk.RankMask.packed(ids, causal=True),
        "global keys": lambda: xk.RankMask.padding(attention_mask=ids == 5),
    }[kind]()
    leaves = [torch.randn(1, 2, length, 64, requires_grad=True) for _ in "qkv"]
    leaves.append(torch.randn(2, 2 * length, 64, requires_grad=True))

    def seconds(seen) -> float:
        before = time.thread_time()
        xk.rel_attention(*leaves, mask=seen, backend="cpu").sum().backward()
        return time.thread_time() - before

    full = xk.RankMask.full(1, length)
    assert min(seconds(mask) for _ in range(3)) < min(seconds(full) for _ in range(3)) / 2


def test_time_of_a_window_of_distances_is_linear_in_length(threads):
    """8 times as many rows: 8 times the processor's time, where all pairs would be 64 times; between the two is 16."""
    threads(1)
    rel_key = torch.randn(1, 65, 32, requires_grad=True)

    def seconds(length) -> float:
        leaves = [torch.randn(1, 1, length, 32, requires_grad=True) for _ in "qkv"]
        before = time.thread_time()
        xk.rel_attention(*leaves, rel_key, max_distance=32, backend="cpu").sum().backward()
        return time.thread_time() - before

    assert min(seconds(16384) for _ in range(3)) < 16 * min(seconds(2048) for _ in range(3))


WINDOW_PEAK = """
import resource, sys, torch
import xlnet_kernels as xk

def run(length):
    query, key, value = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
    rel_key = torch.randn(1, 65, 16, requires_grad=True)
    xk.rel_attention(query, key, value, rel_key, max_distance=32, backend="cpu").sum().backward()

torch.set_num_threads(1)
run(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(int(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_scratch_of_a_window_of_distances_does_not_grow_with_length():
    if sys.platform != "linux":
        pytest.skip("ru_maxrss has other units elsewhere")
    length, width = 2**17, 16
    found = subprocess.run([sys.executable, "-c", WINDOW_PEAK, str(length)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    vectors = 4 * length * (8 * width + 4)  # query, key, value, out, their gradients; a row's statistics
    scratch_of_all_keys = 4 * length * 8 * width
    assert int(found.stdout) * 1024 < vectors + scratch_of_all_keys / 2


def test_memory_is_linear_in_length():
    if sys.platform != "linux":
        pytest.skip("ru_maxrss has other units elsewhere")
    length = 4096
    found = subprocess.run([sys.executable, "-c", PEAK, str(length)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    peak = int(found.stdout) * 1024
    one_map = length * length * 4  # of one head
    inputs_and_gradients = 2 * 4 * (2 * 64 * length) * (4 + 2)  # query, key, value, out and rel_key, and theirs
    assert peak - inputs_and_gradients < one_map / 2
