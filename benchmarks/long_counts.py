"""Counts of work of the Triton kernels for windows over long sequences, to compare with the length.

    python benchmarks/long_counts.py --output benchmarks/results/gpu-counts-long.json

Forward and backward of one head at L 32768 and 65536, nothing extrapolated. Kinds of window: a floor below each rank
(causal), documents in a row, rows of rel_key for near distances alone. A pass is bound as in gpu_counts.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import torch  # noqa: E402
import triton  # noqa: E402

import xlnet_kernels as xk  # noqa: E402
from lib import bounds  # noqa: E402
from lib.machine.machine_code import assemble  # noqa: E402
from lib.machine.package import serving  # noqa: E402
from lib.machine.triton_driver import Launch  # noqa: E402

CASES = ("window", "documents", "windowed rel_key")
HEAD_DIM = 64


def launches(architecture: int, case: str, length: int, window: int, backward: bool = True) -> dict[str, list[Launch]]:
    """Launches of forward and, if wanted, of backward, one head; each row sees `window` keys at most."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()

    rel_len, options = 2 * length, {}
    if case == "window":
        options["mask"] = xk.RankMask.causal(1, length, window=window)
    elif case == "documents":
        options["mask"] = xk.RankMask.packed((torch.arange(length) // window)[None])
    else:
        rel_len, options["max_distance"] = window, window // 2
    x = [normal(1, 1, length, HEAD_DIM) for _ in range(3)]
    with serving(architecture, check=False) as record:
        out = xk.rel_attention(*x, normal(1, rel_len, HEAD_DIM), backend="triton", deterministic=False, **options)
        forward = len(record.launches)
        if backward:
            out.sum().backward()
    return {"forward": record.launches[:forward], "backward": record.launches[forward:]}


def row(runs: list[Launch], architecture: int) -> dict:
    """The sum over launches of the cycles that each one's busiest resource needs, and instructions of PTX issued."""
    total = 0.0
    for launch in runs:
        code, lines = assemble(launch.ptx, launch.name, architecture), launch.counts.lines
        executed = code.executed(code.weights(lines), lines).total()
        needed = bounds.cycles(launch.counts, bounds.GPUS[architecture], executed)
        total += max(value for name, value in needed.items() if name != bounds.ASSUMED)
    return {"bound_cycles": round(total), "issued": int(sum(launch.counts.issued for launch in runs))}


def table(architectures: list[int], cases: list[str], lengths: list[int], window: int) -> list[dict]:
    """A row for each case, length and direction; `growth`: of its bound for a key, to that of the length before."""
    rows = []
    for architecture, case in itertools.product(architectures, cases):
        before: dict[str, float] = {}  # of each direction: cycles for a key
        for length in lengths:
            for direction, runs in launches(architecture, case, length, window).items():
                found = row(runs, architecture)
                each = found["bound_cycles"] / length
                growth = round(each / before[direction], 3) if direction in before else None
                before[direction] = each
                rows.append({
                    "direction": direction, "case": case, "head_dim": HEAD_DIM, "dtype": "bfloat16",
                    "architecture": architecture, "length": length, **found, "growth": growth,
                })  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 65536])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = table(options.architectures, options.cases, options.lengths, options.window)
    if options.output:
        lines = ",\n".join(json.dumps(row) for row in rows)
        options.output.write_text(
            f'{{"triton": "{triton.__version__}", "window": {options.window}, "rows": [\n{lines}\n]}}\n'
        )


if __name__ == "__main__":
    main()
