"""Where the warps of a GPU kernel wait, by simulation: instructions of its machine code, the longest waits first.

    python benchmarks/gpu_waits.py cuda 90 64 backward warpgroup_backward

The multiprocessor is that of `make gpu-counts` (lib/timing), the call one with an order and segments. An instruction
under a condition counts as executed where its line of PTX ever ran.
"""

from __future__ import annotations

import argparse
import math
import sys

import gpu_counts
from lib.machine.machine_code import assemble
from lib.timing import kernel as timing


def show(launch, architecture: int, count: int) -> None:
    code = assemble(launch.ptx, launch.name, architecture)
    sizes = math.prod(launch.grid), launch.threads, launch.shared_bytes
    way = timing.way_of(code, launch.counts, *sizes, architecture)
    if way is None:
        raise SystemExit(f"{launch.name}: counts give no way")
    waits = timing.waits(way, architecture)
    total = sum(waits.values())
    print(f"{launch.name}: {total:.0f} cycles of a warp, {way.resident} blocks of {way.warps} warps side by side")
    print(f"{'cycles':>8}{'share':>7}{'times':>7}  number  instruction  <- the one before")
    for step in sorted(waits, key=lambda step: -waits[step])[:count]:
        text = [" ".join(code.steps[i].instruction[2:]).strip() for i in (step, step - 1)]
        times = way.steps.count(step)
        print(f"{waits[step]:8.0f}{waits[step] / total:7.1%}{times:7}  {step:6}  {text[0]}  <- {text[1]}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=("cuda", "triton"))
    parser.add_argument("architecture", type=int, choices=(80, 90))
    parser.add_argument("head_dim", type=int)
    parser.add_argument("direction", choices=("forward", "backward"))
    parser.add_argument("kernel", help="a part of its name")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--count", type=int, default=40, help="of the longest waits to print")
    options = parser.parse_args(arguments)
    gpu_counts.torch.set_num_threads(1)
    case = options.backend, options.architecture, options.head_dim, "order+segments", options.length
    launches = gpu_counts.ours(*case)[options.direction]
    found = [launch for launch in launches if options.kernel in launch.name]
    if not found:
        raise SystemExit(f"no such kernel, there are: {', '.join(launch.name for launch in launches)}")
    show(found[0], options.architecture, options.count)


if __name__ == "__main__":
    main(sys.argv[1:])
