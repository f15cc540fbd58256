"""Timing, peak memory, the facts about the machine, and results that survive an interruption."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import xlnet_kernels as xk


class CannotRun(Exception):
    """Why an implementation has no numbers here; its text is shown in the table."""


@dataclass
class Run:
    """One implementation with its inputs, laid out as it wants them.

    `standard(name, tensor)` brings an output ("out") or the gradient of a leaf to the layout of the reference.
    """

    forward: Callable[[], Tensor | tuple[Tensor, ...]]
    leaves: dict[str, Tensor]
    grad_out: Tensor | tuple[Tensor, ...]
    standard: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor

    def step(self, direction: str) -> tuple[Tensor, ...]:
        """One call: the outputs, or ("backward": forward and backward) the gradients of all leaves."""
        if direction == "forward":
            with torch.no_grad():
                out = self.forward()
            return out if isinstance(out, tuple) else (out,)
        # A term that is not part of this problem (an empty memory) has no gradient.
        return torch.autograd.grad(
            self.forward(), list(self.leaves.values()), self.grad_out, allow_unused=True, materialize_grads=True
        )


def at_precision(run: Run, precision: str) -> Run:
    """`run`, whose steps are under torch.set_float32_matmul_precision(precision)."""
    step = run.step

    def precise_step(direction: str) -> tuple[Tensor, ...]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            return step(direction)
        finally:
            torch.set_float32_matmul_precision(before)

    run.step = precise_step  # type: ignore[method-assign]
    return run


def tidy(error: object) -> str:
    """An error or reason as one line for the table, without this machine's paths."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if text.endswith(":") and len(lines) > 1:  # "backend='inductor' raised:" and then what
        text += " " + lines[1]
    if isinstance(error, Exception) and not isinstance(error, CannotRun):
        text = f"{type(error).__name__}: {text}"
    return re.sub(r"(?<![\w.])/(?:[^\s/:'\"]+/)+", "", text)[:200]


def seconds(call: Callable[[], object], device: str) -> float:
    """Wall-clock seconds of one call; device time by events on CUDA."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def schedule(rounds: dict[str, int]) -> list[str]:
    """Names in the order they are sampled: each spread evenly over the whole run, so that drift meets all alike.

    >>> schedule({"fast": 4, "slow": 2})
    ['fast', 'slow', 'fast', 'fast', 'slow', 'fast']
    """
    places = [((k + 0.5) / count, i, name) for i, (name, count) in enumerate(rounds.items()) for k in range(count)]
    return [name for _, _, name in sorted(places)]


def time_interleaved(
    calls: dict[str, Callable[[], object]],
    estimates: dict[str, float],
    device: str,
    budget: float,
    rounds: tuple[int, int],
    on_sample: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> dict[str, list[float]]:
    """Samples in seconds. Each call gets about `budget` seconds, but at least and at most `rounds` samples.

    `estimates` are seconds per call, from the warm-up. Short calls are repeated within a sample until it lasts 10 ms.
    """
    repeats = {name: max(1, round(0.01 / max(estimates[name], 1e-6))) for name in calls}
    counts = {
        name: min(max(rounds[0], int(budget / (repeats[name] * max(estimates[name], 1e-6)))), rounds[1])
        for name in calls
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = schedule(counts)
    with _no_garbage_collection():
        for done, name in enumerate(order):
            on_sample(name, done, len(order))

            sample = _sample_on_cuda if device == "cuda" else _sample
            samples[name].append(sample(calls[name], repeats[name]))
    return samples


def _sample(call: Callable[[], object], times: int) -> float:
    """Seconds per call, the mean of `times` in a row."""

    def repeated() -> None:
        for _ in range(times):
            call()

    return seconds(repeated, "cpu") / times


def _sample_on_cuda(call: Callable[[], object], times: int) -> float:
    """Seconds of a call by events, each call with an empty L2 cache (as triton.testing.do_bench does it).

    Emptying it takes the GPU long enough that the next call's launches are already queued when its time begins.
    """
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for begin, end in pairs:
        _larger_than_l2().zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sum(begin.elapsed_time(end) for begin, end in pairs) / times / 1e3


@functools.cache
def _larger_than_l2() -> Tensor:
    return torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")


def summary(samples: list[float]) -> dict[str, float]:
    """Median, quartiles and extremes in milliseconds, and the number of samples."""
    quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    names = ("q1_ms", "median_ms", "q3_ms")
    numbers = {name: round(1e3 * value, 4) for name, value in zip(names, quartiles, strict=True)}
    numbers |= {"min_ms": round(1e3 * min(samples), 4), "max_ms": round(1e3 * max(samples), 4)}
    return numbers | {"samples": len(samples)}


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def peak_memory(call: Callable[[], tuple[Tensor, ...]], device: str) -> tuple[int | None, float]:
    """Bytes that one call needs at its peak above its inputs and outputs (None: unknown here), and its seconds."""
    outputs: list[tuple[Tensor, ...]] = []
    gc.collect()
    with (_allocated_on_cuda if device == "cuda" else _resident)() as peak:
        elapsed = seconds(lambda: outputs.append(call()), device)
    if not peak:
        return None, elapsed
    return max(0, peak[0] - sum(tensor.nbytes for tensor in outputs[0])), elapsed


def peak_memory_method(device: str) -> str:
    if device == "cuda":
        return "torch.cuda.max_memory_allocated"
    if not Path("/proc/self/statm").exists():
        return "not measured: needs Linux's /proc"
    return "VmHWM of /proc/self/status" if _reset_high_water() else "resident memory sampled every millisecond"


@contextlib.contextmanager
def _allocated_on_cuda() -> Iterator[list[int]]:
    peak: list[int] = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield peak
    torch.cuda.synchronize()
    peak.append(torch.cuda.max_memory_allocated() - before)


@contextlib.contextmanager
def _resident() -> Iterator[list[int]]:
    """Growth of this process's resident memory, kernels' own buffers included, from any allocator."""
    peak: list[int] = []
    _return_free_memory()
    if _reset_high_water():
        before = _status("VmRSS")
        yield peak
        peak.append(_status("VmHWM") - before)
    elif Path("/proc/self/statm").exists():
        before, highest, done = _status("VmRSS"), [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.001):
                highest[0] = max(highest[0], _status("VmRSS"))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield peak
        finally:
            done.set()
            thread.join()
        peak.append(highest[0] - before)
    else:
        yield peak


def _return_free_memory() -> None:
    """Gives malloc's kept memory back, because it would hide the next call's needs."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(field: str, path: str = "/proc/self/status") -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    return 0


