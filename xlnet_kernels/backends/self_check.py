"""Comparison of a backend with the reference on this machine, and the tolerance rule.

`python -m xlnet_kernels.info --check` compares every backend that is ready. first_calls.py compares before first calls.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .._precision import BF16, TF32, float32_precision
from .._torch import own_gradients
from ..call import Call, collect
from ..masks import LOWEST, RankMask
from ..two_streams import RowPositions
from . import reference

# Relative tolerance of float32 results by device and precision, else `allowances`' default. Products of TF32 have ten
# bits of fraction, of bfloat16 seven, of two such numbers sixteen; several follow one another.
RELATIVE = {("cuda", TF32): 1e-2, ("cpu", TF32): 2e-4, ("cpu", BF16): 8e-2}


@dataclass(frozen=True)
class Problem:
    """Description of one call with random inputs."""

    name: str
    dtype: torch.dtype
    head_dim: int = 64
    batch: int = 2
    heads: int = 2
    length: int = 70
    mem_len: int = 21
    mask: str | None = "order"  # "order", "causal", "padding", "dense" or None
    segments: bool = True
    biases: bool = True
    rows: int | None = None  # L; None: as many as positions
    positions: str | None = None  # of these rows, some of them repeated: "unsorted" or, as RowPositions, "sorted"
    is_causal: bool = False  # rel_key ends at distance 0
    window: tuple[int, int] | None = None  # rel_key has the distances from the first down to minus the second
    rel_batch: bool = False  # rel_key of each sequence
    dropout_p: float = 0.0
    deterministic: bool = False
    needs: frozenset[str] | None = None  # inputs with a gradient, none of which is of lse; None: all, and lse's too
    # Optional tensors of `Call` that are left out
    without: frozenset[str] = frozenset({"query_floor", "sees_self"})

    def leaves(self) -> dict[str, Tensor]:
        """The differentiable inputs by name, on the CPU, rounded to `dtype`."""
        generator = torch.Generator("cpu").manual_seed(0)
        H, D, M, K = self.heads, self.head_dim, self.mem_len, self.length
        shapes: dict[str, tuple[int, ...]] = {name: (self.batch, H, K, D) for name in ("key", "value")}
        shapes["query"] = (self.batch, H, self.rows or K, D)
        ahead = 0 if self.is_causal else K - 1
        left, right = self.window or (M + K, ahead)
        shapes["rel_key"] = (*[self.batch] * self.rel_batch, H, left + right + 1, D)
        if M:
            shapes |= {name: (self.batch, H, M, D) for name in ("memory_key", "memory_value")}
        if self.biases:
            shapes |= {name: (H, D) for name in ("content_bias", "position_bias")}
        if self.segments:
            shapes |= {"segment_embed": (2, H, D), "segment_bias": (H, D)}
        made = {name: torch.randn(shape, generator=generator, device="cpu") for name, shape in shapes.items()}
        # As projections lay them out: heads beside each other.
        by_row = [name for name, leaf in made.items() if leaf.dim() > 2 and name != "segment_embed"]
        made |= {name: made[name].transpose(-3, -2).contiguous().transpose(-3, -2) for name in by_row}
        return {name: leaf.to(self.dtype) for name, leaf in made.items() if name not in self.without}

    def call(self, leaves: dict[str, Tensor]) -> Call:
        """The call of `leaves`, on any device and of any dtype."""
        query = leaves["query"]
        generator = torch.Generator("cpu").manual_seed(1)
        batch, keys, rows = self.batch, self.mem_len + self.length, self.rows or self.length

        def integers(high: int, *shape: int) -> Tensor:
            return torch.randint(high, shape, generator=generator, device="cpu")

        place = torch.arange(self.length, device="cpu")
        positions = place.expand(batch, -1)
        if self.positions is not None:
            positions = torch.cat([positions, integers(self.length, batch, rows)], 1)[:, :rows].flip(1)
        positions = positions[:, :rows]
        mask: RankMask | Tensor | None = None
        if self.mask == "order":
            order = torch.rand(batch, self.length, generator=generator, device="cpu").argsort(1)
            mask = self._completed(RankMask.from_order(order, mem_len=self.mem_len)).rows(positions)
        elif self.mask == "causal":
            mask = RankMask.causal(batch, self.length, self.mem_len, device="cpu").rows(positions)
        elif self.mask == "padding":
            padding = place >= torch.tensor([[self.length // 2], [self.length]], device="cpu")
            mask = RankMask.padding(padding, self.mem_len).rows(positions)
        elif self.mask == "dense":
            mask = integers(3, batch, self.heads, rows, keys) > 0
        vectors: dict[str, Any] = {}
        if self.segments:
            vectors = {name: integers(3, batch, count) for name, count in (("query_ids", rows), ("key_ids", keys))}
        if self.dropout_p:
            vectors["dropout_state"] = torch.tensor([20261122, 7], device="cpu")
        vectors = {name: values.to(query.device) for name, values in vectors.items()}
        return collect(
            **(vectors | leaves),
            mask=None if mask is None else mask.to(query.device),
            query_positions=self._given(positions.to(query.device)),
            max_distance=self.window[0] if self.window else keys,
            dropout_p=self.dropout_p,
            scale=self.head_dim**-0.5,
            deterministic=self.deterministic,
            float32_precision=float32_precision(query.device.type),
        )

    def _given(self, positions: Tensor) -> Tensor | RowPositions | None:
        if self.positions is None:
            return None
        return RowPositions(positions) if self.positions == "sorted" else positions

    def _completed(self, mask: RankMask) -> RankMask:
        """An order's mask with a floor, and keys at the rows' own positions, unless these are left out."""
        floor = None
        if "query_floor" not in self.without:
            # None for every second row, because no row would see the memory.
            floor = mask.query_rank - self.length // 2
            floor[:, ::2] = LOWEST
        return RankMask(mask.query_rank, mask.key_rank, floor, "sees_self" not in self.without)

    def results(self, backend: ModuleType, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
        """out, lse and the gradients, in float64 on the CPU."""
        leaves = {name: leaf.to(device, dtype) for name, leaf in self.leaves().items()}
        needed = {
            name: leaf.requires_grad_() for name, leaf in leaves.items() if self.needs is None or name in self.needs
        }
        out, lse = backend.rel_attention(self.call(leaves))
        named = {"out": out, "lse": lse}
        generator = torch.Generator("cpu").manual_seed(2)
        if needed:
            results = (out, lse) if self.needs is None else (out,)
            grads = [torch.randn(result.shape, generator=generator, device="cpu").to(result) for result in results]
            gradients = own_gradients(results, [*needed.values()], grads)
            named |= {f"grad {name}": gradient for name, gradient in zip(needed, gradients, strict=True)}
        return {name: result.detach().to("cpu", torch.float64) for name, result in named.items()}


def problems() -> tuple[Problem, ...]:
    """Calls that together use every argument of the operator."""
    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    return (
        Problem("plain", float32, mask=None, mem_len=0, segments=False, biases=False),
        Problem("order", float32),
        Problem("order", bfloat16),
        Problem("order", float16),
        Problem("two streams", bfloat16, rows=81, positions="unsorted"),
        Problem("two streams", float32, rows=81, positions="unsorted", head_dim=40),
        Problem("causal", bfloat16, mask="causal", is_causal=True),
        Problem("padding, causal", float16, mask="padding", is_causal=True),
        Problem("dense mask", bfloat16, mask="dense"),
        Problem("dropout", float32, dropout_p=0.25),
        Problem("heads of 128", bfloat16, head_dim=128),
        Problem("window", float32, mask=None, window=(20, 8)),
        Problem("window", bfloat16, mask=None, window=(20, 8)),
        Problem("long memory", float32, mask=None, mem_len=190),
        Problem("long memory", bfloat16, mask="causal", mem_len=150, is_causal=True),
        Problem("one row", float32, length=1, mem_len=1, head_dim=16),
    )


def allowances(
    exact: dict[str, Tensor], baseline: dict[str, Tensor] | None, dtype: torch.dtype, relative: float | None = None
) -> dict[str, float]:
    """The largest allowed error of each result.

    In float32 and float64 it is a share of the result's largest element. In 16 bits it is twice (gradients: three
    times) the error of `baseline`, the reference in that dtype. In bfloat16 all elements may be wrong by 5 % then.

    Two rounding errors of the problem's largest quantities are always allowed, because some gradients cancel to zero.
    They are that of the results and that of the log-sum-exp, whose absolute error is the probabilities' relative error.
    """
    if relative is None:
        relative = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 0.0)
    work = torch.promote_types(dtype, torch.float32)
    size = max((largest(value) for name, value in exact.items() if name != "lse"), default=0.0)
    rounding = torch.finfo(dtype).eps + torch.finfo(work).eps * largest(exact["lse"])
    found = {}
    for name, value in exact.items():
        found[name] = relative * largest(value) + rounding * size
        if baseline is not None:
            found[name] += (3 if name.startswith("grad") else 2) * error(baseline[name], value)
    return found


def largest(values: Tensor) -> float:
    """The largest magnitude of the finite elements."""
    finite = values[values.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def error(found: Tensor, exact: Tensor) -> float:
    finite = exact.isfinite()
    return largest(found.double()[finite] - exact[finite])


def compare(backend: ModuleType, problem: Problem, device: str) -> list[str]:
    """Wrong results of a backend for a problem, one line each.

    Runs in a separate thread, to avoid the caller's gradient modes, autocast, hooks, default device and operator modes.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_compare, backend, problem, device).result()


def _compare(backend: ModuleType, problem: Problem, device: str) -> list[str]:
    exact = problem.results(reference, torch.float64)
    low = problem.dtype.itemsize == 2
    baseline = problem.results(reference, problem.dtype) if low else None
    found = problem.results(backend, problem.dtype, device)
    is_float32 = problem.dtype == torch.float32
    kind = torch.device(device).type
    relative = RELATIVE.get((kind, float32_precision(kind))) if is_float32 else None
    wrong = []
    for name, allowed in allowances(exact, baseline, problem.dtype, relative).items():
        if found[name].isnan().any() or not torch.equal(found[name].isinf(), exact[name].isinf()):
            wrong.append(f"{name} is not finite")
        elif (off := error(found[name], exact[name])) > allowed:
            wrong.append(f"{name} is off by {off:.2g}, allowed are {allowed:.2g}")
    return wrong
