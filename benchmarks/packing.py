"""Sequences of different lengths: one after the other in a row (RankMask.packed) against padding to the longest.

    python benchmarks/packing.py               lengths 64 to 1024: evenly spread, mostly short, all equal
    python benchmarks/packing.py --layers 4    Parakeet's encoder of so many layers on 1500, 300, 200 and 100 frames
    python benchmarks/packing.py --quick       short ones, to see that everything runs

The operator alone, 12 heads of 64, with the mask that each way needs. Both must give the outputs and gradients of the
padded batch on the reference in float64 before they are timed. Memory goes with the tokens, padding counted.

With --layers it is transformers' encoder, 1024 wide, 8 heads: as transformers has it, accelerated, accelerated with
skip_padding, and accelerated with each sequence in a call of its own. Each is called once. Outputs at frames and all
gradients are checked against transformers in float64; right is twice what its own code misses in the same dtype, or
the usual tolerance.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import xlnet_kernels as xk
from lib import session, toolkits
from lib.harness import Run
from lib.measure import DIRECTIONS, Bench, Job, compare
from lib.session import positive

SPREADS = {
    "64, 128 .. 1024": [64 * n for n in range(1, 17)],
    "12 of 64, 3 of 256, 1 of 1024": [64] * 12 + [256] * 3 + [1024],
    "16 of 512": [512] * 16,
}
PADDED, PACKED = "padded", "packed"
THEIRS, OWN, SKIPPING, ALONE = "transformers", "accelerated", "skip_padding", "one by one"
FRAMES = [1500, 300, 200, 100]
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


class EncoderProblem:
    """Parakeet's encoder on a padded batch of these numbers of frames, in all ways."""

    def __init__(
        self, lengths: list[int], layers: int, width: int, heads: int, dtype: torch.dtype, device: str
    ) -> None:
        layer = toolkits.build("parakeet", max(lengths), width, heads, layers)
        self.lengths, self.dtype, self.module = lengths, dtype, layer.module.to(device, dtype)
        steps = torch.tensor(lengths, device=device)[:, None] * layer.step
        self.flags = torch.arange(layer.step * max(lengths), device=device) < steps
        self.features = torch.randn(*self.flags.shape, layer.width, device=device, dtype=dtype)
        self.grad_out = torch.randn(sum(lengths), width, device=device, dtype=dtype)
        self.wanted, self.missed = functools.cache(self._wanted), functools.cache(self._missed)

    def run(self, way: str, dtype: torch.dtype | None = None) -> Run:
        """Its outputs are those at frames, one sequence after the other."""
        dtype = dtype or self.dtype
        module, features = copy.deepcopy(self.module).to(dtype), self.features.to(dtype).requires_grad_()
        if way != THEIRS:
            xk.accelerate(module, skip_padding=way == SKIPPING)

        def forward() -> Tensor:
            if way == ALONE:
                pairs = (
                    (x[None, flag], length) for x, flag, length in zip(features, self.flags, self.lengths, strict=True)
                )
                return torch.cat([module(x).last_hidden_state[0, :length] for x, length in pairs])
            out = module(features, attention_mask=self.flags).last_hidden_state
            return torch.cat([x[:length] for x, length in zip(out, self.lengths, strict=True)])

        return Run(forward, {"input": features} | dict(module.named_parameters()), self.grad_out.to(dtype))

    def _wanted(self, direction: str) -> dict[str, Tensor]:
        run = self.run(THEIRS, torch.float64)
        names = list(run.leaves) if direction == "backward" else ["out"]
        return {name: x.detach() for name, x in zip(names, run.step(direction), strict=True)}

    def _missed(self, direction: str) -> dict[str, float]:
        run = self.run(THEIRS)
        return compare(run, direction, run.step(direction), self.wanted(direction), self.dtype)["errors"]


def measure_encoder(options: argparse.Namespace, bench: Bench) -> None:
    """All ways of the encoder."""
    lengths = [length // options.shorter for length in FRAMES]
    sizes = (64, 4) if options.quick else (1024, 8)
    problem = EncoderProblem(lengths, options.layers, *sizes, getattr(torch, options.dtype), options.device)
    jobs = [
        Job(way, functools.partial(problem.run, way), problem.wanted, problem.missed, dtype=problem.dtype)
        for way in (THEIRS, OWN, SKIPPING, ALONE)
    ]
    frames = f"{', '.join(map(str, lengths))} frames: {sum(lengths)} of {max(lengths) * len(lengths)}"
    labels = {
        "case": f"Parakeet's encoder, {options.layers} layers, {frames}",
        "length": max(lengths),
        "batch": len(lengths),
        "dtype": options.dtype,
    }
    bench.group("packing", jobs, labels, baseline=OWN)
    bench.save()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    session.common_options(parser, ("float32", "bfloat16", "float16"))
    parser.add_argument("--heads", type=positive, default=12)
    parser.add_argument("--head-dim", type=positive, default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="of samples per way and direction")
    parser.add_argument("--layers", type=positive, help="Parakeet's encoder of so many layers, not the operator")
    parser.add_argument("--forward", action="store_true", help="without backward")
    parser.add_argument("--quick", action="store_true", help=f"sequences {SHORTER} times as short, few samples")
    if "--quick" in arguments:
        parser.set_defaults(heads=2, seconds=0.01)
    options = parser.parse_args(arguments)
    options.shorter = SHORTER if options.quick else 1
    session.check_common(parser, options, "packing")
    settings = {"heads": options.heads, "head_dim": options.head_dim, "dtype": options.dtype}
    if options.layers is not None:
        settings = {"heads": 8, "head_dim": 128, "layers": options.layers, "dtype": options.dtype}
        settings |= {"heads": 4, "head_dim": 16} if options.quick else {}
    rounds = (1, 3) if options.quick else (5, 200)
    return session.run(
        "packing",
        options,
        settings,
        functools.partial(measure if options.layers is None else measure_encoder, options),
        directions=("forward",) if options.forward else DIRECTIONS,
        rounds=rounds,
        seconds=options.seconds,
        once=options.layers is not None,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
