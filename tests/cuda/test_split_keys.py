"""Few rows and many keys: blocks of the CUDA forward kernel that share one tile of rows, on the host."""

from __future__ import annotations

import pytest
import torch

import xlnet_kernels as xk
from lib.simt import on_host
from tests.cases import READY, TWO_SCORES, assert_close, assert_right, assert_two_keys_have_their_weights, make
from tests.cuda.simt_memory import torch_guarded

if on_host.NAME not in READY:
    pytest.skip(on_host.unavailable(), allow_module_level=True)

PROBLEMS = {
    "one-row": dict(length=1, mem=299),
    "rows-of-one-strip": dict(length=3, mem=300, mask="causal", rel_rows="uni"),
    "sixteen": dict(length=16, mem=180, mask="order", dtype=torch.bfloat16),
    "seventeen": dict(length=17, mem=301, mask="ranks", dtype=torch.float16, rel_batch=True),
    "dense": dict(length=5, keys=260, mask="dense", biases=False),
    "padding": dict(length=2, keys=150, mem=150, mask="padding", segments=False),
    "rows-in-any-order": dict(length=20, keys=270, mem=7, positions=True, mask="order"),
    "a-window-of-distances": dict(length=9, mem=400, window=(150, 159)),
    "two-tiles-of-rows": dict(length=70, mem=150, width=80, mask="order"),
}


def size(processors: int, tiles: int) -> None:
    """The device's: with how many processors, and how many tiles of keys are worth a block there."""
    on_host.library().simt_size(processors, tiles)


@pytest.fixture(autouse=True)
def of_many_processors():
    """Keys are split wherever there are four tiles of them."""
    size(128, 1)
    yield
    size(3, 4)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_right_with_gradients(problem):
    given = make(2, 2, **PROBLEMS[problem]).with_options(deterministic=True)
    assert_right(given, on_host.NAME)
    split = given.results(on_host.NAME)
    size(3, 4)
    whole = given.results(on_host.NAME)
    assert not torch.equal(whole["out"], split["out"])  # the same sums in another order


@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_does_not_depend_on_the_schedule(tiles):
    size(128, tiles)
    given = make(1, 1, 3, mem=400, mask="ranks", dtype=torch.bfloat16)
    first, *others = ([*given.run(on_host.NAME, "cpu")] for _ in range(3))
    for other in others:
        assert all(map(torch.equal, first, other))


def test_parts_that_see_no_key_and_rows_that_see_none():
    key_rank = torch.ones(2, 300, dtype=torch.int32)
    key_rank[:, 130:140] = 0
    query_rank = torch.tensor([[1, 0, 1, 2], [0, 0, 0, 0]], dtype=torch.int32)
    for mask in (xk.RankMask(query_rank, key_rank), (key_rank[:, None] < query_rank[:, :, None])[:, None]):
        problem = make(2, 2, 4, mem=296).with_options(mask=mask)
        assert_right(problem, on_host.NAME)
        out, lse = problem.run(on_host.NAME, "cpu")
        assert (out[1] == 0).all() and (lse[1] == -torch.inf).all() and (out[:, :, 1] == 0).all()


def test_a_row_that_sees_nothing_but_infinitely_small_scores_is_nan():
    problem = make(1, 1, 3, mem=300, biases=False, segments=False)
    with torch.no_grad():
        problem.leaves["query"][:, :, 1] = -torch.inf
        for name in ("key", "memory_key", "rel_key"):
            problem.leaves[name].abs_()
    found = problem.results(on_host.NAME)
    assert found["out"][:, :, 1].isnan().all() and found["grad query"][:, :, 1].isnan().all()
    assert found["out"][:, :, [0, 2]].isfinite().all()


def test_dropout_is_what_one_block_would_draw():
    problem = make(2, 2, 3, mem=300, mask="order").with_options(dropout_p=0.4)
    torch.manual_seed(1)
    split = problem.results(on_host.NAME)
    size(3, 4)
    torch.manual_seed(1)
    whole = problem.results(on_host.NAME)
    assert_close(split, {name: value.double() for name, value in whole.items()}, problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", TWO_SCORES, ids=str)
def test_weights_whatever_part_has_the_larger_score(scores, dtype):
    assert_two_keys_have_their_weights(scores, on_host.NAME, dtype)


@pytest.mark.parametrize("at_start", [False, True], ids=["beyond-the-end", "before-the-start"])
def test_stays_inside_its_tensors(at_start):
    given = make(3, 2, 3, mem=300, width=24, mask="order", dtype=torch.float16).with_options(dropout_p=0.2)
    with torch_guarded(on_host.library(), at_start):
        given = given.map(torch.clone)
        found = given.results(on_host.NAME)
    assert all(result.isfinite().all() for name, result in found.items() if name != "lse")
