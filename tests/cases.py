"""Random inputs for the operator, what it makes of them, and the rule by which a result counts as right."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from importlib import import_module
from unittest import mock

import pytest
import torch
from torch import Tensor

import xlnet_kernels as xk
from lib.simt import on_host
from xlnet_kernels import call_checks, dropout
from xlnet_kernels.backends import self_check

on_host.install()
READY = [name for name, state in xk.backends().items() if state.available]
MODULES = {name: import_module("xlnet_kernels.backends")._BACKENDS[name] for name in READY}
INTERPRETED = [name for name in READY if getattr(MODULES[name], "INTERPRETED", False)]  # asked for less: it is slow
if "XLNET_KERNELS_MACHINE" in os.environ:  # the others' tests are run elsewhere
    READY = [name for name in ("cuda", "triton") if name in READY]
    INTERPRETED += READY
# Backends for tests on CPU tensors: interpreted ones run in tests of the operator alone.
BACKENDS = [name for name in READY if name not in INTERPRETED and MODULES[name].DEVICE in (None, "cpu")]
COMPILED = [name for name in BACKENDS if name != "reference"]  # empty: pytest skips what is parametrised over it
GPU_BACKENDS = [name for name in READY if MODULES[name].DEVICE == "cuda"]  # best first
CPU = torch.device("cpu")
INT32 = (-(2**31), -1, 0, 1, 2**30, 2**31 - 1)
MASKS = (None, "order", "causal", "window", "padding", "ranks", "dense")


@dataclass
class Problem:
    """One call of the operator: differentiable inputs by name, and everything else."""

    leaves: dict[str, Tensor]
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    options: dict = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return self.leaves["query"].dtype

    def to(self, dtype: torch.dtype) -> Problem:
        """Equal numbers (rounded) as fresh leaves."""
        return self.map(lambda leaf: leaf.detach().to(dtype, copy=True))

    def map(self, change) -> Problem:
        return replace(self, leaves={name: change(leaf) for name, leaf in self.leaves.items()})

    def with_options(self, **options) -> Problem:
        return replace(self, options=self.options | options)

    def call(self, backend: str, **options):
        """The operator on these inputs, computed where the backend computes: (out, lse) on the CPU."""
        device = "cpu"
        if backend in MODULES:
            device = MODULES[backend].DEVICE or "cpu"
            if self.dtype not in (MODULES[backend].DTYPES or (self.dtype,)):
                pytest.skip(f"{backend} does not serve {self.dtype} here")
            most = MODULES[backend].max_head_dim(self.dtype)
            if most is not None and self.leaves["query"].shape[-1] > most:
                pytest.skip(f"{backend} serves head_dim up to {most}")
        return tuple(result.cpu() for result in self.run(backend, device, **options))

    def run(self, backend: str | None, device: str, **options):
        """The operator on these inputs: (out, lse) on `device`."""
        leaves = {name: leaf.to(device) for name, leaf in self.leaves.items()}
        memory = (leaves.pop("memory_key"), leaves.pop("memory_value")) if "memory_key" in leaves else None
        segments = None
        if "segment_embed" in leaves:
            embed, bias = leaves.pop("segment_embed"), leaves.pop("segment_bias", None)
            segments = xk.Segments(self.query_ids.to(device), self.key_ids.to(device), embed, bias)
        options = {"return_lse": True, **self.options, **options}
        options = {name: value.to(device) if hasattr(value, "to") else value for name, value in options.items()}
        return xk.rel_attention(**leaves, memory=memory, segments=segments, backend=backend, **options)

    def results(
        self,
        backend: str,
        needs: tuple[str, ...] | None = None,
        with_lse: bool = True,
        grad_dtype: torch.dtype | None = None,
    ) -> dict[str, Tensor]:
        """out, lse and, under "grad <name>", the gradient of every leaf (or of those in `needs`).

        All backends have one dropout mask of the problem.

        grad_dtype: what the gradient of `out` is rounded to, as it always is to the dtype of `out`.
        """
        needs = tuple(self.leaves) if needs is None else needs
        leaves = {n: leaf.detach().requires_grad_(n in needs) for n, leaf in self.leaves.items()}
        draw = dropout.new_state  # masks of their own would be as far apart as any results that are compared
        with torch.random.fork_rng([]), mock.patch.object(dropout, "new_state", lambda device: draw(CPU).to(device)):
            torch.random.default_generator.manual_seed(0)
            out, lse = replace(self, leaves=leaves).call(backend)
        found = {"out": out.detach(), "lse": lse.detach()}
        if needs:
            outputs = (out, lse) if with_lse else (out,)
            grads = [_normal(output.shape, seed).to(output.dtype) for seed, output in enumerate(outputs)]
            grads[0] = grads[0].to(grad_dtype or out.dtype).to(out.dtype)
            outputs, grads = zip(*((o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad), strict=True)
            gradients = torch.autograd.grad(outputs, [leaves[n] for n in needs], grads, allow_unused=True)
            found |= {f"grad {n}": g for n, g in zip(needs, gradients, strict=True) if g is not None}
        return found


def _normal(shape, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make(
    batch: int = 2,
    heads: int = 2,
    length: int = 7,
    keys: int | None = None,
    mem: int = 0,
    width: int = 16,
    *,
    mask: str | None = None,
    rel_rows: str = "bi",
    rel_batch: bool = False,
    biases: bool = True,
    segments: bool = True,
    positions: bool = False,
    extra_distance: int | None = None,
    window: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    """A random problem.

    Args:
        keys: K, default `length`.
        mask: one of MASKS.
        rel_rows: "bi", or "uni" for a rel_key that ends at distance 0.
        positions: random query positions, unsorted and with duplicates.
        extra_distance: max_distance - (M + K); None leaves the default.
        window: instead of the last two, (max_distance, P).
    """
    keys = length if keys is None else keys
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    far = max(0, mem + keys + (extra_distance or 0)) if window is None else window[0]
    rel_shape = (heads, window[1] if window else far + (keys if rel_rows == "bi" else 1), width)
    leaves = {
        "query": normal(batch, heads, length, width),
        "key": normal(batch, heads, keys, width),
        "value": normal(batch, heads, keys, width),
        "rel_key": normal(*((batch,) if rel_batch else ()), *rel_shape),
    }
    if mem:
        leaves |= {name: normal(batch, heads, mem, width) for name in ("memory_key", "memory_value")}
    if biases:
        leaves |= {name: normal(heads, width) for name in ("content_bias", "position_bias")}
    query_ids = key_ids = None
    if segments:
        leaves |= {"segment_embed": normal(2, heads, width), "segment_bias": normal(heads, width)}
        query_ids, key_ids = integers(3, batch, length), integers(3, batch, mem + keys)
    options = {}
    if extra_distance is not None or window is not None:
        options["max_distance"] = far
    rows = torch.arange(length).expand(batch, -1)
    if positions:
        rows = options["query_positions"] = integers(max(keys, 1), batch, length)
    if mask is not None:
        options["mask"] = make_mask(mask, rows, heads, keys, mem, generator)
    return Problem(leaves, query_ids, key_ids, options)


def make_mask(
    kind: str, rows: Tensor, heads: int, keys: int, mem: int, generator: torch.Generator
) -> xk.RankMask | Tensor:
    """A mask for query rows at positions `rows` (B, L)."""
    batch, length = rows.shape

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    if kind == "dense":
        mask = integers(3, batch, heads, length, mem + keys) > 0
        mask[:, :, :1] = False  # a fully masked row
        return mask
    if kind == "ranks":
        sees_self, floor = integers(2, batch, length) > 0, integers(3, batch, length)
        return xk.RankMask(integers(6, batch, length), integers(5, batch, mem + keys), floor, sees_self)
    if kind == "order":
        order = torch.rand(batch, keys, generator=generator).argsort(1).argsort(1)
        mask = xk.RankMask.from_order(order, integers(2, batch, keys) > 0, mem_len=mem)
    elif kind == "causal":
        mask = xk.RankMask.causal(batch, keys, mem)
    elif kind == "window":
        mask = xk.RankMask.causal(batch, keys, mem, window=max(1, keys // 4))
    elif kind == "padding":
        # the first sequence is nothing but padding
        padding = torch.arange(keys)[None] >= torch.arange(batch)[:, None] * max(1, keys // 2)
        mask = xk.RankMask.padding(padding, mem)
    else:
        raise ValueError(kind)
    return mask.rows(rows)


def assert_right(problem: Problem, backend: str | None, **how) -> None:
    """`backend` computes `problem` as accurately as it should, with gradients as `how` says (see Problem.results)."""
    exact = problem.to(torch.float64).results("reference", **how)
    assert_close(problem.results(backend, **how), exact, problem, **how)


def assert_close(found: dict[str, Tensor], exact: dict[str, Tensor], problem: Problem, **how) -> None:
    """Assert that results are as exact as their precision allows.

    float32 and float64: a fixed relative error. Low precision: at most twice (gradients: three times) the error that
    the reference makes in that precision. Errors are relative to the largest element; backends/self_check.py has the
    rule.
    """
    dtype = problem.dtype
    assert found.keys() == exact.keys()
    low = dtype in (torch.float16, torch.bfloat16)
    baseline = problem.results("reference", **how) if low else None
    allowances = self_check.allowances(exact, baseline, dtype)
    for name, value in exact.items():
        result = found[name]
        assert result.shape == value.shape, f"{name}: shape {tuple(result.shape)}, expected {tuple(value.shape)}"
        want = torch.promote_types(dtype, torch.float32) if name == "lse" else dtype
        assert result.dtype == want, f"{name}: {result.dtype}, expected {want}"
        assert not result.isnan().any(), f"{name}: NaN"
        assert torch.equal(result.isinf(), value.isinf()), f"{name}: infinite elsewhere"
        off, allowed = self_check.error(result, value), allowances[name]
        assert off <= allowed, f"{name}: error {off:.3g}, allowed {allowed:.3g}"


# Positions and rows, edited in place, that are not checked
NO_ORDERS = ("shuffled", "descending", "any position", "any row", "one row")


def run_without_order(problem: Problem, how: str, backend: str) -> None:
    """Forward and backward of rows whose RowPositions are none; what comes of it may be anything."""
    positions = xk.RowPositions(problem.options["query_positions"])
    anything = torch.tensor(INT32, dtype=torch.int32).repeat(positions.row.shape[1])[: positions.row.shape[1]]
    if how == "shuffled":
        positions.ascending.copy_(positions.ascending[:, torch.randperm(positions.ascending.shape[1])])
    elif how == "descending":
        positions.ascending.copy_(positions.ascending.flip(1))
    elif how == "any position":
        positions.ascending.copy_(anything)
    elif how == "any row":
        positions.row.copy_(anything)
    else:
        positions.row.fill_(1)
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in problem.leaves.items()}
    memory = (leaves.pop("memory_key"), leaves.pop("memory_value")) if "memory_key" in leaves else None
    segments = xk.Segments(problem.query_ids, problem.key_ids, leaves.pop("segment_embed"), leaves.pop("segment_bias"))
    options = problem.options | dict(query_positions=positions, memory=memory, segments=segments)
    with mock.patch.object(call_checks, "check_range", lambda *_: None):  # as on a GPU, where Python reads no values
        xk.rel_attention(**leaves, **options, backend=backend).sum().backward()


# In units of log 2, which are the kernels' own, of two keys in tiles of their own.
TWO_SCORES = [(8183, 8192), (8192, 8183), (-8192, -8183), (-8183, -8192), (-1e30, 0), (0, -1e30), (5, 14), (-300, 0)]


def assert_two_keys_have_their_weights(scores: tuple[float, float], backend: str, dtype: torch.dtype) -> None:
    """Forward and backward of rows that see two keys with these scores: weights of their very difference."""
    rows, width, seen = 150, 64, (3, 140)
    exact = torch.softmax(torch.tensor(scores, dtype=torch.float64) * math.log(2), 0)
    given = torch.tensor(scores, dtype=torch.float32)
    coarse = given.bfloat16().float()
    key = torch.zeros(1, 1, rows, width, dtype=dtype)
    key[..., seen, 0], key[..., seen, 1] = coarse.to(dtype), (given - coarse).to(dtype)
    query = torch.zeros_like(key)
    query[..., :2] = 1
    value = torch.zeros_like(key)
    value[..., seen, :] = torch.tensor([[512.0, -1.0] if scores[0] < scores[1] else [-1.0, 512.0]]).mT.to(dtype)
    mask = torch.zeros(rows, rows, dtype=torch.bool)
    mask[:, seen] = True
    rel_key = torch.zeros(1, 2 * rows, width, dtype=dtype)
    value.requires_grad_()
    out = xk.rel_attention(query, key, value, rel_key, mask=mask, scale=math.log(2), backend=backend)
    (grad,) = torch.autograd.grad(out, value, torch.ones_like(out))
    # of scores that are 9 apart nothing is left, and so no rounding: one weight is 512 times the other
    wanted = (exact @ value[0, 0, seen].double()).expand_as(out)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=512e-5 * exact.min().item() + 1e-10)
    tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(grad[0, 0, seen, 0].double(), rows * exact, rtol=tolerance, atol=1e-30)


# Numbers to add to ranks below 40, and factors: on both sides of float16's largest exact integer, and far beyond.
ANY_RANKS = [(0, 1), (31700, 1), (-31760, 1), (-(2**31), 2**26)]


def assert_ranks_of_any_size_are_right(plus: int, times: int, backend: str, dtype: torch.dtype) -> None:
    """Forward where ranks alone decide gives the very numbers that it gives with the mask they stand for."""
    problem = make(1, 1, 150, width=64, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    query_rank, key_rank = (torch.randint(40, (1, 150), generator=generator) * times + plus for _ in range(2))
    key_rank[:, 5], key_rank[:, 6] = -(2**31), 2**31 - 1
    visible = (key_rank[:, None] < query_rank[..., None])[:, None]
    by_rank = problem.with_options(mask=xk.RankMask(query_rank, key_rank)).run(backend, "cpu")
    for found, wanted in zip(by_rank, problem.with_options(mask=visible).run(backend, "cpu"), strict=True):
        assert torch.equal(found, wanted)
