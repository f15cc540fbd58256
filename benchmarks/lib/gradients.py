"""Gradients that sum over many rows, against float64 on the same rounded inputs, and what their exactness costs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import xlnet_kernels as xk
from xlnet_kernels import fast_path, ops
from xlnet_kernels.call import INPUT_NAMES

from .harness import summary
from .precision import DELTAS, OWN, ROUNDED, SDPA

SHARPNESS = {"flat": 0.0625, "moderate": 1.0, "sharp": 16.0}  # of the query rows and of the biases added to them
# rows, offset of values, of keys, of rel_key, of the output's gradient
CASES = {
    "sharp, values 4": ("sharp", 4.0, 0.0, 0.0, 0.0),
    "sharp, values 4, keys 1, output gradient 1": ("sharp", 4.0, 1.0, 0.0, 1.0),
    "moderate, 1, 0.5, 0.3": ("moderate", 1.0, 0.5, 0.0, 0.3),
    "flat, values 4, keys 1, output gradient 1": ("flat", 4.0, 1.0, 0.0, 1.0),
    "flat, the same, rel_key 0.5": ("flat", 4.0, 1.0, 0.5, 1.0),
}


@contextmanager
def delta_of(name: str) -> Iterator[None]:
    """Backward's delta as the implementation of that name has it, past the fast path because Python decides it."""
    without_residual = mock.patch.object(ops, "_needs_backward", lambda inputs: False)
    with mock.patch.object(fast_path, "attend", lambda *_: None):
        with without_residual if name == ROUNDED else nullcontext():
            yield


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Relative error of the whole tensor, in the 2-norm, three digits."""
    return float(f"{((found.double() - exact).norm() / exact.norm()).item():.3g}")


def make_leaves(case: str, heads: int, length: int, head_dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs of a causal call with the offsets of the case, and `grad_out`: the same for every dtype, rounded."""
    rows, value, key, rel_key, grad_out = CASES[case]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0, offset: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale + offset).to(dtype)

    return {
        "query": normal(1, heads, length, head_dim, scale=SHARPNESS[rows]),
        "key": normal(1, heads, length, head_dim, offset=key),
        "value": normal(1, heads, length, head_dim, offset=value),
        "rel_key": normal(heads, 2 * length, head_dim, offset=rel_key),
        "content_bias": normal(heads, head_dim, scale=SHARPNESS[rows]),
        "position_bias": normal(heads, head_dim, scale=SHARPNESS[rows]),
        "grad_out": normal(1, heads, length, head_dim, offset=grad_out),
    }


