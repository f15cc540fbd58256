"""rel_key that holds a window of distances: what has no row is invisible, on both sides of the query."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import xlnet_kernels as xk
from tests.cases import INTERPRETED, MASKS, READY, assert_right, make

# (max_distance, P) for a segment of 45 rows, 75 keys and a memory of 20
SIZES = dict(length=45, keys=75, mem=20)
WINDOWS = {
    "both-sides": (12, 20),
    "before": (30, 31),  # ends at distance 0
    "far-before": (60, 20),  # not the query's own key
    "after": (0, 9),
    "far-after": (-3, 7),
    "one-row": (5, 1),
    "own-key": (0, 1),
    "all-before": (95, 100),  # a bound on one side alone
    "all-after": (10, 85),
    "beyond-the-keys": (200, 180),  # rows that no pair reads
}
OUTSIDE = {"outside-before": (300, 50), "outside-by-one": (95, 1), "outside-far": (2**30 - 1, 3)}


@pytest.fixture(params=READY)
def backend(request) -> str:
    return request.param


def in_full(problem, backend: str = "reference"):
    """The window by a rel_key of all distances and a dense mask: out, lse and gradients, those of rel_key by window."""
    M = problem.leaves["memory_key"].shape[2] if "memory_key" in problem.leaves else 0
    K = problem.leaves["key"].shape[2]
    L = problem.leaves["query"].shape[2]
    rel_key, first = problem.leaves["rel_key"], problem.options["max_distance"]
    distance = torch.arange(M + K, -K, -1)
    row = first - distance
    has_row = (row >= 0) & (row < rel_key.shape[-2])
    positions = problem.options.get("query_positions", torch.arange(L)[None])
    of_pair = (positions + M)[:, :, None] - torch.arange(M + K)
    visible = has_row[M + K - of_pair][:, None]
    mask = problem.options.get("mask")
    if isinstance(mask, xk.RankMask):
        mask = mask.to_bool(None, positions, M)[:, None]
    if mask is not None:
        visible = visible & mask
    full = rel_key[..., row.clamp(0, rel_key.shape[-2] - 1), :] * has_row[:, None]
    whole = replace(problem, leaves=problem.leaves | {"rel_key": full}).with_options(mask=visible, max_distance=M + K)
    found = whole.results(backend)
    gradient = torch.zeros_like(rel_key)
    gradient[..., row[has_row], :] = found["grad rel_key"][..., has_row, :]
    return found | {"grad rel_key": gradient}


@pytest.mark.parametrize("window", [*WINDOWS, *OUTSIDE])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("positions", [False, True], ids=["", "positions"])
def test_the_reference_equals_all_distances_behind_a_dense_mask(window, mask, positions):
    size = (WINDOWS | OUTSIDE)[window]
    problem = make(**SIZES, mask=mask, positions=positions, window=size, width=4, dtype=torch.float64)
    found, wanted = problem.results("reference"), in_full(problem)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("mask", [None, "order", "dense", "window"])
def test_windows(backend, window, mask):
    assert_right(make(**SIZES, mask=mask, window=WINDOWS[window]), backend)


@pytest.mark.parametrize("window", ["both-sides", "before", "far-before", "far-after", "one-row"])
@pytest.mark.parametrize("rel_batch", [False, True], ids=["", "rel-batch"])
@pytest.mark.parametrize("mask", [None, "ranks"])
def test_positions(backend, window, rel_batch, mask):
    assert_right(make(**SIZES, mask=mask, positions=True, rel_batch=rel_batch, window=WINDOWS[window]), backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plain", [False, True], ids=["", "plain"])
def test_dtypes(backend, dtype, plain):
    assert_right(make(2, 2, 70, window=(9, 17), width=40, dtype=dtype, biases=not plain, segments=not plain), backend)


@pytest.mark.parametrize("window", [(70, 141), (200, 300), (200, 201), (30, 31), (130, 20), (3, 4), (-100, 60)])
@pytest.mark.parametrize("kind", [None, "causal", "positions"])
def test_long_with_tiles_outside(backend, window, kind):
    """Several tiles in both directions: outside of the window, across its borders and inside."""
    length, mem = (300, 70) if backend in INTERPRETED else (900, 130)
    mask, positions = (None, True) if kind == "positions" else (kind, False)
    assert_right(make(1, 1, length, mem=mem, width=16, mask=mask, positions=positions, window=window), backend)


@pytest.mark.parametrize("window", [(20, 25), (20, 21), (-5, 10)])
@pytest.mark.parametrize("mem", [0, 64])
def test_positions_far_apart(backend, window, mem):
    """Rows next to each other that have no key in common."""
    length = 200 if backend in INTERPRETED else 700
    problem = make(2, 1, 40, keys=length, mem=mem, width=16, window=window)
    spread = torch.linspace(0, length - 1, 40).long().flip(0)
    rows = torch.stack([spread, torch.where(torch.arange(40) % 2 == 0, 3, length - 1)])
    assert_right(problem.with_options(query_positions=rows), backend)


@pytest.mark.parametrize("window", OUTSIDE)
def test_a_window_beyond_all_keys_gives_zeros(backend, window):
    found = make(**SIZES, window=OUTSIDE[window]).results(backend)
    assert (found.pop("lse") == -torch.inf).all()
    assert all((value == 0).all() for value in found.values())


def test_rows_without_any_key_in_their_window_give_zeros(backend):
    found = make(2, 2, 70, window=(40, 11)).results(backend)  # keys 40 to 30 before: rows below 30 have none
    assert (found["out"][:, :, :30] == 0).all() and (found["lse"][:, :, :30] == -torch.inf).all()
    assert (found["grad query"][:, :, :30] == 0).all() and (found["grad value"][:, :, 40:] == 0).all()
    assert (found["out"][:, :, 30:] != 0).all()
    assert_right(make(2, 2, 70, window=(40, 11)), backend)


@pytest.mark.parametrize("positions", [False, True], ids=["", "positions"])
def test_dropout_is_that_of_all_distances(backend, positions):
    problem = make(**SIZES, window=(12, 20), positions=positions).with_options(dropout_p=0.4)
    found, wanted = problem.results(backend), in_full(problem)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-4 * value[value.isfinite()].abs().max()), name


def test_hidden_values_stay_hidden(backend):
    problem = make(1, 1, 70, segments=False, window=(4, 7))
    problem.leaves["value"][:, :, 40] = 1e30
    out = problem.call(backend)[0]
    rows = torch.arange(70)
    far = (rows > 44) | (rows < 38)
    assert out[:, :, far].abs().max() < 100 and out[:, :, ~far].abs().max() > 1e20


def test_infinite_segment_terms_do_not_uncover_what_has_no_row(backend):
    problem = make(1, 1, 70, window=(4, 7))
    problem.leaves["segment_embed"][1] = torch.inf
    found, wanted = problem.results(backend, ()), problem.results("reference", ())
    for name, value in wanted.items():
        assert torch.equal(found[name].isnan(), value.isnan()), name


@pytest.mark.parametrize("mem", [0, 30])
@pytest.mark.parametrize("left, right", [(8, 4), (8, 0), (0, 8)])
def test_equals_a_rank_mask_of_the_same_window(backend, mem, left, right):
    """RankMask.local on all distances says the same; both together say it once more."""
    problem = make(2, 2, 90, mem=mem, extra_distance=-1)  # a Conformer's table
    problem.options["mask"] = local = xk.RankMask.local(2, 90, left, right, mem)
    wanted = problem.results(backend)
    first = mem + 90 - 1 - left
    table = problem.leaves["rel_key"][:, first : first + left + right + 1]
    windowed = replace(problem, leaves=problem.leaves | {"rel_key": table})
    for mask in (None, local):
        found = windowed.with_options(mask=mask, max_distance=left).results(backend)
        for name, value in wanted.items():
            if name == "grad rel_key":
                value = value[:, first : first + left + right + 1]
            assert torch.allclose(found[name], value, atol=1e-4, rtol=1e-4), name


def test_compiled_without_recompiling_for_another_window(backend):
    if backend in INTERPRETED:
        pytest.skip("a compiler does not see into what is interpreted")

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def attend(query, key, value, rel_key, max_distance):
        return xk.rel_attention(query, key, value, rel_key, max_distance=max_distance, backend=backend)

    problem = make(1, 2, 30, window=(6, 9), biases=False, segments=False)
    leaves = [leaf.requires_grad_() for leaf in problem.leaves.values()]
    out = attend(*leaves, 6)
    wanted = problem.call("reference")[0]
    assert torch.allclose(out, wanted, atol=1e-5)
    found, expected = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, wanted))
    assert all(torch.allclose(f, e, atol=1e-4) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("past, longest", [(0, 4), (3, 4), (4, 4), (4, 9), (9, 9)])
def test_windows_of_transformer_xl(past, longest):
    """same_length of the original code, as docs/migrate.md maps it."""
    length, keys = 5, past + 5
    beyond = keys - longest
    mask_shift_len = length - beyond if beyond > 0 else length
    row, key = torch.arange(length)[:, None], torch.arange(keys)
    hidden = (key > row + past) | (key <= row - mask_shift_len)
    mask = xk.RankMask.causal(1, length, mem_len=past, window=past + mask_shift_len)
    assert torch.equal(mask.to_bool("content")[0], ~hidden)
    assert past < longest or mask_shift_len == 0
