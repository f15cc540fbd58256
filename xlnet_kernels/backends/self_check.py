"""Comparison of a backend with the reference on this machine, and the tolerance rule.

`python -m xlnet_kernels.info --check` compares every backend that is ready. On a GPU of a kind that no committed result
vouches for, the first call of a backend is preceded by one such comparison. XLNET_KERNELS_SELF_CHECK=0 leaves it out,
=1 makes it on every device.
"""

from __future__ import annotations

import functools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import _environment
from .._precision import allows_tf32, float32_precision
from .._torch import constant_for_compilers, transformed
from ..call import Call, collect
from ..masks import RankMask
from . import reference

# Compute capabilities on which a result under benchmarks/results/ shows the GPU tests to have passed, by backend.
VOUCHED: dict[str, frozenset[tuple[int, int]]] = {"cuda": frozenset(), "triton": frozenset()}

# Relative tolerance where TF32 is allowed: ten bits of fraction, over successive products
TF32 = 1e-2


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
    stacked: bool = False  # query rows of both streams, with repeated positions
    is_causal: bool = False  # rel_key ends at distance 0
    window: tuple[int, int] | None = None  # rel_key has the distances from the first down to minus the second
    dropout_p: float = 0.0
    options: dict = field(default_factory=dict)

    def leaves(self) -> dict[str, Tensor]:
        """The differentiable inputs by name, on the CPU, rounded to `dtype`."""
        generator = torch.Generator("cpu").manual_seed(0)
        H, D, M, K = self.heads, self.head_dim, self.mem_len, self.length
        shapes: dict[str, tuple[int, ...]] = {name: (self.batch, H, K, D) for name in ("key", "value")}
        shapes["query"] = (self.batch, H, self._rows(), D)
        ahead = 0 if self.is_causal else K - 1
        left, right = self.window or (M + K, ahead)
        shapes["rel_key"] = (H, left + right + 1, D)
        if M:
            shapes |= {name: (self.batch, H, M, D) for name in ("memory_key", "memory_value")}
        if self.biases:
            shapes |= {name: (H, D) for name in ("content_bias", "position_bias")}
        if self.segments:
            shapes |= {"segment_embed": (2, H, D), "segment_bias": (H, D)}
        return {
            name: torch.randn(shape, generator=generator, device="cpu").to(self.dtype) for name, shape in shapes.items()
        }

    def _rows(self) -> int:
        return self.length + self.length // 6 if self.stacked else self.length

    def call(self, leaves: dict[str, Tensor]) -> Call:
        """The call of `leaves`, on any device and of any dtype."""
        query = leaves["query"]
        generator = torch.Generator("cpu").manual_seed(1)
        batch, keys, rows = self.batch, self.mem_len + self.length, self._rows()

        def integers(high: int, *shape: int) -> Tensor:
            return torch.randint(high, shape, generator=generator, device="cpu")

        place = torch.arange(self.length, device="cpu")
        positions = place.expand(batch, -1)
        if self.stacked:
            positions = torch.cat([positions, integers(self.length, batch, rows - self.length)], 1)
        mask: RankMask | Tensor | None = None
        if self.mask == "order":
            order = torch.rand(batch, self.length, generator=generator, device="cpu").argsort(1)
            mask = RankMask.from_order(order, mem_len=self.mem_len).rows(positions)
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
        if self.stacked:
            vectors["query_positions"] = positions
        if self.dropout_p:
            vectors["dropout_state"] = torch.tensor([20261122, 7], device="cpu")
        vectors = {name: values.to(query.device) for name, values in vectors.items()}
        return collect(
            **(vectors | leaves),
            mask=None if mask is None else mask.to(query.device),
            max_distance=self.window[0] if self.window else keys,
            dropout_p=self.dropout_p,
            scale=self.head_dim**-0.5,
            deterministic=False,
            float32_precision=float32_precision(query.device.type),
        )

    def results(self, backend: ModuleType, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
        """out, lse and the gradient of every leaf, in float64 on the CPU."""
        leaves = {name: leaf.to(device, dtype).requires_grad_() for name, leaf in self.leaves().items()}
        out, lse = backend.rel_attention(self.call(leaves))
        generator = torch.Generator("cpu").manual_seed(2)
        grads = [torch.randn(result.shape, generator=generator, device="cpu").to(result) for result in (out, lse)]
        gradients = torch.autograd.grad((out, lse), [*leaves.values()], grads)
        named = {"out": out, "lse": lse} | {f"grad {n}": g for n, g in zip(leaves, gradients, strict=True)}
        return {name: result.detach().to("cpu", torch.float64) for name, result in named.items()}


def problems() -> tuple[Problem, ...]:
    """Calls that together use every argument of the operator."""
    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    return (
        Problem("plain", float32, mask=None, mem_len=0, segments=False, biases=False),
        Problem("order", float32),
        Problem("order", bfloat16),
        Problem("order", float16),
        Problem("two streams", bfloat16, stacked=True),
        Problem("two streams", float32, stacked=True, head_dim=40),
        Problem("causal", bfloat16, mask="causal", is_causal=True),
        Problem("padding, causal", float16, mask="padding", is_causal=True),
        Problem("dense mask", bfloat16, mask="dense"),
        Problem("dropout", float32, dropout_p=0.25),
        Problem("heads of 128", bfloat16, head_dim=128),
        Problem("window", float32, mask=None, window=(20, 8)),
        Problem("window", bfloat16, mask=None, window=(20, 8)),
        Problem("long memory", float32, mask=None, mem_len=150),
        Problem("long memory", bfloat16, mask="causal", mem_len=150, is_causal=True),
        Problem("one row", float32, length=1, mem_len=1, head_dim=16),
    )


def allowances(
    exact: dict[str, Tensor], baseline: dict[str, Tensor] | None, dtype: torch.dtype, relative: float | None = None
) -> dict[str, float]:
    """The largest allowed error of each result.

    In float32 and float64 it is a share of the result's largest element. In 16 bits it is twice (gradients: three
    times) the error of `baseline`, the reference in that dtype.

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
    tf32 = problem.dtype == torch.float32 and device.startswith("cuda") and allows_tf32()
    wrong = []
    for name, allowed in allowances(exact, baseline, problem.dtype, TF32 if tf32 else None).items():
        if found[name].isnan().any() or not torch.equal(found[name].isinf(), exact[name].isinf()):
            wrong.append(f"{name} is not finite")
        elif (off := error(found[name], exact[name])) > allowed:
            wrong.append(f"{name} is off by {off:.2g}, allowed are {allowed:.2g}")
    return wrong


_lock = threading.RLock()
# By device, because a machine may have GPUs of several kinds.
_checked: set[tuple[str, torch.device, torch.dtype, int]] = set()  # name, device, dtype, head_dim
_refusals: dict[tuple[str, torch.device, torch.dtype], str] = {}  # what was wrong with one head_dim


def check_once(name: str, backend: ModuleType, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Compare an unverified backend with the reference at its first call of the kind."""
    if not _is_asked_for(name, device):
        return
    key = (name, device, dtype, head_dim)
    if key in _checked:
        return
    if transformed() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    with _lock:
        if key not in _checked:
            try:
                reason = _look(name, backend, device, dtype, head_dim)
            except torch.OutOfMemoryError:
                return  # not a verdict on the backend; the next call repeats the check
            _checked.add(key)
            if reason is not None:
                _refusals[key[:3]] = reason


@constant_for_compilers
def refusal(name: str, device_type: str, dtype: torch.dtype, device: torch.device | None = None) -> str | None:
    """The failure found by `check_once`, or None; of any device of the type where `device` was not compared."""
    if not _refusals or _wish() == "0":
        return None
    if device is not None and any(key[:3] == (name, device, dtype) for key in _checked):
        return _refusals.get((name, device, dtype))
    found = (reason for key, reason in _refusals.items() if (key[0], key[1].type, key[2]) == (name, device_type, dtype))
    return next(found, None)


def _look(name: str, backend: ModuleType, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    try:
        wrong = compare(backend, Problem("first call", dtype, head_dim), str(device))
        if not wrong:
            return None
        reason = f"its results are wrong on this device: {'; '.join(wrong)}"
    # Every exception of a compiler or driver, because the next backend may work.
    except Exception as failure:
        if isinstance(failure, torch.OutOfMemoryError) or "is out of memory" in str(failure):
            raise torch.OutOfMemoryError(str(failure)) from failure
        reason = f"it could not be compared with the reference on this device: {type(failure).__name__}: {failure}"
    reason += ". XLNET_KERNELS_SELF_CHECK=0 uses it anyway"
    warnings.warn(f'xlnet_kernels: backend "{name}" is not used, as {reason}', RuntimeWarning, stacklevel=2)
    return reason


def _is_asked_for(name: str, device: torch.device) -> bool:
    wish = _wish()
    if name == "reference" or wish == "0":
        return False
    return wish == "1" or (device.type == "cuda" and not _is_vouched_for(name, device))


# Cached, because reading the environment takes a tenth of a small call's time.
@functools.cache
def _wish() -> str:
    return _environment.read("XLNET_KERNELS_SELF_CHECK", ("0", "1").__contains__)


@functools.cache
def _is_vouched_for(name: str, device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) in VOUCHED.get(name, ())
