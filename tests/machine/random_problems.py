"""Random problems on the machine, forward and all gradients, against the reference.

    python tests/machine/random_problems.py 2000 --seed 1 --backend triton

prints one line for each that is wrong or breaks a rule of the GPU, with what repeats it, and a line of totals.
With --kernels NAME, the state of the kernels, that line is one for the log, random-problems.txt.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402

from lib.machine.machine import Fault  # noqa: E402
from lib.machine.package import serving  # noqa: E402
from tests.machine import features  # noqa: E402

# Problems of one combination of features: Triton compiles for each, which takes longer than running
SAME = {"triton": 40, "cuda": 1}


def run(
    backend: str, seed: int, numbers: Iterable[int], rows: int, words: list[str], size: tuple[int, int]
) -> tuple[int, int]:
    """Run the problems whose features have all the words; return their number and that of failures."""
    ran, failed, started = 0, 0, time.time()
    for number in numbers:
        with serving(80):  # of either architecture the backends serve the same
            given = features.drawn(random.Random(f"{seed} {number // SAME[backend]}")).serves(backend)
        if not set(words) <= set(str(given).split("-")):
            continue
        ran += 1
        own = seed * 2**20 + number
        torch.manual_seed(own)
        try:
            with serving(given.architecture, seed=own, size=size):
                given.check(backend, given.problem(own, rows))
        except (AssertionError, Fault) as error:
            failed += 1
            print(f"problem {number} ({given}): {type(error).__name__}: {error}", flush=True)
        except Exception as error:  # what the machine or a compiler cannot do is reported, and is a failure too
            failed += 1
            print(f"problem {number} ({given}): {type(error).__name__}: {str(error)[:300]}", flush=True)
        if ran % 50 == 0:
            print(f"{ran} problems, {failed} failed, {time.time() - started:.0f} s", flush=True)
    return ran, failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first problem, to repeat one")
    parser.add_argument("--rows", type=int, default=150, help="most rows of a problem")
    parser.add_argument("--only", nargs="*", default=[], help="what features have to be named, as architecture90")
    parser.add_argument("--size", type=int, nargs=2, default=(3, 4), help="of the GPU: see package.serving")
    parser.add_argument("--backend", choices=["triton", "cuda"], default="triton")
    parser.add_argument("--kernels", metavar="NAME", help="print the totals as a line of the log, under this name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    numbers = range(options.first, options.first + options.count)
    ran, failed = run(options.backend, options.seed, numbers, options.rows, options.only, tuple(options.size))
    if options.kernels:
        print(f"{options.backend} | {options.kernels} | {options.seed}, {ran} | {failed or 'none'}")
    else:
        print(f"{ran} problems for {options.backend}, seed {options.seed}: {failed} wrong or faulty")
    sys.exit(failed > 0)