def free_memory(device: str) -> int | None:
    """Bytes that can still be allocated, or None where that is unknown."""
    if device == "cuda":
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + unused
    return _status("MemAvailable", "/proc/meminfo") if Path("/proc/meminfo").exists() else None


def environment(device: str) -> dict[str, object]:
    """Conditions that the numbers depend on; nothing that names the machine or its user."""
    facts: dict[str, object] = {
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "xlnet_kernels": xk.__version__,
        "commit": _commit(),
        "backends": {name: tidy(state) for name, state in xk.backends().items()},
        "peak_memory": peak_memory_method(device),
    }
    with contextlib.suppress(ImportError):
        import transformers

        facts["transformers"] = transformers.__version__
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}
        facts |= {"architecture": 10 * properties.major + properties.minor}
        facts |= {"multiprocessors": properties.multi_processor_count}
        clock = _printed(["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits", "--id=0"])
        facts |= {"clock_mhz": float(clock)} if clock and clock.replace(".", "").isdigit() else {}
        facts["driver"] = _printed(["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"])
        with contextlib.suppress(ImportError):
            import triton

            facts["triton"] = triton.__version__
    return facts


def _printed(command: list[str]) -> str | None:
    """A program's output; None where it is not there or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout this file is in, "+changes" if it has been edited.

    Outside of one, where files were copied without git's, the environment variable COMMIT or None.
    """
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = _printed([*git, "rev-parse", "HEAD"])
    if commit is None:
        return os.environ.get("COMMIT")
    # Results that an earlier run wrote are no change to what is measured.
    changed = _printed([*git, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!../results"])
    return commit + ("+changes" if changed else "")


def write_json(path: Path, results: dict) -> None:
    """Writes results with one line for each row of a table.

    Atomically: a reader, or an interruption, meets the old file or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(_as_text(results))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _as_text(results: dict) -> str:
    head = json.dumps({name: value for name, value in results.items() if name != "rows"}, indent=1)
    if "rows" not in results:
        return head + "\n"
    rows = ",\n".join(f"  {json.dumps(row)}" for row in results["rows"])
    return head.removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n'
