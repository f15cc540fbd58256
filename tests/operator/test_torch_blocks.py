"""The backend "torch": blocks of rows within a budget of bytes, operators that every device has, and when it serves."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.cases import assert_right, make
from xlnet_kernels.backends import _BACKENDS, _log_once, blocks, cpu, reference, torch_blocks
from xlnet_kernels.dropout import keep_block, keep_mask

IMPLEMENTATIONS = {
    "rel_attention_torch": torch_blocks._forward,
    "rel_attention_torch_backward": torch_blocks._backward,
}
# Operators that PyTorch's MPS backend implements, or makes of others. docs/support.md names the rule.
OPERATORS = set(
    """
    __and__ __iand__ __ior__ __or__ __rshift__ __xor__ add add_ addcmul_ alias all amax amin any arange as_strided
    bitwise_not cat clamp_max clone copy_ div_ eq expand expand_as flatten gather ge log logical_or lt mT masked_fill
    masked_fill_ matmul mul mul_ narrow ne new_empty new_empty_strided new_zeros pad permute promote_types reciprocal
    rsub scatter_ select slice softmax stack sub sub_ sum to transpose unbind unflatten unsqueeze view where zero_
    """.split()
)
READS = {"aminmax", "clamp_max_", "gt", "is_nonzero", "item", "nonzero"}  # used on the CPU alone


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Operators that the backend calls, and the dtypes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.operators, self.dtypes = False, set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._opname in IMPLEMENTATIONS:
            self.inside = True
            with self:
                found = IMPLEMENTATIONS[function._opname](*args)
            self.inside = False
            return found
        found = function(*args, **(kwargs or {}))
        if self.inside:
            self.operators.add(function._opname)
            leaves = torch.utils._pytree.tree_leaves(found)
            self.dtypes |= {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}
        return found


PROBLEMS = {
    "everything": dict(mem=5, mask="order", positions=True),
    "ranks": dict(mask="ranks", rel_batch=True),
    "dense": dict(mask="dense", rel_rows="uni"),
    "window": dict(mask="causal", window=(6, 9)),
    "bfloat16": dict(mask="causal", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", PROBLEMS)
def test_operators_are_those_that_mps_has_and_none_is_float64(kind):
    problem = make(2, 2, 20, **PROBLEMS[kind]).with_options(dropout_p=0.25)
    with Recorder() as recorder:
        problem.results("torch")
    assert len(recorder.operators) > 20 and recorder.operators <= OPERATORS | READS
    assert torch.float32 in recorder.dtypes and torch.float64 not in recorder.dtypes


def test_values_are_read_on_the_cpu_alone():
    """Elsewhere the host would wait for the device; spans of keys are then those of positions and rel_key."""
    problem = make(2, 2, 150, mem=5, mask="window", positions=True)
    with mock.patch.object(blocks, "readable", lambda tensor: False), Recorder() as recorder:
        assert_right(problem, "torch")
    assert not recorder.operators & READS
    with Recorder() as recorder:
        problem.results("torch")
    assert recorder.operators >= READS


@pytest.mark.parametrize("limit, length", [(1, 7), (3000, 20), (20_000, 45)])
@pytest.mark.parametrize("kind", PROBLEMS)
def test_any_budget_gives_the_same_numbers(monkeypatch, limit, length, kind):
    problem = make(3, 3, length, **PROBLEMS[kind]).with_options(dropout_p=0.25)
    monkeypatch.setenv("XLNET_KERNELS_BLOCK_BYTES", str(limit))
    assert_right(problem, "torch")


@pytest.mark.parametrize("kind", PROBLEMS)
def test_numbers_of_any_size_are_served(monkeypatch, kind):
    """Where products may overflow, other operators keep infinities and NaN to the pairs that they belong to."""
    monkeypatch.setattr(blocks, "LARGEST", 0.0)
    with Recorder() as recorder:
        assert_right(make(2, 2, 20, **PROBLEMS[kind]).with_options(dropout_p=0.25), "torch")
    assert "clamp_max_" not in recorder.operators


def test_products_of_large_numbers_that_overflow_stay_hidden():
    """2 * 2 ** 60 * 2 ** 60 * 256 is beyond float32: two such terms of other signs are NaN where the pair is hidden."""
    problem = make(1, 1, 5, width=256, mask="causal", segments=False)
    leaves = {name: torch.zeros_like(leaf) for name, leaf in problem.leaves.items()}
    size = 0.99 * 2.0**60
    for name in ("query", "content_bias", "position_bias"):
        leaves[name].fill_(size)
    leaves["key"][:, :, 1:], leaves["rel_key"][:, 6:] = -size, size
    out = replace(problem, leaves=leaves).with_options(scale=1.0).call("torch")[0]
    assert out[:, :, 0].isfinite().all()


def test_backward_has_the_largest_score_of_its_own_products(monkeypatch):
    """Blocks of another size than forward's round scores near 1e9 elsewhere, and exponentials of that are infinite."""
    monkeypatch.setenv("XLNET_KERNELS_BLOCK_BYTES", "3000")
    problem = make(2, 2, 20, mask="dense")
    problem.leaves["query"] *= 1e8
    assert_right(problem, "torch")


