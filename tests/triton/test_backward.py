"""Triton's backward in one pass over rows or in two: gradients of key and value."""

from __future__ import annotations

import mmap

import pytest
import torch

import xlnet_kernels as xk
from tests.cases import READY, assert_right, make

pytest.importorskip("triton")
if "triton" not in READY:
    pytest.skip(f"the Triton backend is {xk.backends()['triton']}", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from xlnet_kernels.backends.triton import launch, launch_cache, tuning  # noqa: E402
from xlnet_kernels.backends.triton.arguments import Sizes, head_at  # noqa: E402
from xlnet_kernels.backends.triton.operands import store_keys  # noqa: E402

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="a GPU's own table decides there")
PROBLEMS = {
    "memory-and-segments": dict(length=70, mem=37, mask="order"),
    "odd-width-window": dict(length=75, mem=5, width=24, window=(20, 31)),
    "rows-far-apart": dict(length=40, keys=150, mem=20, positions=True, mask="ranks"),
}


@interpreted
@pytest.mark.few
@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["", "dropout"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_one_pass_and_two_passes(monkeypatch, problem, dropout_p):
    taken = {}

    def watch(self, kernel, *rest, one_pass=False, **arguments):
        taken[kernel.__name__] = one_pass
        return original(self, kernel, *rest, one_pass=one_pass, **arguments)

    original = launch.Call.launch
    monkeypatch.setattr(launch.Call, "launch", watch)
    given = make(2, 2, dtype=torch.float16, **PROBLEMS[problem]).with_options(dropout_p=dropout_p)
    for deterministic in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            assert_right(given.with_options(deterministic=deterministic), "triton")
        assert taken["rows_kernel"] is taken["keys_kernel"] is (not deterministic)
    assert_right(make(1, 2, 40).with_options(deterministic=False), "triton")
    assert not taken["keys_kernel"]  # in float32


@interpreted  # which multiplies float32 exactly, whatever is allowed
@pytest.mark.parametrize(
    ("dtype", "tf32", "tolerance"),
    [(torch.float32, True, 1e-5), (torch.float32, False, 4e-3), (torch.float16, False, 4e-3)],
)
@pytest.mark.parametrize("kind", [{}, {"positions": True, "keys": 90}, {"width": 40, "mem": 9}], ids=str)
def test_a_small_gradient_of_position_bias_beside_a_large_one_of_content_bias(
    dtype, tf32, tolerance, kind, monkeypatch
):
    """With TF32 it is off by a share of its own terms, else by float32's rounding of what keys give."""
    monkeypatch.setattr(launch_cache, "precision_of", lambda *_: "tf32" if tf32 else "ieee")
    monkeypatch.setattr(launch_cache, "plans", {})
    problem = make(2, 2, 80, mask="causal", dtype=dtype, **kind)
    problem.leaves |= {"key": problem.leaves["key"] + 5, "rel_key": problem.leaves["rel_key"] * 1e-3}
    wanted = problem.to(torch.float64).results("reference")["grad position_bias"]
    found = problem.results("triton")["grad position_bias"]
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_one_pass_is_taken_where_counts_favour_it():
    kept = tuning.Config(64, 64, 64, True, num_warps=4, num_stages=1)
    for capability in ((8, 0), (8, 9), (9, 0), (12, 0), None):
        assert tuning.takes_one_pass(kept, "16-bit", capability)
        assert not tuning.takes_one_pass(kept._replace(KEEP=False), "16-bit", capability)
        assert not tuning.takes_one_pass(kept, "float32", capability)
    assert not tuning.takes_one_pass(kept, "16-bit", (10, 0))


def test_sums_of_keys_are_cleared_and_padded(monkeypatch):
    x = torch.randn(2, 3, 100, 16, dtype=torch.float16)
    rel_key = torch.randn(3, 200, 16, dtype=torch.float16)
    monkeypatch.setattr(launch_cache, "plans", {})
    call = launch.Call((x, x, x, rel_key, *[None] * 16, 100, 0.0, 1.0, False))
    sums = call.room_for_key_sums()
    assert [values.numel() for values in sums] == [2 * 3 * 128 * 16, 2 * 3 * 128 * 16, 2 * 3 * 128]
    assert all(values.dtype == torch.float32 and not values.any() for values in sums)


@triton.jit(do_not_specialize=["heads", "keys", "j0"])
def _store_ones(to, heads, keys, j0, META):
    size = Sizes(heads, keys, 0, keys, 1, 0)
    ones = tl.full((META.BLOCK_N, META.BLOCK_D), 1.0, tl.float32)
    store_keys(None, to, head_at(tl.program_id(0), size), j0, (ones,), 1.0, size, META)


@interpreted
def test_gradients_of_keys_that_32_bits_cannot_address():
    """Keys of a layout with fewer elements between them may be as long; gradients are contiguous (B, K, H, D)."""
    heads, width, keys = 32, 128, 2**19 + 32
    room = mmap.mmap(-1, 2 * keys * heads * width)  # of which two pages are used, whatever fills new tensors
    grad = torch.frombuffer(room, dtype=torch.float16).view(keys, heads, width)
    meta = launch._meta(tuning.Config(32, 32, width, True, 4, 1), width, *[False] * 11)
    _store_ones[(1,)](grad, heads, keys, keys - 32, meta)
    assert (grad[-32:, 0] == 1).all() and not grad[-32:, 1:].any()
