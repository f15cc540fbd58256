"""Relative attention, measured: this package against every public way to compute the same, on real text.

    python benchmarks/attn.py                       everything, in less than five minutes on two cores
    python benchmarks/attn.py --full --plot         everything at every length, for the committed results
    python benchmarks/attn.py --lengths 1024 --sections core --direction forward

Prints tables, writes every number to a JSON file. Ctrl-C keeps what has been measured so far.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import sections
import xlnet_kernels as xk
from harness import environment, write_json
from implementations import Implementation, registry
from measure import DIRECTIONS, Bench
from problem import Case
from report import notes, tables

SECTIONS = ("core", "streams", "module", "precision", "long")
RESERVED = {"streams": 12, "module": 15, "precision": 12, "long": 25}  # seconds of the budget that core leaves them
DTYPES = ("float32", "float64", "bfloat16", "float16")
# per device: lengths, tokens
SIZES = {"cpu": ((128, 512, 1024, 2048), 2048), "cuda": ((512, 1024, 2048, 4096, 8192), 16384)}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=DTYPES, default="float32")
    add("--lengths", type=_positive, nargs="+", help="default 128 512 1024 2048 on the CPU")
    add("--tokens", type=_positive, help="tokens per call, B = tokens / length (at least 1); default 2048 on the CPU")
    add("--batch", type=_positive, help="one batch size for all lengths, instead of --tokens")
    add("--heads", type=_positive, default=12)
    add("--head-dim", type=_positive, default=64)
    add("--mem-len", type=int, default=0, help="positions of memory before each sequence")
    add("--direction", choices=("forward", "backward", "both"), default="both", help="backward: forward and backward")
    add("--implementations", nargs="+", metavar="NAME", help='only names that contain one, e.g. "cpu" "SDPA"')
    add("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    add("--seconds", type=float, help="of samples per implementation and direction; default 1, with --full 4")
    add("--budget", type=float, default=240, help="seconds in all; compiled peers that do not fit are left out")
    add("--full", action="store_true", help="no budget, more samples")
    add("--output", type=Path, help="default benchmarks/results/attn-DEVICE-DTYPE.json")
    add("--plot", type=Path, nargs="?", const=Path(), metavar="PNG", help="also a picture; default beside the JSON")
    options = parser.parse_args(arguments)
    lengths, tokens = SIZES[options.device]
    options.lengths = sorted(set(options.lengths or lengths))
    options.tokens = options.tokens or tokens
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    if options.mem_len < 0 or (options.heads * options.head_dim) % 2:
        parser.error("--mem-len must not be negative, --heads x --head-dim must be even (sines and cosines)")
    if options.implementations and not chosen(options.implementations):
        parser.error(
            f"--implementations: none has a name with {options.implementations} in it; {', '.join(registry())}"
        )
    if options.lengths[0] < 16:
        parser.error("--lengths: a sequence needs at least 16 tokens for two segments")
    options.seconds = options.seconds or (4 if options.full else 1)
    here = Path(__file__).parent / "results"
    options.output = options.output or here / f"attn-{options.device}-{options.dtype}.json"
    if options.plot == Path():
        options.plot = options.output.with_suffix(".png")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def chosen(words: list[str] | None) -> dict[str, Implementation]:
    """The implementations whose name contains one of `words`, whatever the case; all for None."""
    words = [word.lower() for word in words or [""]]
    return {name: one for name, one in registry().items() if any(word in name.lower() for word in words)}


def case(options: argparse.Namespace, length: int) -> Case:
    batch = options.batch or max(1, options.tokens // length)
    dtype = getattr(torch, options.dtype)
    return Case(length, batch, options.heads, options.head_dim, options.mem_len, dtype, options.device)


def measure(options: argparse.Namespace, bench: Bench) -> None:
    """The chosen sections, one after the other."""
    implementations = chosen(options.implementations)
    cases = [case(options, length) for length in options.lengths]
    own = _best_own_backend(implementations, options.device)
    # The extra sections are about two lengths: one that is batched and the longest.
    extra = [one for one in cases if one.length in (512, 2048)] or cases[-1:]
    if own == "reference":
        extra = [one for one in extra if one.length <= sections.CHECKED_LENGTH]

    if "core" in options.sections:
        reserved = sum(RESERVED.get(section, 0) for section in options.sections)
        bench.budget -= reserved
        sections.core(bench, implementations, cases)
        bench.budget += reserved
    if own is None:
        return
    absent = {f"xlnet_kernels {name}" for name, state in xk.backends().items() if not state.available}
    present = {name: one for name, one in implementations.items() if name not in absent}
    layer, long = case(options, 512 if options.device == "cpu" else 1024), case(options, sections.LONG_LENGTH)
    others = {
        "streams": (extra, lambda: sections.streams(bench, own, extra)),
        "module": ([layer], lambda: sections.module(bench, own, layer)),
        "precision": (extra, lambda: sections.precision(bench, own, extra)),
        "long": ([long], lambda: sections.long(bench, present, long)),
    }
    if options.dtype != "float32":
        del others["precision"]
    if options.direction == "forward":
        del others["long"]
    for name, (measured, run) in others.items():
        if name in options.sections and bench.remaining() >= 0:
            run()
        elif name in options.sections:
            for one in measured:
                bench.skip(name, "all", sections.labels(one), sections.USED_UP)


def _best_own_backend(implementations: dict, device: str) -> str | None:
    """The first of this package's backends that was chosen and is ready."""
    for name, state in xk.backends().items():
        if state.available and f"xlnet_kernels {name}" in implementations and (name != "cpu" or device == "cpu"):
            return name
    return None


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; 1 where a backend of this package computes something wrong; 130 where interrupted."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    warnings.filterwarnings("ignore", module="torch")
    torch.manual_seed(0)
    directions = DIRECTIONS if options.direction == "both" else (options.direction,)
    settings = {name: getattr(options, name) for name in ("device", "dtype", "lengths", "heads", "head_dim", "mem_len")}
    results = {
        "benchmark": "attn",
        "environment": environment(options.device),
        "settings": settings | {"seconds": options.seconds, "full": options.full, "sections": list(options.sections)},
        "complete": False,
        "rows": [],
    }
    console, terminal = Console(), sys.stdout.isatty()
    if not terminal:
        console = Console(width=150)
    # Drawn between calls, not by a thread of its own that would share the cores with what is measured.
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    bench = Bench(
        options.device,
        directions,
        seconds=options.seconds,
        rounds=(5, 100) if options.full else (3, 50),
        budget=float("inf") if options.full else options.budget,
        rows=results["rows"],
        save=lambda: write_json(options.output, results),
    )
    began = time.perf_counter()
    with progress:
        task = progress.add_task("preparing", total=None)

        def show(text: str, done: int, total: int) -> None:
            progress.update(task, description=f"{text:60.60}", completed=done, total=total, refresh=True)

        bench.on_step = show
        try:
            measure(options, bench)
            results["complete"] = True
        except KeyboardInterrupt:
            progress.console.print("interrupted: keeping what was measured")
    results["seconds"] = round(time.perf_counter() - began, 1)
    bench.save()
    for table in tables(results["rows"]):
        console.print(table)
    for line in notes(results):
        console.print(line, markup=False, highlight=False)
    console.print(f"{results['seconds']:.0f} s; every number: {_shown(options.output)}", highlight=False)
    if options.plot:
        _plot(results, options.plot, console)
    if not results["complete"]:
        return 130
    wrong = [row for row in results["rows"] if not row.get("check", {"passed": True})["passed"]]
    return 1 if any(row["implementation"].startswith(("xlnet_kernels", "TwoStream")) for row in wrong) else 0


def _plot(results: dict, path: Path, console: Console) -> None:
    from plot import plot

    try:
        plot(results, path)
    except (ImportError, ValueError) as error:
        console.print(f"no picture: {error}", markup=False)
    else:
        console.print(f"picture: {_shown(path)}", highlight=False)


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
