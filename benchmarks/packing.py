"""Sequences of different lengths: one after the other in a row (RankMask.packed) against padding to the longest.

    python benchmarks/packing.py               lengths 64 to 1024, evenly spread and mostly short
    python benchmarks/packing.py --quick       short ones, to see that everything runs

The operator alone, forward and backward, on one thread of the CPU. Time is the processor's; the ways take turns and the
best of all turns counts, so a busy machine does not matter much. Memory is that of query, key, value, output and their
gradients: the kernels' own is small beside it. Before it is timed, a packed row must give what the padded batch gives.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor

import xlnet_kernels as xk

HEADS, WIDTH = 2, 64
SPREADS = {
    "64 .. 1024": [64 * n for n in range(1, 17)],
    "mostly short": [64] * 12 + [256] * 3 + [1024],
    "all equal": [512] * 16,
}


def inputs(batch: int, length: int, rel_key: Tensor) -> list[Tensor]:
    """query, key and value of random numbers, and rel_key, ready for gradients."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(batch, HEADS, length, WIDTH, generator=generator).requires_grad_() for _ in "qkv"]
    return [*made, rel_key.clone().requires_grad_()]


def as_padded(packed: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """The same sequences, each in a row of its own."""
    longest = max(lengths)
    rows = []
    for x in packed[:3]:
        pieces = x.detach()[0].split(lengths, dim=1)
        rows.append(
            torch.stack([torch.nn.functional.pad(piece, (0, 0, 0, longest - piece.shape[1])) for piece in pieces])
        )
    return [*(x.requires_grad_() for x in rows), packed[3]]


def seconds(leaves: list[Tensor], mask: xk.RankMask, max_distance: int) -> float:
    """Of the processor, forward and backward."""
    before = time.thread_time()
    xk.rel_attention(*leaves, mask=mask, max_distance=max_distance).sum().backward()
    return time.thread_time() - before


def measure(name: str, lengths: list[int], turns: int) -> str:
    """A row of the table."""
    longest, total = max(lengths), sum(lengths)
    # No two tokens of one sequence are further apart than the longest is long: a window of distances.
    rel_key = torch.randn(HEADS, 2 * longest - 1, WIDTH)
    ids = torch.repeat_interleave(torch.tensor(lengths))[None]
    packed = inputs(1, total, rel_key)
    padded = as_padded(packed, lengths)
    ways = {
        "packed": (packed, xk.RankMask.packed(ids), longest - 1),
        "padded": (padded, xk.RankMask.padding(torch.arange(longest) >= torch.tensor(lengths)[:, None]), longest - 1),
    }
    with torch.no_grad():
        out, wanted = (xk.rel_attention(*leaves, mask=mask, max_distance=far) for leaves, mask, far in ways.values())
    wanted = torch.cat([row[:, :length] for row, length in zip(wanted, lengths, strict=True)], 1)[None]
    if not torch.allclose(out, wanted, atol=1e-4):
        raise SystemExit(f"{name}: packed and padded rows differ by {(out - wanted).abs().max():.3g}")
    samples = [{way: seconds(*of) for way, of in ways.items()} for _ in range(turns)]
    times = {way: min(sample[way] for sample in samples) for way in ways}
    megabytes = {way: 8 * leaves[0].numel() * 4 / 1e6 for way, (leaves, _, _) in ways.items()}
    cells = [name, f"{total} of {longest * len(lengths)}"]
    cells += [f"{1e3 * times[way]:.0f}" for way in ("padded", "packed")] + [f"{times['padded'] / times['packed']:.2f}"]
    cells += [f"{megabytes[way]:.0f}" for way in ("padded", "packed")]
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="of each way; the best counts")
    parser.add_argument("--quick", action="store_true", help="sequences 16 times as short, one turn")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| lengths | tokens | padded ms | packed ms | times as fast | padded MB | packed MB |")
    print("|---|---|---|---|---|---|---|")
    for name, lengths in SPREADS.items():
        if options.quick:
            lengths = [length // 16 for length in lengths]
        print(measure(name, lengths, 1 if options.quick else options.turns), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
