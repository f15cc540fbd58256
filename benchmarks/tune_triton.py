"""Measures configurations of the Triton kernels on a GPU and prints the entries of the table that were fastest.

    python benchmarks/tune_triton.py --head-dims 64 128 --dtype bfloat16 --lengths 512 2048 --output entries.txt

Nothing else searches: the kernels take what xlnet_kernels/backends/triton/tuning.py says. What is written has its form;
`--entries FILE` of an earlier run starts from there. First all candidates of a head width are compiled, by as many
processes as there are cores and memory for; then they are launched alone. What is not compiled in time, does not
compile or gives wrong results is out. `--budget`: seconds for one head width, of which compiling may take 60 %.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import triton

from lib import compiling
from lib.compiling import attend
from lib.problem import Case, Problem, build_problem
from xlnet_kernels.backends.triton import launch_cache, tuning
from xlnet_kernels.backends.triton.tuning import KERNELS, Config

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}  # of the largest value of each result
# After these errors a process cannot use the GPU, and every later candidate would fail as well.
LOST = ("illegal memory access", "misaligned address", "illegal instruction", "unspecified launch failure")
COMPILING = 0.6  # of a budget
HEADER = "# (GPU class, kind of products, head_dim up to): forward, rows, keys\n"


def candidates(kind: str, head_dim: int) -> list[Config]:
    """Candidates to measure: tiles that the kernels support and whose operands fit into registers."""
    shapes = [(32, 32), (64, 32), (64, 64)] if kind == "float32" else [(32, 32), (64, 32), (64, 64), (128, 64)]
    found = []
    for (BLOCK_M, BLOCK_N), warps, stages, keep in itertools.product(shapes, (4, 8), (1, 2, 3), (True, False)):
        if keep and head_dim > (64 if kind == "float32" else 128):
            continue  # spills thousands of words
        if kind == "16-bit" and BLOCK_M * BLOCK_N >= 64 * 64 and not keep and head_dim > 128:
            continue
        for BLOCK_D in (64, 128) if keep else (32, 64):
            BLOCK_D = min(BLOCK_D, max(16, 1 << (head_dim - 1).bit_length()))
            found.append(Config(BLOCK_M, BLOCK_N, BLOCK_D, keep, warps, stages))
    # Four warps a block. 168 registers a thread: three blocks fit on a multiprocessor, with spills. 255: two blocks,
    # where ptxas may give a thread 168 and spill.
    whole = [config for config in found if config.KEEP and config[:2] == (64, 64) and config.num_warps == 4]
    for most in (168, 255) if kind == "16-bit" else ():
        found += [config._replace(max_registers=most) for config in whole if config.num_stages <= 2]
    return list(dict.fromkeys(found))


def tune(
    entries: dict,
    key: tuple[int, str, int],
    measure: Callable[[str, tuple[Config, ...]], float],
    log: Callable[[str], None] = lambda line: None,
    among: set[compiling.Candidate] | None = None,
    until: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> dict:
    """`entries` with the fastest configurations for `key`.

    `measure(kernel, configs)` gives the milliseconds of what the kernel is part of, a forward or a backward pass, with
    these three configurations; it raises what stands against them, and then the candidate is out. `among`: candidates
    that may be taken beside those of `entries`; default all. At the time `until` nothing more is measured: each kernel
    has an equal share of what is left, and what `entries` has is measured first.

    Raises:
        RuntimeError: no candidate works, or one of them has cost this process the GPU.
    """
    best = [Config(*config) for config in entries[key]]
    for index, kernel in enumerate(KERNELS):
        times: dict[Config, float] = {}
        end = clock() + (until - clock()) / (len(KERNELS) - index)
        allowed = [config for config in candidates(*key[1:]) if among is None or (kernel, config) in among]
        todo = list(dict.fromkeys([best[index], *allowed]))
        for number, config in enumerate(todo):
            if times and clock() >= end:
                log(f"{key} {kernel}: time is up, {len(todo) - number} candidates are not measured")
                break
            configs = (*best[:index], config, *best[index + 1 :])
            try:
                times[config] = measure(kernel, configs)
            except Exception as error:  # out of registers or shared memory, wrong results: whatever it is, it is out
                if any(text in str(error) for text in LOST):
                    raise RuntimeError(f"{key} {kernel} {tuple(config)} has cost this process the GPU") from error
                log(f"{key} {kernel} {tuple(config)}: {type(error).__name__}: {str(error).splitlines()[:1]}")
                continue
            log(f"{key} {kernel} {tuple(config)}: {times[config]:.4f} ms")
        if not times:
            raise RuntimeError(f"no configuration of the {kernel} kernel works for {key}")
        best[index] = min(times, key=lambda config: times[config])
    return entries | {key: tuple(best)}


def write(entries: dict, by: str) -> str:
    """As tuning.TABLE is written; `by`: how they were chosen."""
    lines = [f"    {key!r}: ({', '.join(str(tuple(config)) for config in entries[key])})," for key in sorted(entries)]
    return HEADER + "{\n" + "".join(f"    # {by}\n{line}\n" for line in lines) + "}\n"


def read(text: str) -> dict:
    entries = ast.literal_eval(text)
    return {key: tuple(Config(*config) for config in configs) for key, configs in entries.items()}


class OnGPU:
    """`measure` for `tune`: results on `checked` against the reference first, then the geometric mean of medians.

    The kernel of keys is measured in deterministic calls, because in others it only rounds sums.
    """

    def __init__(self, key: tuple, checked: Problem, problems: list[Problem], bench: Callable | None = None) -> None:
        self.key, self.checked, self.problems = key, checked, problems
        self.exact = self._results(checked.double(), "reference")
        self.bench = bench

    def __call__(self, kernel: str, configs: tuple[Config, ...]) -> float:
        from triton.testing import do_bench

        from xlnet_kernels.backends.triton import launch_cache

        tuning.TABLE[self.key] = configs
        launch_cache.plans.clear()  # they hold what was there before
        self._compare(self._results(self.checked, "triton", kernel == "keys"), self.exact, self.checked.query.dtype)
        times = []
        for problem in self.problems:
            inputs = [getattr(problem, name).requires_grad_() for name in Problem.INPUTS]
            with torch.set_grad_enabled(kernel != "forward"):
                out = attend(problem, "triton", deterministic=kernel == "keys")

            def forward(p=problem):
                with torch.no_grad():
                    return attend(p, "triton")

            def backward(p=problem, out=out, inputs=inputs):
                return torch.autograd.grad(out, inputs, p.grad_out, retain_graph=True)

            call = forward if kernel == "forward" else backward
            times.append((self.bench or do_bench)(call, return_mode="median"))
        return statistics.geometric_mean(times)

    def _results(self, p: Problem, backend: str, deterministic: bool = False) -> list[torch.Tensor]:
        inputs = [getattr(p, name).requires_grad_() for name in Problem.INPUTS]
        out = attend(p, backend, deterministic)
        return [out.detach(), *torch.autograd.grad(out, inputs, p.grad_out)]

    @staticmethod
    def _compare(found: list[torch.Tensor], exact: list[torch.Tensor], dtype: torch.dtype) -> None:
        for name, one, other in zip(("out", *Problem.INPUTS), found, exact, strict=True):
            if one.numel() == 0:
                continue
            error = (one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1e-9)
            if not error <= TOLERANCE[dtype]:
                raise ValueError(f"{name} is off by {error:.1e} of its largest value")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--tokens", type=int, default=16384, help="batch times length")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--entries", type=Path, help="start from what an earlier run wrote")
    parser.add_argument("--budget", type=float, default=600, help="seconds for a head width")
    parser.add_argument(
        "--processes", type=int, help="that compile; default as many as cores, each with 2 GB of memory"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("tune_triton.py needs a CUDA GPU, this machine has none", file=sys.stderr)
        return 1
    if options.entries:
        tuning.TABLE.update(read(options.entries.read_text()))
    capability, dtype, found = torch.cuda.get_device_capability(), getattr(torch, options.dtype), {}
    gpu_class, kind = tuning.gpu_class(capability), tuning.kind_of(dtype, launch_cache.precision_of(dtype, 0.0))
    by = f"measured: {torch.cuda.get_device_name()}, Triton {triton.__version__}"

    def log(line: str) -> None:
        print(line, flush=True)

    for head_dim in options.head_dims:
        until = time.monotonic() + options.budget
        key = (gpu_class, kind, head_dim)
        start = {key: tuple(tuning.choose(kernel, kind, head_dim, capability) for kernel in KERNELS)}
        case = Case(min(options.lengths), 1, 2, head_dim, 0, dtype, "cuda")
        cases = [
            replace(case, length=length, batch=max(1, options.tokens // length), heads=options.heads)
            for length in options.lengths
        ]
        # Batches change no types; what a kernel is compiled for follows from strides.
        called = [(replace(case, device="cpu"), True), *((replace(c, device="cpu", batch=1), False) for c in cases)]
        jobs = compiling.in_turn({kernel: candidates(kind, head_dim) for kernel in KERNELS})
        architecture = 10 * capability[0] + capability[1]
        among = compiling.compile_all(
            architecture, key, called, jobs, COMPILING * options.budget, options.processes, log
        )
        measure = OnGPU(key, build_problem(case, two_streams=True), [build_problem(c) for c in cases])
        found |= tune(start, key, measure, log, among, until)
        tuning.TABLE.update(found)  # what was measured last is not what was best
        if options.output:  # what is known so far stays when the run is stopped
            options.output.write_text(write(found, by))
    print(write(found, by))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
