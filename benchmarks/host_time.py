"""Host time of a GPU call: what Python and C++ do around the launches, with the launches themselves left out.

    python benchmarks/host_time.py --output benchmarks/results/host-time.json

Runs without a GPU. Tensors are on the CPU and small. Triton compiles for a GPU with compute capability 8.0, and a
launch ends where CUDA's driver would be called; the CUDA backend is compiled for the host (lib/simt), where a
launch ends before it begins. *Operator* is the implementation of xlnet_kernels::rel_attention_triton and of its
backward, or the operator xlnet_kernels::rel_attention; *call* is xk.rel_attention with autograd around it. Beside them
torch's scaled_dot_product_attention on the same query, key and value, which computes, and on one query, key and value
of 8 numbers, where next to nothing is computed. Time is that of the calling thread, the only one: other processes do
not count.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import xlnet_kernels as xk
from compiled.triton_report import Driver, serve_cpu
from lib.harness import environment, write_json
from xlnet_kernels import _extension, fast_path, ops
from xlnet_kernels.backends import cpu, cuda
from xlnet_kernels.backends import triton as backend
from xlnet_kernels.backends.triton import launch

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 32, 64
Operator = tuple[Callable[..., Any], Callable[..., Any]]  # forward and backward


def pretend_triton() -> Operator:
    """Triton compiles for a GPU, launches nothing, and serves tensors of the CPU."""
    driver = Driver(80)
    driver.launcher_cls = lambda source, metadata: lambda *arguments: None
    triton.runtime.driver.set_active(driver)
    torch.cuda.get_device_capability = lambda device=None: (8, 0)
    serve_cpu()
    return launch.forward, launch.backward


def pretend_cuda() -> Operator:
    """The CUDA backend launches nothing and serves tensors of the CPU, as which the CPU's backend does no longer."""
    from lib.simt import on_host

    library = on_host.library('-DXLNET_KERNELS_OPERATOR="rel_attention"')
    library.simt_skip_launches(1)
    cpu.DEVICE, cuda.DEVICE = "none", "cpu"
    fast_path._OF_DEVICE["cpu"] = ("cuda", cuda)
    library.simt_entries.restype = ctypes.c_void_p
    _extension.module.fast_path.__self__.use(library.simt_entries())
    cuda._unavailable, cuda._max_head_dim = lambda device: None, lambda dtype, device: 128
    torch.cuda.current_device = lambda: 0
    operators = torch.ops.xlnet_kernels
    return operators.rel_attention.default, operators.rel_attention_backward.default


PRETEND = {"triton": pretend_triton, "cuda": pretend_cuda}


def problem(full: bool) -> tuple[list[Tensor], dict]:
    """Arguments of xk.rel_attention; `full`: with biases, segments and a factorisation order."""

    def rows(count: int) -> Tensor:
        return torch.randn(BATCH, count, HEADS, HEAD_DIM, dtype=torch.bfloat16).transpose(1, 2)

    options: dict = {}
    tensors = [rows(LENGTH), rows(LENGTH), rows(LENGTH), rows(2 * LENGTH)[0].contiguous()]
    if full:
        content, position, bias = torch.randn(3, HEADS, HEAD_DIM, dtype=torch.bfloat16).requires_grad_()
        embed = torch.randn(2, HEADS, HEAD_DIM, dtype=torch.bfloat16).requires_grad_()
        ids = torch.arange(LENGTH, dtype=torch.int32).expand(BATCH, LENGTH).contiguous() // 20  # as models make them
        order = torch.stack([torch.randperm(LENGTH) for _ in range(BATCH)])
        mask = xk.RankMask.from_order(order, torch.zeros(BATCH, LENGTH, dtype=torch.bool))
        options = dict(content_bias=content, position_bias=position, mask=mask)
        options |= dict(segments=xk.Segments(ids, ids, embed, bias))
    return [tensor.requires_grad_() for tensor in tensors], options


