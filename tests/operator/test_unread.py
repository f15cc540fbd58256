"""Keys, values and rows of rel_key that no query row of their sequence reads count as zeros, NaN and infinity too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

import xlnet_kernels as xk
from tests import covers
from tests.cases import INTERPRETED, MODULES, READY, Problem, make

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FEW, SOME, MANY = 3, 40, 300  # rows: products without packing, a tile, several of them and chunks


def dense(rows: int, keys: int, heads: int = 2) -> Tensor:
    return torch.rand(2, heads, rows, keys, generator=torch.Generator().manual_seed(1)) < 0.7


def padding(rows: int) -> Tensor:
    """The first sequence ends earlier than the second; a key in the middle of the second is none, either."""
    hidden = torch.arange(rows) >= torch.tensor([[rows - 2], [rows - 1]])
    hidden[1, rows // 2] = True
    return hidden


def empty_columns(mask: Tensor, *columns: int) -> Tensor:
    mask[..., list(columns)] = False
    return mask


def of_ranks(rows: int) -> xk.RankMask:
    """Floors above some keys' ranks, own keys, and rows that see nothing."""
    mask = xk.RankMask.causal(2, rows, window=max(rows // 2, 1), padding=padding(rows))
    query_rank = mask.query_rank.clone()
    query_rank[:, rows // 3] = -5
    sees_self = (torch.arange(rows) % 4 == 1).expand(2, -1).contiguous()
    return xk.RankMask(query_rank, mask.key_rank, mask.query_floor, sees_self)


def per_head(rows: int) -> Tensor:
    mask = empty_columns(dense(rows, rows), rows - 1)
    mask[0, 0, :, 0] = mask[1, 1, :, 1] = mask[1, 0, 1] = False
    return mask


CASES = {
    "padding": lambda rows: make(length=rows).with_options(mask=xk.RankMask.padding(padding(rows))),
    "ranks": lambda rows: make(length=rows).with_options(mask=of_ranks(rows)),
    "dense": lambda rows: make(length=rows).with_options(mask=empty_columns(dense(rows, rows, 1), 0, rows - 1)),
    "dense-per-head": lambda rows: make(length=rows, width=20).with_options(mask=per_head(rows)),
    "memory": lambda rows: make(length=rows, mem=9).with_options(
        mask=empty_columns(dense(rows, 9 + rows, 1), 0, 4, 8, 9)
    ),
    "packed": lambda rows: make(length=rows).with_options(
        mask=xk.RankMask.packed(torch.arange(rows).expand(2, -1) * 3 // rows, padding=padding(rows)), dropout_p=0.3
    ),
    "window": lambda rows: make(length=rows, keys=rows + 20, rel_batch=True, window=(3, 6)),
    "window-before-all-rows": lambda rows: make(length=rows, window=(32, 6)),
    "ahead-of-all-rows": lambda rows: make(length=rows, keys=rows + 20, rel_rows="uni", segments=False),
    "positions": lambda rows: make(length=rows, keys=rows + 30, positions=True, window=(5, 9), mask="causal"),
}


def pairs(problem: Problem) -> tuple[Tensor, Tensor]:
    """Which pairs are visible, (B, H, L, M + K), and the row of rel_key that each reads, (B, L, M + K)."""
    mask, (batch, heads, rows, _) = problem.options.get("mask"), problem.leaves["query"].shape
    memory = problem.leaves["memory_key"].shape[2] if "memory_key" in problem.leaves else 0
    keys = memory + problem.leaves["key"].shape[2]
    position = problem.options.get("query_positions", torch.arange(rows).expand(batch, -1))
    row = problem.options.get("max_distance", keys) - (position + memory)[..., None] + torch.arange(keys)
    visible = ((row >= 0) & (row < problem.leaves["rel_key"].shape[-2]))[:, None].expand(-1, heads, -1, -1)
    if isinstance(mask, xk.RankMask):
        mask = mask.to_bool(None, position, memory)[:, None]
    return visible if mask is None else visible & mask, row


def unread(problem: Problem) -> dict[str, Tensor]:
    """By name of a leaf the rows (B, H, rows) that no pair reads, without H or B where the leaf has none."""
    visible, row = pairs(problem)
    unseen = ~visible.any(2)
    memory = unseen.shape[-1] - problem.leaves["key"].shape[2]
    found = {"key": unseen[..., memory:], "value": unseen[..., memory:]}
    if memory:
        found |= {"memory_key": unseen[..., :memory], "memory_value": unseen[..., :memory]}
    rel_key = problem.leaves["rel_key"]
    read = torch.zeros(*visible.shape[:2], rel_key.shape[-2], dtype=torch.bool)
    sequence, head, query, key = visible.nonzero(as_tuple=True)
    read[sequence, head, row[sequence, query, key]] = True
    return found | {"rel_key": ~(read if rel_key.dim() == 4 else read.any(0))}


def filled(problem: Problem, rows: dict[str, Tensor], *values: float) -> Problem:
    """The problem with the values, by turns, in each of the leaves' rows."""
    result = problem.map(torch.clone)
    for name, which in rows.items():
        numbers = torch.tensor(values, dtype=problem.dtype).repeat(result.leaves[name].shape[-1])
        result.leaves[name][which] = numbers[: result.leaves[name].shape[-1]]
    return result


# Values of unread rows
FILLS = ((math.nan,), (math.inf, -math.inf, math.nan), (0.0, math.inf, 1.0))


def assert_unread_rows_count_as_zeros(problem: Problem, backend: str, fills: tuple = FILLS) -> None:
    rows = unread(problem)
    assert any(which.any() for which in rows.values())
    wanted = filled(problem, rows, 0.0).results(backend)
    for values in fills:
        found = filled(problem, rows, *values).results(backend)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert name == "lse" or value.isfinite().all(), name
            assert torch.equal(found[name], value), (name, values)
    for name, which in rows.items():
        assert (wanted[f"grad {name}"][which] == 0).all(), name


def calls(backend: str) -> Iterator[tuple[str, int, torch.dtype]]:
    """(case, rows, dtype): all dtypes in few and some rows; on slow backends some rows, most cases in float32."""
    for case, rows, dtype in product(CASES, (FEW, SOME, MANY), DTYPES):
        if backend not in INTERPRETED or covers.EVERY_CASE:
            if rows != MANY or (case in ("padding", "memory", "window") and backend not in ("reference", *INTERPRETED)):
                yield case, rows, dtype
        elif rows == SOME and dtype in MODULES[backend].DTYPES:
            if case in ("padding", "memory") or dtype == torch.float32:
                yield case, rows, dtype


@pytest.mark.parametrize(
    "backend, call",
    [pytest.param(name, call, id="-".join(map(str, (name, *call)))) for name in READY for call in calls(name)],
)
def test_unread_rows_count_as_zeros(backend, call):
    case, rows, dtype = call
    in_fixed_order = dtype == torch.float32 or rows == MANY  # both ways to add gradients on GPUs
    problem = CASES[case](rows).to(dtype).with_options(deterministic=in_fixed_order)
    fills = FILLS
    if backend in INTERPRETED and not covers.EVERY_CASE:  # one of the three, each for several cases
        which = [*CASES].index(case) + DTYPES.index(dtype)
        fills = FILLS[which % 3 :][:1]
    assert_unread_rows_count_as_zeros(problem, backend, fills)


@pytest.mark.parametrize("backend", [name for name in READY if name not in INTERPRETED])
def test_sequences_that_share_rel_key_have_their_own_unread_keys(backend):
    """Short ones, which a thread takes one after the other, with one gradient of rel_key."""
    problem = make(60, 8, 16, width=16)
    hidden = torch.arange(16) >= 1 + torch.arange(60)[:, None] % 16
    assert_unread_rows_count_as_zeros(problem.with_options(mask=xk.RankMask.padding(hidden)), backend)


@pytest.mark.parametrize("rows", [FEW, SOME])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", READY)
def test_fully_masked_rows_are_zeros_beside_keys_that_others_see(backend, dtype, rows):
    """A key that some row sees is no zero, and yet nothing of it is in a row that sees no key at all."""
    mask = torch.ones(1, 1, rows, rows, dtype=torch.bool)
    mask[..., 1, :] = False
    problem = make(1, 1, rows, biases=False, segments=False).with_options(mask=mask).to(dtype)
    for name in ("key", "value"):
        problem.leaves[name][:, :, 0] = math.nan
    found = problem.results(backend, ("query",))
    for name in ("out", "grad query"):
        assert (found[name][0, 0, 1] == 0).all() and found[name][0, 0, 2].isnan().any(), name
