"""Sequence parallelism over gloo: outputs and gradients of two and three processes are those of one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import xlnet_kernels as xk
from tests.processes import run_in_processes
from xlnet_kernels.distributed.ring_attention import ring_attention

B, H, N, D = 2, 2, 5, 4  # N keys in each process


def problem(case: str, size: int) -> tuple[dict, dict]:
    """Tensors of the whole sequence by name, differentiable ones and others."""
    torch.manual_seed(1)
    whole = size * N
    length = 2 * whole if case == "two streams" else whole

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    leaves = {name: rand(B, H, whole, D) for name in ("key", "value")} | {"query": rand(B, H, length, D)}
    leaves["rel_key"] = rand(H, whole + 1 if case == "one way" else 2 * whole, D)
    leaves |= {"content_bias": rand(H, D), "position_bias": rand(H, D)}
    other: dict = {}
    order = torch.stack([torch.randperm(whole) for _ in range(B)])
    if case == "causal":
        other["mask"] = xk.RankMask.causal(B, whole)
    elif case == "window":
        other["mask"] = xk.RankMask.causal(B, whole, window=4)
    elif case == "order":  # the first of the order sees nothing at all
        other["mask"] = xk.RankMask.from_order(order, padding=torch.arange(whole).expand(B, -1) == 2)
    elif case == "segments":
        ids = torch.arange(whole).expand(B, -1) // 4
        leaves |= {"embed": rand(2, H, D), "bias": rand(H, D)}
        other["ids"] = ids
    elif case == "two streams":
        # content and query rows of each process side by side, as each of them stacks its own
        places = torch.arange(whole).view(size, 1, N).expand(-1, 2, -1).flatten().expand(B, -1)
        content = (torch.arange(length) // N % 2 == 0).expand(B, -1)
        rank = order.gather(1, places)
        other["mask"] = xk.RankMask(rank, order, sees_self=content)
        other["positions"] = places
    return leaves, other


def attend(function, leaves: dict, other: dict, **options):
    leaves = dict(leaves)
    if "ids" in other:
        ids = other["ids"]
        options["segments"] = xk.Segments(ids, ids, leaves.pop("embed"), leaves.pop("bias"))
    if "positions" in other:
        options["query_positions"] = other["positions"]
    return function(**leaves, mask=other.get("mask"), return_lse=True, **options)


def chunk_of(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    return tensor.chunk(size, dim)[rank]


def share(leaves: dict, other: dict, rank: int, size: int) -> tuple[dict, dict]:
    """The part of one process."""
    own = {n: chunk_of(x, 2, rank, size) if n in ("query", "key", "value") else x for n, x in leaves.items()}
    rest = {n: chunk_of(x, 1, rank, size) for n, x in other.items() if isinstance(x, torch.Tensor)}
    if "positions" in rest:
        rest["positions"] = rest["positions"] - rank * N
    mask = other.get("mask")
    if mask is not None:
        parts = [
            x if x is None else chunk_of(x, 1, rank, size) for x in (mask.query_rank, mask.key_rank, mask.query_floor)
        ]
        sees = mask.sees_self
        rest["mask"] = xk.RankMask(*parts, sees if isinstance(sees, bool) else chunk_of(sees, 1, rank, size))
    return own, rest


def gradients(found: tuple, leaves: dict, weights: tuple) -> dict:
    out, lse = found
    loss = (out * weights[0]).sum() + (lse.masked_fill(lse.isinf(), 0.0) * weights[1]).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


CASES = ("plain", "one way", "causal", "window", "order", "segments", "two streams")


def compare(rank: int, size: int) -> None:
    """Run by every process."""
    for case in CASES:
        leaves, other = problem(case, size)
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        wanted = attend(xk.rel_attention, leaves, other)
        weights = tuple(torch.randn_like(x) for x in wanted)
        whole = gradients(wanted, leaves, weights)

        own, rest = share(leaves, other, rank, size)
        own = {name: x.detach().requires_grad_() for name, x in own.items()}
        found = attend(ring_attention, own, rest)
        for one, all_ in zip(found, wanted, strict=True):
            torch.testing.assert_close(
                one, chunk_of(all_, 2, rank, size), rtol=1e-10, atol=1e-12, msg=f"{case}: output"
            )
        parts = gradients(found, own, tuple(chunk_of(x, 2, rank, size) for x in weights))
        for name, gradient in parts.items():
            if name in ("query", "key", "value"):
                expected = chunk_of(whole[name], 2, rank, size)
            else:
                expected = whole[name]
                dist.all_reduce(gradient)
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-11, msg=f"{case}: gradient of {name}")
    try:
        ring_attention(*(torch.randn(1, 1, 3 + rank, 2) for _ in range(3)), torch.randn(1, 4, 2))
    except ValueError as error:
        assert "as many rows in all processes" in str(error)
    else:
        raise AssertionError("chunks of different lengths were taken")


@pytest.mark.parametrize("size", [2, 3])
def test_processes_in_a_ring_are_one(tmp_path, size):
    run_in_processes("from tests.operator import test_ring as t; t.compare(rank, size)", size, tmp_path)


def test_one_process_alone_is_the_operator():
    leaves, other = problem("segments", 2)
    for one, wanted in zip(attend(ring_attention, leaves, other), attend(xk.rel_attention, leaves, other), strict=True):
        assert torch.equal(one, wanted)


def test_frozen_inputs_have_no_gradients(monkeypatch):
    """Only keys and values, which travel, have them in any case."""
    query, key, value = (torch.randn(1, 2, 5, 8, dtype=torch.float64) for _ in range(3))
    rel_key, bias = torch.randn(2, 10, 8, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    bias.requires_grad_()
    wanted = torch.autograd.grad(xk.rel_attention(query, key, value, rel_key, content_bias=bias).sin().sum(), bias)
    asked, grad = [], torch.autograd.grad

    def spy(outputs, inputs, *rest, **options):
        asked.append([tuple(x.shape) for x in inputs])
        return grad(outputs, inputs, *rest, **options)

    out = ring_attention(query, key, value, rel_key, content_bias=bias)
    monkeypatch.setattr(torch.autograd, "grad", spy)
    out.sin().sum().backward()
    assert asked == [[(1, 2, 5, 8), (1, 2, 5, 8), (2, 8)]]
    torch.testing.assert_close(bias.grad, wanted[0])


def test_what_backward_needs_is_the_own_chunk_alone():
    """A sequence half as long keeps half as many numbers, for any number of processes."""
    saved: list[torch.Tensor] = []

    def kept(length: int) -> int:
        saved.clear()
        tensors = [torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3)]
        table = torch.randn(1, 2 * length, 4)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            ring_attention(*tensors, table)
        return sum(x.numel() for x in saved) - table.numel()

    # query, key, value and output, and the log-sum-exp
    assert kept(16) == 2 * kept(8) == 4 * 16 * 4 + 16


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(key=torch.zeros(1, 5, 4)), r"key and value must be \(B, H, n, D\)"),
        (dict(rel_key=torch.zeros(2, 9, 4)), r"rel_key must have 2 W n = 10 rows, or W n \+ 1 = 6 .* got \(2, 9, 4\)"),
        (dict(mask=torch.ones(1, 2, 5, 5, dtype=torch.bool)), "mask must be a RankMask or None"),
        (dict(mask=xk.RankMask.full(1, 5, 1)), r"mask.key_rank must have shape \(1, n = 5\), got \(1, 6\)"),
        (dict(query=torch.zeros(1, 2, 5, 3)), "key must have shape"),
    ],
)
def test_bad_input_is_named(change, words):
    given = {name: torch.zeros(1, 2, 5, 4) for name in ("query", "key", "value")} | {"rel_key": torch.zeros(2, 10, 4)}
    with pytest.raises(ValueError, match=words):
        ring_attention(**(given | change))
