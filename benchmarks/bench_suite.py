"""The benchmark suite: measures, and keeps the result as this machine's baseline or compares it with that.

    python benchmarks/bench_suite.py                      measure; the result is the baseline from now on
    python benchmarks/bench_suite.py --compare            measure and compare; exit status 1 where a case is slower
    python benchmarks/bench_suite.py --compare -k memory  some cases only, as pytest selects them

Baselines are comparable on machines of one kind only, and are kept under its name: your own in .benchmarks/, which git
ignores, a committed one in benchmarks/results/. A case that seems slower is measured once more before it counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lib.harness import environment, write_json
from regressions import Change, compare, confirmed, differences, machine, ratios

ROOT = Path(__file__).parents[1]
SUITE = Path(__file__).parent / "suite"
OWN, COMMITTED = ROOT / ".benchmarks", ROOT / "benchmarks" / "results"


def find_baseline(name: str, folders: tuple[Path, ...] = (OWN, COMMITTED)) -> Path | None:
    """The first folder's baseline for machines called `name`."""
    return next((path for path in (folder / f"suite-{name}.json" for folder in folders) if path.exists()), None)


def measure(options: list[str], cases: list[str] | None = None) -> dict | None:
    """A run of the suite, or of some of its cases, as pytest-benchmark reports it; None where it failed."""
    chosen = [str(SUITE)] if cases is None else [f"{SUITE}/test_speed.py::test_{name}" for name in cases]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pytest", *chosen, "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["-o", "addopts=", "--benchmark-quiet", "--benchmark-disable-gc", f"--benchmark-json={report}"]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        # nobody wants to know how fast Triton's interpreter is; a worker of xdist would time nothing
        without = ("TRITON_INTERPRET", "PYTEST_XDIST_WORKER")
        variables = {name: value for name, value in os.environ.items() if name not in without}
        done = subprocess.run([*command, *options], env=variables | {"PYTHONPATH": paths})
        if done.returncode or not report.exists():
            return None
        return json.loads(report.read_text())


def lines(changes: list[Change]) -> list[str]:
    """One line for each case: ratio then, ratio now, growth and what it may be."""
    width = max(len(change.name) for change in changes)
    found = [f"{'case':{width}}  before     now  change   bound"]
    for change in changes:
        before, now = (f"{ratio.median:6.2f}x" if ratio else "      -" for ratio in (change.before, change.now))
        text = f"{change.name:{width}} {before} {now}"
        if change.growth is not None:
            text += f" {change.growth:+7.1%} {change.bound:+7.1%}{'  SLOWER' if change.is_regression else ''}"
        found.append(text)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; 1 where a case is slower than its baseline; 2 where there is no result or no baseline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="with the baseline, which stays as it is")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="default this machine's")
    options, selection = parser.parse_known_args(arguments)
    facts = environment("cuda" if _has_gpu() else "cpu")
    kept = options.baseline
    if options.compare:
        kept = kept or find_baseline(machine(facts))
        if kept is None or not kept.exists():
            print(f"no baseline {kept or 'suite-' + machine(facts) + '.json'}: run without --compare", file=sys.stderr)
            return 2
    report = measure(selection)
    if report is None:
        print("the suite failed: nothing is kept or compared", file=sys.stderr)
        return 2
    if not options.compare:
        kept = kept or OWN / f"suite-{machine(facts)}.json"
        write_json(kept, slim(report))
        print(*lines(compare({}, ratios(report))), f"baseline: {kept.name}", sep="\n")
        return 0

    baseline = json.loads(kept.read_text())
    changes = compare(ratios(baseline), ratios(report))
    slower = [change.name for change in changes if change.is_regression]
    if slower:
        print(f"measuring again: {', '.join(slower)}")
        again = measure(selection, slower)
        changes = confirmed(changes, ratios(again) if again else {})
    print(*lines(changes), *differences(baseline["machine_info"], report["machine_info"]), sep="\n")
    return 1 if any(change.is_regression for change in changes) else 0


def slim(report: dict) -> dict:
    """What a baseline is read for, and the times for whoever looks at it."""
    cases = [
        {
            "name": case["name"],
            "extra_info": case["extra_info"],
            "stats": {name: case["stats"][name] for name in ("median", "q1", "q3", "rounds")},
        }
        for case in report["benchmarks"]
    ]
    return {"machine_info": report["machine_info"], "benchmarks": cases}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