def test_blocks_are_sized_by_the_budget():
    query, rel_key = torch.empty(2, 4, 300, 16), torch.empty(4, 600, 16)
    tensors = dict.fromkeys(blocks.INPUT_NAMES) | {"query": query, "key": query, "value": query}
    inputs = [*(tensors | {"rel_key": rel_key}).values(), 300, 0.0, 0.25, False]

    def shapes(limit: int) -> set[tuple[int, ...]]:
        with mock.patch.dict("os.environ", XLNET_KERNELS_BLOCK_BYTES=str(limit)):
            return {tuple(block.content.shape[:3]) for block in blocks.BlockedCall(inputs).blocks()}

    assert shapes(10**9) == {(2, 4, 128), (2, 4, 44)}
    maps = 4 * (2 * 300 + 2 * (300 + 128))  # bytes of scores, probabilities, the band and the padded band of one row
    assert 30 <= max(b * h * m for b, h, m in shapes(100 * maps)) <= 100
    assert shapes(1) == {(1, 1, 1)}


CALLS = {
    "plain": dict(segments=False, biases=False),
    "segments": dict(mask="ranks"),
    "dense": dict(mask="dense"),
    "uni": dict(rel_rows="uni"),
    "memory": dict(mem=150, segments=False),
    "dropout": dict(mask="ranks"),
    "positions": dict(positions=True, mask="order"),
    "bfloat16": dict(mask="ranks", dtype=torch.bfloat16),
    "table of each sequence": dict(rel_batch=True, dtype=torch.bfloat16),
}


def allocated(call) -> tuple[int, object]:
    """Bytes that torch's allocator holds at the peak of a call, above those before it, and the call's result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes)), result


@pytest.mark.parametrize("kind", CALLS)
def test_allocations_stay_within_the_budget(monkeypatch, kind):
    """Above outputs and gradients, in any layout: the copies of keys and sums of gradients count, too."""
    limit = 1_600_000
    monkeypatch.setenv("XLNET_KERNELS_BLOCK_BYTES", str(limit))
    problem = make(2, 3, 300, width=32, **CALLS[kind]).with_options(dropout_p=0.25 if kind == "dropout" else 0.0)
    leaves = {name: leaf.mT.contiguous().mT for name, leaf in problem.leaves.items()}
    problem = replace(problem, leaves={name: leaf.requires_grad_() for name, leaf in leaves.items()})
    with torch.no_grad():
        peak, out = allocated(lambda: problem.call("torch"))
    assert peak - sum(tensor.nbytes for tensor in out) <= 1.2 * limit
    out = problem.call("torch")[0]
    wanted = list(problem.leaves.values())
    peak, gradients = allocated(lambda: torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True))
    assert peak - sum(gradient.nbytes for gradient in gradients if gradient is not None) <= 1.2 * limit


def test_blocks_of_the_dropout_mask_are_parts_of_it():
    state = torch.tensor([5, (3 << 32) + 7])
    whole = keep_mask(state, 3, 4, 40, 200, 0.3)
    here = slice(1, 3), slice(2, 4), slice(7, 31), slice(70, 150)
    assert torch.equal(keep_block(state, 4, *here, 0.3), whole[here])


def test_serves_where_no_kernel_does(monkeypatch, caplog):
    served = {"cpu": cpu, "torch": torch_blocks, "reference": reference}
    monkeypatch.setattr(cpu, "unavailable", lambda device=None: "no compiler")
    _log_once.cache_clear()
    problem = make(mask="order")
    with mock.patch.dict(_BACKENDS, served, clear=True), caplog.at_level(logging.INFO, "xlnet_kernels"):
        with Recorder() as recorder:
            out = problem.run(None, "cpu")[0]
        assert recorder.operators and torch.equal(out, problem.run("torch", "cpu")[0])
        assert "the torch backend serves tensors on cpu, since no fused one can (cpu: no compiler)" in caplog.text
        with Recorder() as recorder:
            torch.func.vmap(lambda factor: problem.run(None, "cpu")[0] * factor)(torch.ones(2))
        assert not recorder.operators  # transforms take the reference


PEAK = """
import re, torch, xlnet_kernels as xk
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
def run(length):
    leaves = [torch.randn(1, 4, length, 16) for _ in range(3)] + [torch.randn(4, 2 * length, 16)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    room = [torch.ones(1, 4, length, 16) for _ in range(12)]
    before = peak()
    del room
    xk.rel_attention(*leaves, backend="torch").sum().backward()
    return peak() - before
run(64)
print(run(4096))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
def test_memory_stays_within_the_budget():
    """One map of L 4096 and 4 heads would take 268 MB; 1.2 times the budget is what temporaries may take."""
    # a fixed threshold gives each block pages of its own, because malloc's heap keeps what it has freed
    environment = {"XLNET_KERNELS_BLOCK_BYTES": "32000000", "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    with mock.patch.dict("os.environ", environment):
        found = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert int(found.stdout) <= 1.2 * 32_000_000
