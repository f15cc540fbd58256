"""Sequences of different lengths: one after the other in a row (RankMask.packed) against padding to the longest.

    python benchmarks/packing.py               lengths 64 to 1024: evenly spread, mostly short, all equal
    python benchmarks/packing.py --quick       short ones, to see that everything runs

The operator alone, 12 heads of 64, with the mask that each way needs. Both must give the outputs and gradients of the
padded batch on the reference in float64 before they are timed. Memory goes with the tokens, padding counted.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import xlnet_kernels as xk
from lib import session
from lib.harness import Run
from lib.measure import DIRECTIONS, Bench, Job
from lib.session import positive

SPREADS = {
    "64, 128 .. 1024": [64 * n for n in range(1, 17)],
    "12 of 64, 3 of 256, 1 of 1024": [64] * 12 + [256] * 3 + [1024],
    "16 of 512": [512] * 16,
}
PADDED, PACKED = "padded", "packed"
SHORTER = 16  # times, with --quick


class Problem:
    """Sequences of these lengths, laid out both ways."""

    def __init__(self, lengths: list[int], heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        self.lengths, self.longest = lengths, max(lengths)
        self.dtype, self.device = dtype, device
        total = sum(lengths)
        self.rows = {name: torch.randn(1, heads, total, head_dim, dtype=dtype) for name in ("query", "key", "value")}
        self.grad_out = torch.randn(1, heads, total, head_dim, dtype=dtype)
        # No two tokens of one sequence are further apart than the longest is long: a window of distances.
        self.rel_key = torch.randn(heads, 2 * self.longest - 1, head_dim, dtype=dtype)
        self._wanted: dict[str, dict[str, Tensor]] = {}

    def pad(self, packed: Tensor) -> Tensor:
        """(1, H, all, D) as (B, H, longest, D), zero in the padding."""
        pieces = packed[0].split(self.lengths, dim=1)
        return torch.stack([torch.nn.functional.pad(x, (0, 0, 0, self.longest - x.shape[1])) for x in pieces])

    def pack(self, name: str, padded: Tensor) -> Tensor:
        """The other way round; rel_key's gradient has no rows to leave out."""
        if name == "rel_key":
            return padded
        return torch.cat([row[:, :length] for row, length in zip(padded, self.lengths, strict=True)], 1)[None]

    def run(self, way: str, backend: str | None = None, dtype: torch.dtype | None = None) -> Run:
        """One way of computing all, its results in packed layout."""
        arrange = self.pad if way == PADDED else lambda packed: packed
        lengths = torch.tensor(self.lengths, device=self.device)
        if way == PADDED:
            mask = xk.RankMask.padding(torch.arange(self.longest, device=self.device) >= lengths[:, None])
        else:
            mask = xk.RankMask.packed(torch.repeat_interleave(lengths)[None])
        place = dict(device=self.device, dtype=dtype or self.dtype)
        leaves = {name: arrange(x).to(**place).requires_grad_() for name, x in self.rows.items()}
        leaves["rel_key"] = self.rel_key.to(**place).requires_grad_()
        call = functools.partial(
            xk.rel_attention, *leaves.values(), mask=mask, max_distance=self.longest - 1, backend=backend
        )
        standard = self.pack if way == PADDED else lambda name, x: x
        return Run(call, leaves, arrange(self.grad_out).to(**place), standard)

    def wanted(self, direction: str) -> dict[str, Tensor]:
        """The padded batch on the reference in float64."""
        if direction not in self._wanted:
            run = self.run(PADDED, "reference", torch.float64)
            names = list(run.leaves) if direction == "backward" else ["out"]
            found = zip(names, run.step(direction), strict=True)
            self._wanted[direction] = {name: run.standard(name, x.detach()) for name, x in found}
        return self._wanted[direction]


def measure(options: argparse.Namespace, bench: Bench) -> None:
    """Every spread of lengths, both ways."""
    for name, lengths in SPREADS.items():
        lengths = [length // options.shorter for length in lengths]
        problem = Problem(lengths, options.heads, options.head_dim, getattr(torch, options.dtype), options.device)
        prepare: dict[str, Callable[[], Run]] = {way: functools.partial(problem.run, way) for way in (PADDED, PACKED)}
        jobs = [Job(way, make, problem.wanted, dtype=problem.dtype) for way, make in prepare.items()]
        tokens = f"{sum(lengths)} of {problem.longest * len(lengths)} tokens"
        scale = "" if options.shorter == 1 else f" / {options.shorter}"
        labels = {
            "case": f"{name}{scale}: {tokens}",
            "length": problem.longest,
            "batch": len(lengths),
            "dtype": options.dtype,
        }
        bench.group("packing", jobs, labels, baseline=PADDED)
        bench.save()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    session.common_options(parser, ("float32", "bfloat16", "float16"))
    parser.add_argument("--heads", type=positive, default=12)
    parser.add_argument("--head-dim", type=positive, default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="of samples per way and direction")
    parser.add_argument("--quick", action="store_true", help=f"sequences {SHORTER} times as short, few samples")
    if "--quick" in arguments:
        parser.set_defaults(heads=2, seconds=0.01)
    options = parser.parse_args(arguments)
    options.shorter = SHORTER if options.quick else 1
    session.check_common(parser, options, "packing")
    settings = {"heads": options.heads, "head_dim": options.head_dim, "dtype": options.dtype}
    rounds = (1, 3) if options.quick else (5, 200)
    return session.run(
        "packing",
        options,
        settings,
        functools.partial(measure, options),
        directions=DIRECTIONS,
        rounds=rounds,
        seconds=options.seconds,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
