"""Relative attention, measured: this package against every public way to compute the same, on real text.

    python benchmarks/attn.py                       in --budget seconds (240) and one measurement more at most: this
                                                    package, plain SDPA and transformers first, others if there is time
    python benchmarks/attn.py --full --plot         everything at every length, for the committed results
    python benchmarks/attn.py --lengths 1024 --sections core --direction forward
    python benchmarks/attn.py --lengths 512 --sections terms        what mask, segments, memory, query stream cost
    python benchmarks/attn.py --compare EARLIER.json                exit status 1 where something has become slower

Prints tables, writes every number to a JSON file. Ctrl-C keeps what has been measured so far.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch

import xlnet_kernels as xk
from lib import sections, session
from lib.compare import changes
from lib.implementations import BASELINE, TRANSFORMERS, Implementation, registry
from lib.measure import DIRECTIONS, Bench
from lib.problem import Case
from lib.session import positive

SECTIONS = ("core", "streams", "module", "precision", "long", "terms")
# seconds of the budget that core leaves them
RESERVED = {"streams": 12, "module": 15, "precision": 12, "long": 25, "terms": 60}
DTYPES = ("float32", "float64", "bfloat16", "float16")
# defaults per device
SIZES = {
    "cpu": dict(lengths=(128, 512, 1024, 2048), tokens=2048, heads=12, dtype="float32"),
    "cuda": dict(lengths=(128, 512, 1024, 2048, 8192, 16384), tokens=16384, heads=16, dtype="bfloat16"),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    session.common_options(parser, DTYPES)
    parser.set_defaults(dtype=None)
    add("--lengths", type=positive, nargs="+", help="default 128 512 1024 2048, on a GPU also 8192 16384")
    add("--tokens", type=positive, help="tokens per call, B = tokens / length (at least 1); default 2048, GPU 16384")
    add("--batch", type=positive, help="one batch size for all lengths, instead of --tokens")
    add("--heads", type=positive, help="default 12, on a GPU 16")
    add("--head-dim", type=positive, default=64, help="columns of a head; default 64")
    add("--mem-len", type=int, default=0, help="positions of memory before each sequence")
    add("--direction", choices=("forward", "backward", "both"), default="both", help="backward: forward and backward")
    add("--implementations", nargs="+", metavar="NAME", help='only names that contain one, e.g. "cpu" "SDPA"')
    add("--compiled-lengths", type=positive, nargs="+", help="where compiled peers run; default wherever they fit")
    add("--sections", nargs="+", choices=SECTIONS, default=SECTIONS[:-1], help="default: all but terms")
    add("--seconds", type=float, help="of samples per implementation and direction; default 1, with --full 4")
    add("--budget", type=float, default=240, help="seconds in all; what does not fit is left out; default 240")
    add("--full", action="store_true", help="no budget, more samples")
    add("--compare", type=Path, metavar="EARLIER.json", help="results of an earlier run on this machine")
    options = parser.parse_args(arguments)
    for name, default in SIZES[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    options.lengths = sorted(set(options.lengths))
    session.check_common(parser, options, "attn")
    if options.compare and not options.compare.exists():
        parser.error(f"--compare: there is no {options.compare}")
    if options.mem_len < 0 or (options.heads * options.head_dim) % 2:
        parser.error("--mem-len must not be negative, --heads x --head-dim must be even (sines and cosines)")
    if options.implementations and not chosen(options.implementations, options.device):
        names = ", ".join(registry(options.device))
        parser.error(f"--implementations: none has a name with {options.implementations} in it; {names}")
    if options.lengths[0] < 16:
        parser.error("--lengths: a sequence needs at least 16 tokens for two segments")
    options.seconds = options.seconds or (4 if options.full else 1)
    return options


def chosen(words: list[str] | None, device: str) -> dict[str, Implementation]:
    """The implementations whose name contains one of `words`, whatever the case; all for None."""
    words = [word.lower() for word in words or [""]]
    return {name: one for name, one in registry(device).items() if any(word in name.lower() for word in words)}


def case(options: argparse.Namespace, length: int) -> Case:
    batch = options.batch or max(1, options.tokens // length)
    dtype = getattr(torch, options.dtype)
    return Case(length, batch, options.heads, options.head_dim, options.mem_len, dtype, options.device)


def measure(options: argparse.Namespace, bench: Bench) -> None:
    """The chosen sections. Within a budget: core with what comes first, the other sections, then core with the rest."""
    implementations = chosen(options.implementations, options.device)
    first = _first(implementations, options.device)
    cases = [case(options, length) for length in options.lengths]
    within_budget = math.isfinite(bench.budget)
    if "core" in options.sections:
        reserved = min(sum(RESERVED.get(section, 0) for section in options.sections), 0.4 * options.budget)
        # Without a budget all are timed in turn.
        sections.core(bench, first if within_budget else implementations, cases, options.compiled_lengths, reserved)
    _other_sections(options, bench, first | implementations, cases)
    if "core" in options.sections and within_budget:
        # Separate, because compiling may take all the time that is left.
        for compiled in (False, True):
            others = {name: one for name, one in implementations.items() if one.compiled == compiled}
            others = {name: one for name, one in others.items() if name not in first}
            sections.peers(bench, others, cases, options.compiled_lengths)


def _other_sections(options: argparse.Namespace, bench: Bench, implementations: dict, cases: list[Case]) -> None:
    """The chosen sections but core, each where there is time for it."""
    ready = _own_backends(implementations, options.device)
    own = ready[0] if ready else None
    # These sections are about two lengths: one that is batched and the longest.
    extra = [one for one in cases if one.length in (512, 2048)] or cases[-1:]
    if own == "reference":
        extra = [one for one in extra if one.length <= sections.CHECKED_LENGTH]
    if own is None:
        return
    absent = {f"xlnet_kernels {name}" for name, state in xk.backends().items() if not state.available}
    present = {name: one for name, one in implementations.items() if name not in absent}
    layer = case(options, 512 if options.device == "cpu" else 1024)
    long = case(options, sections.LONG_LENGTHS[options.device])
    fused = [f"xlnet_kernels {name}" for name in ready if name != "reference"] or ["xlnet_kernels reference"]
    with_baselines = {name: one for name, one in present.items() if name in fused or name.startswith(BASELINE)}
    others = {
        "streams": (extra, lambda: sections.streams(bench, own, extra)),
        "module": ([layer], lambda: sections.module(bench, own, layer)),
        "precision": (extra, lambda: sections.precision(bench, own, extra)),
        "long": ([long], lambda: sections.long(bench, present, long)),
        "terms": (extra, lambda: [sections.terms(bench, with_baselines, one) for one in extra]),
    }
    if options.dtype != "float32":
        del others["precision"]
    if options.direction == "forward":
        del others["long"]
    for name, (measured, run) in others.items():
        if name in options.sections and bench.remaining() >= min(RESERVED[name] / 2, 0.2 * bench.budget):
            run()
        elif name in options.sections:
            for one in measured:
                bench.skip(name, "all", sections.labels(one), sections.USED_UP)


def _first(implementations: dict, device: str) -> dict[str, Implementation]:
    """This package's kernels, or the best of its backends without any, plain SDPA and transformers' eager attention.

    The slowest of them comes last.
    """
    best = _own_backends(implementations, device)[:1]
    own = dict.fromkeys([name for name in xk.backends() if name not in ("torch", "reference")] + best)
    names = [*(f"xlnet_kernels {name}" for name in own), BASELINE, TRANSFORMERS]
    return {name: one for start in names for name, one in implementations.items() if name.startswith(start)}


def _own_backends(implementations: dict, device: str) -> list[str]:
    """This package's backends that were chosen and are ready, the best first."""
    ready = [name for name, state in xk.backends().items() if state.available and (name != "cpu" or device == "cpu")]
    return [name for name in ready if f"xlnet_kernels {name}" in implementations]


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; 1 where this package computes something wrong or has become slower; 130 where interrupted."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    earlier = json.loads(options.compare.read_text())["rows"] if options.compare else []
    settings = {name: getattr(options, name) for name in ("device", "dtype", "lengths", "heads", "head_dim", "mem_len")}
    status = session.run(
        "attn",
        options,
        settings
        | {"seconds": options.seconds, "full": options.full, "sections": list(options.sections)}
        | ({} if options.full else {"budget": options.budget}),
        lambda bench: measure(options, bench),
        directions=DIRECTIONS if options.direction == "both" else (options.direction,),
        rounds=(5, 100) if options.full else (3, 50),
        seconds=options.seconds,
        budget=float("inf") if options.full else options.budget,
    )
    compared = changes(earlier, json.loads(options.output.read_text())["rows"])
    print(*compared, sep="\n", end="\n" if compared else "")
    if options.compare and not compared:
        print("--compare: the earlier run has none of these rows", file=sys.stderr)
    return status or int(any(change.is_slower for change in compared))


if __name__ == "__main__":
    sys.exit(main())