def operator_inputs(name: str, tensors: list[Tensor], options: dict) -> tuple:
    """The arguments as inputs of the operator."""
    captured = []
    module = {"triton": backend, "cuda": cuda}[name]
    original = module.rel_attention

    def capture(call):
        captured.append(call)
        return original(call)

    module.rel_attention = capture
    try:  # a function mode: such calls go past the fast path, through the backend's module
        with torch.overrides.BaseTorchFunctionMode():
            xk.rel_attention(*tensors, backend=name, **options)
    finally:
        module.rel_attention = original
    return tuple(x.detach() if isinstance(x, Tensor) else x for x in captured[0])


def ways(name: str, operator: Operator, full: bool) -> dict[tuple[str, str], Callable[[], object]]:
    """(what, direction) -> what is timed."""
    forward, backward = operator
    tensors, options = problem(full)
    inputs = operator_inputs(name, tensors, options)
    out, lse, row_max, row_sum, residual = forward(*inputs, True)
    grad = torch.ones_like(out)
    needs = [tensor is not None for tensor in inputs[: ops.DIFFERENTIABLE]]
    saved = (grad, None, out, residual, row_max, row_sum, needs)
    leaves = [*tensors, *(x for x in _leaves(options) if x.requires_grad)]

    def call() -> Tensor:
        return xk.rel_attention(*tensors, backend=name, **options)

    return {
        ("operator", "forward"): lambda: forward(*inputs, True),
        ("operator", "backward"): lambda: backward(*saved, *inputs),
        ("call", "forward"): torch.no_grad()(call),
        ("call", "forward and backward"): lambda: torch.autograd.grad(call(), leaves, grad),
    }


def ways_of_torch() -> dict[tuple[str, str], Callable[[], object]]:
    """(what, direction) -> what is timed, of scaled_dot_product_attention."""
    found: dict[tuple[str, str], Callable[[], object]] = {}
    tiny = [torch.randn(1, 1, 1, 8, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    for what, tensors in (("sdpa", problem(False)[0][:3]), ("sdpa of one row", tiny)):
        grad = torch.ones_like(tensors[0])

        def call(tensors: list[Tensor] = tensors) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(*tensors)

        def both(call: Callable = call, tensors: list[Tensor] = tensors, grad: Tensor = grad) -> object:
            return torch.autograd.grad(call(), tensors, grad)

        found |= {(what, "forward"): torch.no_grad()(call), (what, "forward and backward"): both}
    return found


def _leaves(options: dict) -> list[Tensor]:
    segments = options.get("segments")
    found = [options.get("content_bias"), options.get("position_bias")]
    found += [] if segments is None else [segments.embed, segments.bias]
    return [tensor for tensor in found if tensor is not None]


def measure(functions: dict[tuple[str, str], Callable[[], object]], seconds: float) -> list[dict]:
    """Interleaved samples, each of 100 calls after 20 that are not timed: median and quartiles in microseconds."""
    samples: dict[tuple[str, str], list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(50):
            function()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, function in functions.items():
            for _ in range(20):
                function()
            start = time.thread_time()
            for _ in range(100):
                function()
            samples[name].append((time.thread_time() - start) / 100 * 1e6)
    rows = []
    for (what, direction), taken in samples.items():
        low, median, high = statistics.quantiles(taken, n=4)
        rows.append(
            {"what": what, "direction": direction, "median_us": round(median, 1), "low_us": round(low, 1),
             "high_us": round(high, 1), "samples": len(taken)}
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of measuring, for each problem and backend")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = environment("cpu") | {"triton": triton.__version__}
    facts.pop("peak_memory")
    rows = []

    def sample(name: str, case: str, functions: dict[tuple[str, str], Callable[[], object]]) -> None:
        for function in functions.values():  # compiles
            function()
        for row in measure(functions, options.seconds):
            rows.append({"backend": name, "problem": case, **row})
            print(*rows[-1].values(), sep="\t", flush=True)

    for name, pretend in PRETEND.items():
        operator = pretend()
        for case, full in (("plain", False), ("full", True)):
            sample(name, case, ways(name, operator, full))
    sample("torch", "plain", ways_of_torch())
    if options.output is not None:
        shape = {"batch": BATCH, "heads": HEADS, "length": LENGTH, "head_dim": HEAD_DIM, "dtype": "bfloat16"}
        write_json(options.output, {"benchmark": "host time", "environment": facts, "shape": shape, "rows": rows})


if __name__ == "__main__":
    main()