def operator_gradients(leaves: dict[str, Tensor], dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """Gradients of all inputs of `rel_attention`, computed in `dtype`."""
    given = {name: leaf.to(dtype).requires_grad_(name != "grad_out") for name, leaf in leaves.items()}
    grad_out = given.pop("grad_out")
    out = xk.rel_attention(**given, mask=xk.RankMask.causal(1, grad_out.shape[2]), backend=backend)
    return dict(zip(given, torch.autograd.grad(out, [*given.values()], grad_out), strict=True))


def sdpa_gradients(leaves: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of torch's attention without positions; content_bias is in the query, and its leaf is zeros."""
    query = leaves["query"] + leaves["content_bias"][:, None]
    given = {"content_bias": torch.zeros_like(query[:1, :, :1]), "query": query}
    given |= {name: leaves[name] for name in ("key", "value")}
    given = {name: leaf.to(dtype).requires_grad_() for name, leaf in given.items()}
    bias, query, key, value = given.values()
    out = F.scaled_dot_product_attention(query + bias, key, value, is_causal=True)
    return dict(zip(given, torch.autograd.grad(out, [*given.values()], leaves["grad_out"].to(dtype)), strict=True))


def measure_errors(dtypes: list[str], lengths: list[int], heads: int, head_dim: int, backend: str) -> Iterator[dict]:
    """A row for each dtype, case, length and implementation."""
    for dtype in (getattr(torch, name) for name in dtypes):
        for case in CASES:
            for length in lengths:
                leaves = make_leaves(case, heads, length, head_dim, dtype)
                exact = operator_gradients(leaves, torch.float64, "reference")
                found = {}
                for name in DELTAS:
                    with delta_of(name):
                        found[name] = (operator_gradients(leaves, dtype, backend), exact)
                found[SDPA] = (sdpa_gradients(leaves, dtype), sdpa_gradients(leaves, torch.float64))
                for name, (gradients, wanted) in found.items():
                    errors = {leaf: relative_error(gradient, wanted[leaf]) for leaf, gradient in gradients.items()}
                    row = {"section": "errors", "dtype": str(dtype).removeprefix("torch."), "case": case}
                    yield row | {"length": length, "implementation": name, "errors": errors}


def measure_cost(
    dtype: str, lengths: list[int], heads: int, head_dim: int, backend: str, rounds: int
) -> Iterator[dict]:
    """Processor time of forward and of both passes, and bytes that wait for backward; a row for each."""
    for length in lengths:
        leaves = make_leaves("moderate, 1, 0.5, 0.3", heads, length, head_dim, getattr(torch, dtype))
        grad_out = leaves.pop("grad_out")
        mask = xk.RankMask.causal(1, length)
        for leaf in leaves.values():
            leaf.requires_grad_()

        def forward(name: str, leaves=leaves, mask=mask) -> Tensor:
            with delta_of(name):
                return xk.rel_attention(**leaves, mask=mask, backend=backend)

        def both(name: str, leaves=leaves, grad_out=grad_out, forward=forward) -> None:
            torch.autograd.grad(forward(name), [*leaves.values()], grad_out)

        for direction, call in (("forward", forward), ("backward", both)):
            samples = _alternated({name: functools.partial(call, name) for name in DELTAS}, rounds)
            for name in DELTAS:
                row = {"section": "cost", "dtype": dtype, "length": length, "heads": heads, "direction": direction}
                sizes = {"out_bytes": grad_out.nbytes, "saved_bytes": _saved_bytes(forward, name)}
                yield row | {"implementation": name} | sizes | summary(samples[name])


def _alternated(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds, which other programs disturb least; the first of a round is last in the next."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for count in range(rounds + 1):
        for name in list(calls)[:: 1 if count % 2 else -1]:
            begin = time.process_time()
            calls[name]()
            if count:  # the first round warms up
                samples[name].append(time.process_time() - begin)
    return samples


def _saved_bytes(forward: Callable[[str], Tensor], name: str) -> int:
    """Bytes that autograd keeps between the passes, inputs included."""
    sizes = []
    with saved_tensors_hooks(lambda tensor: sizes.append(tensor.nbytes) or tensor, lambda tensor: tensor):
        forward(name)
    return sum(sizes)


class Recorder(TorchDispatchMode):
    """Keeps the arguments of every backward pass of the operator that runs inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.xlnet_kernels.rel_attention_backward.default:
            self.calls.append(args)
        return function(*args, **(kwargs or {}))

    def position_bias_errors(self) -> dict[str, list[float]]:
        """For each call, that of the position bias with either delta, against float64 on the call's own inputs."""
        forward, backward = (getattr(torch.ops.xlnet_kernels, f"rel_attention{end}") for end in ("", "_backward"))
        place, found = INPUT_NAMES.index("position_bias"), {name: [] for name in DELTAS}
        for grad_out, grad_lse, out, out_residual, row_max, row_sum, needs, *inputs in self.calls:
            wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
            exact_out, _, exact_max, exact_sum, none = forward(*wide, True)
            state = (exact_out, none, exact_max, exact_sum, needs)
            exact = backward(grad_out.double(), grad_lse if grad_lse is None else grad_lse.double(), *state, *wide)
            for name, residual in ((ROUNDED, out_residual.new_empty(0)), (OWN, out_residual)):
                state = (out, residual, row_max, row_sum, needs)
                gradients = backward(grad_out, grad_lse, *state, *inputs)
                found[name].append(relative_error(gradients[place], exact[place]))
        return found
