"""One run of a benchmark from the command line: progress, interruption, the results file, tables and picture."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .harness import environment, write_json
from .measure import Bench
from .report import notes, show

try:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError:  # then there is plain text alone
    Console = None

RESULTS = Path(__file__).parents[1] / "results"


def common_options(parser: argparse.ArgumentParser, dtypes: tuple[str, ...]) -> None:
    """The options that every benchmark has."""
    add = parser.add_argument
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: a GPU if there is one",
    )
    add("--dtype", choices=dtypes, default="float32", help="of all inputs; default float32")
    add("--output", type=Path, help="default benchmarks/results/BENCHMARK-DEVICE-DTYPE.json")
    add("--plot", type=Path, nargs="?", const=Path(), metavar="PNG", help="also a picture; default beside the JSON")


def check_common(parser: argparse.ArgumentParser, options: argparse.Namespace, benchmark: str) -> None:
    """Fills in the names of the files, and stops where there is no such device."""
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    options.output = options.output or RESULTS / f"{benchmark}-{options.device}-{options.dtype}.json"
    if options.plot == Path():
        options.plot = options.output.with_suffix(".png")


def positive(text: str) -> int:
    """An option's value that must be at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def run(
    benchmark: str,
    options: argparse.Namespace,
    settings: dict[str, object],
    measure: Callable[[Bench], None],
    *,
    directions: tuple[str, ...],
    rounds: tuple[int, int],
    seconds: float,
    budget: float = float("inf"),
    once: bool = False,
) -> int:
    """Measure, print, write. Exit status 0; 1 where this package computes something wrong; 130 where interrupted."""
    signal.signal(signal.SIGTERM, _interrupt)
    warnings.filterwarnings("ignore", module="torch")
    torch.manual_seed(0)
    results = {
        "benchmark": benchmark,
        "environment": environment(options.device),
        "settings": settings,
        "complete": False,
        "rows": [],
    }
    bench = Bench(
        options.device,
        directions,
        seconds=seconds,
        rounds=rounds,
        budget=budget,
        once=once,
        rows=results["rows"],
        save=lambda: write_json(options.output, results),
    )
    began = time.perf_counter()
    with _progress() as bench.on_step:
        try:
            measure(bench)
            results["complete"] = True
        except KeyboardInterrupt:
            print("interrupted: keeping what was measured", file=sys.stderr)
    results["seconds"] = round(time.perf_counter() - began, 1)
    bench.save()
    show(results["rows"], shutil.get_terminal_size().columns if sys.stdout.isatty() else 150)
    print(*notes(results), f"{results['seconds']:.0f} s; every number: {_shown(options.output)}", sep="\n")
    if options.plot:
        _plot(results, options.plot)
    if not results["complete"]:
        return 130
    wrong = [row for row in results["rows"] if not row.get("check", {"passed": True})["passed"]]
    own = ("xlnet_kernels", "TwoStream", "memory", "padded", "packed")
    return 1 if any(row["implementation"].startswith(own) for row in wrong) else 0


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A function to call between calls: it draws a bar without a thread of its own, to leave the cores alone."""
    if Console is None:
        yield lambda text, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task("preparing", total=None)

        def show(text: str, done: int, total: int) -> None:
            progress.update(task, description=f"{text:60.60}", completed=done, total=total, refresh=True)

        yield show


def _plot(results: dict, path: Path) -> None:
    from .plot import plot

    try:
        plot(results, path)
    except (ImportError, ValueError) as error:
        print(f"no picture: {error}")
    else:
        print(f"picture: {_shown(path)}")


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
