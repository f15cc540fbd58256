"""torch.utils.flop_counter counts the operators by what is known of their shapes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import xlnet_kernels as xk
from tests import ROOT
from tests.cases import READY
from xlnet_kernels._ops import ops

B, H, L, K, M, D = 2, 3, 5, 7, 4, 8
FUSED = [name for name in READY if name in ("cpu", "torch", "triton")]


def tensors(length=L, keys=K, rows=2 * K):
    shapes = [(B, H, length, D), (B, H, keys, D), (B, H, keys, D), (H, rows, D)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def counted(*given, **options):
    """Floating-point operations forward and backward."""
    with FlopCounterMode(display=False) as forward:
        out = xk.rel_attention(*given, **options)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("backend", FUSED)
def test_all_pairs(backend):
    product = 2 * B * H * L * K * D
    assert counted(*tensors(), backend=backend) == (3 * product, 8 * product)
    positions = torch.zeros(B, L, dtype=torch.int64)
    mask = xk.RankMask.padding(torch.zeros(B, K, dtype=torch.bool)).rows(positions)  # values are not looked at
    found = counted(*tensors(), query_positions=positions, mask=mask, dropout_p=0.5, backend=backend)
    assert found == (3 * product, 8 * product)
    memory = torch.randn(2, B, H, M, D)
    product = 2 * B * H * L * (M + K) * D
    assert counted(*tensors(rows=M + 2 * K), memory=(*memory,), backend=backend) == (3 * product, 8 * product)


@pytest.mark.parametrize("backend", FUSED)
def test_pairs_that_have_a_distance(backend):
    """Causal tables and windows; each row of a window at unknown positions counts as many keys as rel_key has rows."""
    distance = torch.arange(L)[:, None] - torch.arange(K)
    for rows, given, seen in [(K + 1, None, distance >= 0), (3, 1, (distance <= 1) & (distance >= -1))]:
        product = 2 * B * H * int(seen.sum()) * D
        assert counted(*tensors(rows=rows), max_distance=given, backend=backend) == (3 * product, 8 * product)
    positions = torch.zeros(B, L, dtype=torch.int64)
    found = counted(*tensors(rows=3), max_distance=1, query_positions=positions, backend=backend)
    assert found[0] == 3 * 2 * B * H * L * 3 * D


@pytest.mark.skipif("cpu" not in READY, reason="the CPU kernels are not compiled")
def test_gradients_that_nobody_wants_are_not_counted():
    given = tensors()
    for leaf in given[1:]:
        leaf.requires_grad_(False)
    assert counted(*given, backend="cpu")[1] == 5 * 2 * B * H * L * K * D


def test_the_reference_counts_as_much_in_order_of_size():
    """It multiplies by every row of rel_key, two for each key."""
    found, wanted = counted(*tensors(K), backend="reference"), 2 * B * H * K * K * D
    assert 3 * wanted <= found[0] <= 4 * wanted and 6 * wanted <= found[1] <= 8 * wanted


def test_products():
    x, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    with FlopCounterMode(display=False) as counter:
        ops.linear(x, weight, None)
    assert counter.get_total_flops() == 2 * 6 * 4 * 5


FINDS = """
import importlib, importlib.util, inspect, sys
import torch, xlnet_kernels
from xlnet_kernels._ops import ops

NAME = "torch.utils.flop_counter"
NAMES = [f"rel_attention{backend}{way}" for backend in ("", "_torch") for way in ("", "_backward")]
finders = [*sys.meta_path]
assert NAME not in sys.modules, "it is imported by nobody"
assert "FlopCounterMode" in importlib.util.find_spec(NAME).loader.get_source(NAME)  # looked for, not imported
sys.modules["torch.utils.module_tracker"] = None
try:
    importlib.import_module(NAME)
except ImportError:
    del sys.modules["torch.utils.module_tracker"]
counter = importlib.import_module(NAME)
assert all(getattr(ops, name) in counter.flop_registry for name in NAMES), "after an import that failed"
importlib.reload(counter)
assert all(getattr(ops, name) in counter.flop_registry for name in NAMES), "after a reload"
assert "FlopCounterMode" in inspect.getsource(counter) and counter.__loader__ is counter.__spec__.loader
assert type(counter.__loader__) is type(torch.__loader__), counter.__loader__
assert sys.meta_path == finders, "a list that changes hides finders from other threads' imports"
"""


def test_the_counter_is_imported_by_nobody_and_finds_the_formulas():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FINDS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
