"""Compiles candidates of tune_triton.py in several processes, into Triton's cache on disk; no GPU is needed.

The process that measures takes them from there: what it launches was compiled for the same GPU, options and types.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterable

import torch

import xlnet_kernels as xk
from xlnet_kernels.backends.triton.tuning import KERNELS, Config

from .problem import Case, Problem, build_problem

NEEDS = 2 * 2**30  # bytes of a process that compiles, ptxas included
Candidate = tuple[str, Config]  # kernel, tiles
_state: dict = {}  # of a process that compiles


def attend(p: Problem, backend: str, deterministic: bool = False) -> torch.Tensor:
    """The operator on everything that a problem has."""
    return xk.rel_attention(
        p.query, p.key, p.value, p.rel_key, content_bias=p.content_bias, position_bias=p.position_bias,
        segments=p.segments(p.segment_embed, p.segment_bias), memory=(p.memory_key, p.memory_value), mask=p.mask,
        query_positions=p.query_positions, deterministic=deterministic, backend=backend,
    )  # fmt: skip


def processes() -> int:
    """As many as there are cores to use and memory for."""
    cores = len(os.sched_getaffinity(0))
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    return max(1, min(cores, available // NEEDS))


def compile_all(
    architecture: int, key: tuple[int, str, int], cases: list[tuple[Case, bool]], jobs: Iterable[Candidate],
    seconds: float, count: int | None = None, log: Callable[[str], None] = lambda line: None,
) -> set[Candidate]:  # fmt: skip
    """Which of `jobs` have been compiled within `seconds`; a process that is at work then is ended.

    Args:
        architecture: 90 for compute capability 9.0.
        key: the entry of tuning.TABLE that the candidates are for.
        cases: what they will be called with, and whether for both streams.
        count: processes; default processes().
    """
    jobs, done, most, start = list(jobs), set(), 0, time.monotonic()
    context = multiprocessing.get_context("spawn")  # Triton's driver here is for good: a process of its own
    with context.Pool(count or processes(), _start, (architecture, key, cases)) as pool:
        results = pool.imap_unordered(_compile, jobs)
        for _ in jobs:
            try:
                job, error, peak = results.next(timeout=max(0.0, start + seconds - time.monotonic()))
            except multiprocessing.TimeoutError:
                break
            most = max(most, peak)
            if error is None:
                done.add(job)
            else:
                log(f"{key} {job[0]} {tuple(job[1])} does not compile: {error}")
    log(
        f"{key} {len(done)} of {len(jobs)} compiled in {time.monotonic() - start:.0f} s, largest process "
        f"{most / 2**20:.0f} MB"
    )
    return done


def in_turn(candidates: dict[str, list[Config]]) -> list[Candidate]:
    """One of each kernel after the other, so that too little time cuts all of them."""
    turns = itertools.zip_longest(*([(kernel, config) for config in configs] for kernel, configs in candidates.items()))
    return [job for turn in turns for job in turn if job is not None]


def _start(architecture: int, key: tuple, cases: list[tuple[Case, bool]]) -> None:
    from compiled import triton_report

    torch.set_num_threads(1)
    triton_report.pretend(architecture)
    triton_report.serve_cpu()
    _state.update(key=key, problems=[build_problem(case, two_streams) for case, two_streams in cases])


def _compile(job: Candidate) -> tuple[Candidate, str | None, int]:
    """The job, what stands against it, and the peak of this process's memory in bytes, ptxas included."""
    from xlnet_kernels.backends.triton import launch, launch_cache, tuning

    kernel, config = job
    original = launch.Call.launch

    def only_this(self, jit, *given, **arguments):
        if jit.__name__ == f"{kernel}_kernel":
            original(self, jit, *given, **arguments)

    tuning.TABLE[_state["key"]] = (config,) * len(KERNELS)
    launch_cache.plans.clear()
    launch.Call.launch, error = only_this, None
    try:
        for problem in _state["problems"]:
            inputs = [getattr(problem, name).requires_grad_() for name in Problem.INPUTS]
            out = attend(problem, "triton", deterministic=kernel == "keys")
            if kernel == "forward":
                with torch.no_grad():
                    attend(problem, "triton")
            else:
                torch.autograd.grad(out, inputs, problem.grad_out)
    except Exception as raised:  # too much shared memory, the compiler's own: whatever it is, it is out
        error = f"{type(raised).__name__}: {str(raised).splitlines()[:1]}"
    finally:
        launch.Call.launch = original
    own, children = (
        resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return job, error, own + children
