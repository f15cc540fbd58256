"""The largest batch and the longest sequence whose training step fits into memory: this package's XLNet, transformers'.

    python benchmarks/capacity.py --size base --dtype bfloat16               in 80 GB of a GPU, or what --memory says
    python benchmarks/capacity.py --size large --lengths 2048 --implementations xlnet_kernels

Permutation LM with one target for six tokens; forward, backward and AdamW. A size is found by doubling until a step
runs out of memory and then by bisection, to within 1.6 %. On a GPU every search has a process of its own. On the CPU,
where memory does not run out, a step counts as too large when the process has grown by more than --memory.
"""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

import model
from lib import session
from lib.harness import peak_memory, tidy
from lib.measure import Bench
from lib.session import positive
from lib.text import english
from model import OWN, THEIRS, ModelCase

IMPLEMENTATIONS = {
    OWN: (model.our_model, model.our_run),
    THEIRS: (model.transformers_model, model.transformers_run),
}
FINEST = 64  # a search ends when what is left to search is a 64th of what fits
MOST = 2**16  # sequences in a batch


def largest(fits: Callable[[int], bool], step: int, most: int) -> tuple[int, int]:
    """The largest multiple of `step` up to `most` that `fits`, to within a 64th, and how many sizes were tried.

    `fits` is True up to some size and False beyond. Where not even `step` fits, 0.
    """
    tried, low, high, limit = 0, 0, 1, most // step
    while high <= limit:
        tried += 1
        if not fits(high * step):
            break
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > max(1, low // FINEST):
        middle = (low + high) // 2
        tried += 1
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step, tried


def step_fits(step: Callable[[], tuple[torch.Tensor, ...]], device: str, limit: int) -> bool:
    """Whether a training step fits into `limit` bytes, which `search` has set as the GPU's; memory is free again after.

    Raises:
        RuntimeError: the step fails for another reason.
    """
    fits = True
    try:
        if device == "cpu":
            peak, _ = peak_memory(step, device)
            if peak is None:
                raise RuntimeError("peak memory cannot be measured on this system")
            fits = peak <= limit
        else:
            step()
            torch.cuda.synchronize()
    except RuntimeError as error:
        if not _out_of_memory(error):
            raise
        fits = False
    gc.collect()  # only now: until here the error held the step's tensors
    if device == "cuda":
        torch.cuda.empty_cache()
    return fits


def _out_of_memory(error: RuntimeError) -> bool:
    """torch's allocator has a class for it; CUDA and its libraries just say so."""
    words = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def search(name: str, case: ModelCase, what: str, step: int, most: int, limit: int) -> tuple[int, int]:
    """`largest` for the `what` ("batch" or "length") of `case`, as implementation `name` trains it."""
    if case.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    build, run = IMPLEMENTATIONS[name]
    torch.manual_seed(0)
    trained = build(case).to(case.device)

    def fits(size: int) -> bool:
        sized = replace(case, **{what: size})
        print(f"{name}, {what} {size} ...", file=sys.stderr, flush=True)
        found = step_fits(lambda: run(sized, model=trained).step("backward"), case.device, limit)
        trained.zero_grad(set_to_none=True)
        return found

    return largest(fits, step, most)


def isolated(function: Callable, *arguments: object) -> object:
    """Its result, from a process of its own: nothing it breaks or leaves behind reaches the next."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure(options: argparse.Namespace, bench: Bench) -> None:
    """One row per question and implementation."""
    # what is asked, of which problem, in steps of, up to
    questions = [("batch", dict(length=length, batch=1), 1, MOST) for length in options.lengths]
    longest = len(english()) // options.step * options.step
    questions.append(("length", dict(length=options.step, batch=1), options.step, longest))
    run = isolated if options.device == "cuda" else lambda function, *arguments: function(*arguments)
    for what, problem, step, most in questions:
        title = f"batch at L {problem['length']}" if what == "batch" else "length at batch 1"
        found: dict[str, int] = {}
        for name in options.implementations:
            case = model.case_of(options, task="pre-training", mem_len=0, **problem)
            row = {"section": "capacity", "implementation": name, **case.labels, "case": title}
            row |= {"direction": "backward", "status": "ok", "most": most}
            try:
                size, tried = run(search, name, case, what, step, most, int(options.memory * 1e9))
            except Exception as error:  # whatever stops a search is its result
                row |= {"status": "failed", "reason": tidy(error)}
            else:
                row |= {"largest": size, "tried": tried, what: size}
                found[name] = size
                if found.get(THEIRS):
                    row["speedup"] = round(size / found[THEIRS], 3)
            bench.rows.append(row)
            bench.save()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    session.common_options(parser, ("float32", "bfloat16", "float16"))
    model.size_options(parser)
    add = parser.add_argument
    add("--lengths", type=positive, nargs="+", default=[512, 2048], help="of which the largest batch is found")
    add("--step", type=positive, default=128, help="lengths are multiples of this, at least 16")
    add("--memory", type=float, default=80.0, metavar="GB", help="10^9 bytes; default 80")
    names = tuple(IMPLEMENTATIONS)
    add("--implementations", nargs="+", choices=names, default=names)
    options = parser.parse_args(arguments)
    session.check_common(parser, options, "capacity")
    model.check_sizes(parser, options)
    if options.step < 16:
        parser.error("--step: a sequence needs at least 16 tokens for two segments")
    if not options.memory > 0:
        parser.error("--memory must be positive")
    # transformers first, so that ours can be compared with it
    options.implementations = sorted(set(options.implementations), key=(THEIRS, OWN).index)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Exit status as in `session.run`."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    # read by the searches' processes: without it, free memory in pieces of the wrong sizes would count as used
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return session.run(
        "capacity",
        options,
        {name: value for name, value in vars(options).items() if name not in ("output", "plot")},
        functools.partial(measure, options),
        directions=("backward",),
        rounds=(1, 1),
        seconds=0,
    )


if __name__ == "__main__":
    sys.exit(main())
