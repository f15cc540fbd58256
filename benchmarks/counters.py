"""What binds the kernels of one call, by the GPU's own counters: Nsight Compute (ncu) around a single call.

    python benchmarks/counters.py cuda --length 2048 --head-dim 64 --dtype bfloat16
    python benchmarks/counters.py flash --direction forward              plain SDPA's kernel, to compare with
    python benchmarks/counters.py cuda --csv FILE                        the table of what ncu wrote before

The first word is what an implementation of attn.py has in its name. ncu runs each kernel once for every few counters,
with empty caches; clocks are left alone. Needs a GPU, ncu, and the right to read counters.
"""

from __future__ import annotations

import argparse
import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from attn import chosen
from lib import session
from lib.harness import environment, write_json
from lib.problem import Case, build_problem
from lib.report import markdown
from lib.session import positive

# Shares of what a unit can do, in % of the kernel's whole time: the first of these names that ncu has measured.
# "active" instead of "elapsed" is what its sections have: of the cycles in which a multiprocessor had work.
UNITS = {
    "tensor cores": ("sm__pipe_tensor_cycles_active", "sm__pipe_tensor_op_hmma_cycles_active"),
    "issue": ("smsp__issue_active", "sm__inst_issued", "sm__inst_executed"),
    "exponentials (XU)": ("sm__inst_executed_pipe_xu",),
    "ALU": ("sm__inst_executed_pipe_alu", "sm__pipe_alu_cycles_active"),
    "FMA": ("sm__pipe_fma_cycles_active", "sm__inst_executed_pipe_fma"),
    "loads, stores": ("sm__inst_executed_pipe_lsu",),
    "shared memory": ("l1tex__data_pipe_lsu_wavefronts_mem_shared", "l1tex__data_pipe_lsu_wavefronts"),
    "L2": ("lts__throughput", "lts__t_sectors"),
    "DRAM": ("dram__throughput", "gpu__dram_throughput"),
}
SHARES = ("avg.pct_of_peak_sustained_elapsed", "avg.pct_of_peak_sustained_active")
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
DURATION, REGISTERS = "gpu__time_duration.sum", "launch__registers_per_thread"
STALL = re.compile(r"smsp__average_warps_issue_stalled_(?!\w*not_issued)(\w+)_per_issue_active\.ratio")
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "SchedulerStats", "WarpStateStats")
SECTIONS += ("Occupancy", "LaunchStats")
NANOSECONDS = {"ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}
BUSY = 60  # % from which on a unit is what binds, as in ncu's own rules; below it, waiting is


def command(csv_file: Path, call: list[str], with_metrics: bool = True) -> list[str]:
    """ncu around `call`, writing `csv_file`; without metrics by name where this ncu does not know one of them."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    names = [f"{alternatives[0]}.{SHARES[0]}" for alternatives in UNITS.values()]
    metrics = ["--metrics", ",".join([*names, OCCUPANCY, DURATION])] if with_metrics else []
    options = ["--profile-from-start", "off", "--clock-control", "none", *sections, *metrics]
    options += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(csv_file)]
    return ["ncu", *options, sys.executable, *call]


def read(text: str) -> list[dict]:
    """One dict per kernel in what `ncu --csv --page raw` wrote: its "kernel" and the numbers by ncu's names.

    Times are in nanoseconds. Of the rest of a row, nothing is kept: it names the machine.

    Raises:
        ValueError: there is no table; the message has what ncu says about it.
    """
    lines = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    header = next((line for line in lines if "Kernel Name" in line), None)
    if header is None:
        said = [line for line in text.splitlines() if line.startswith("==ERROR==")]
        raise ValueError(f"no table in what ncu wrote: {'; '.join(said) or 'nothing was profiled'}")
    rows = [dict(zip(header, line, strict=False)) for line in lines[lines.index(header) + 1 :]]
    if "Metric Name" in header:  # one line for each metric, as without --page raw
        return _joined(rows)
    units = rows.pop(0) if rows and not rows[0]["ID"] else {}
    return [{"kernel": row["Kernel Name"], **_numbers(row, units)} for row in rows]


def _joined(rows: list[dict]) -> list[dict]:
    found: dict[str, dict] = {}
    for row in rows:
        one = found.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        name = row["Metric Name"]
        one |= _numbers({name: row["Metric Value"]}, {name: row["Metric Unit"]})
    return list(found.values())


def _numbers(row: dict[str, str], units: dict[str, str]) -> dict[str, float]:
    found = {}
    for name, text in row.items():
        if "__" in name:  # a metric
            try:
                value = float(text.replace(",", ""))
            except ValueError:  # "n/a", or a word
                continue
            found[name] = value * NANOSECONDS.get(units.get(name, ""), 1) if name == DURATION else value
    return found


def summarise(kernel: dict) -> dict:
    """What the table shows of a kernel that `read` has found, and what binds it."""
    shares = {unit: _share(kernel, alternatives) for unit, alternatives in UNITS.items()}
    stalls = {match[1]: value for name, value in kernel.items() if (match := STALL.fullmatch(name))}
    stalls.pop("selected", None)  # a warp that issues is not waiting
    worst = sorted(stalls, key=stalls.get, reverse=True)[:3]
    busiest = max((unit for unit in shares if shares[unit] is not None), key=shares.get, default=None)
    if busiest is None:
        binds = "not measured"
    elif shares[busiest] >= BUSY:
        binds = busiest
    else:
        binds = f"waiting ({', '.join(worst)})" if worst else "waiting"
    return {
        "kernel": short(kernel["kernel"]),
        "us": round(kernel[DURATION] / 1e3, 2) if DURATION in kernel else None,
        "registers": kernel.get(REGISTERS),
        "occupancy": kernel.get(OCCUPANCY),
        "shares": shares,
        "stalls": {name: stalls[name] for name in worst},
        "binds": binds,
        "metrics": {name: value for name, value in kernel.items() if name != "kernel"},
    }


def _share(kernel: dict, alternatives: tuple[str, ...]) -> float | None:
    names = (f"{name}.{share}" for share in SHARES for name in alternatives)
    return next((kernel[name] for name in names if name in kernel), None)


def short(name: str) -> str:
    """A kernel's name without its return type, namespaces, template and other arguments.

    >>> short("void xk::forward_kernel<c10::BFloat16, (int)64>(xk::Arguments)")
    'forward_kernel'
    """
    return re.split(r"[<(]", name.replace("(anonymous namespace)::", ""))[0].split()[-1].split("::")[-1]


def call(options: argparse.Namespace) -> None:
    """The call, twice to compile and warm up and once for ncu to see."""
    dtype = getattr(torch, options.dtype)
    batch = max(1, options.tokens // options.length)
    case = Case(options.length, batch, options.heads, options.head_dim, options.mem_len, dtype, options.device)
    (implementation, *_) = chosen([options.implementation], options.device).values()
    run = implementation.prepare(build_problem(case, options.both_streams))
    for _ in range(2):
        run.step(options.direction)
    if options.device == "cpu":
        return
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run.step(options.direction)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def measure(arguments: list[str], csv_file: Path) -> str:
    """What ncu writes about the call that `arguments` describe.

    Raises:
        ValueError: ncu could not be run or has measured nothing.
    """
    csv_file.parent.mkdir(parents=True, exist_ok=True)
    for with_metrics in (True, False):
        csv_file.unlink(missing_ok=True)
        words = command(csv_file, [str(Path(__file__)), *arguments, "--call"], with_metrics)
        try:
            status = subprocess.run(words).returncode
        except OSError as error:
            raise ValueError(f"ncu cannot be run: {error.strerror}") from error
        text = csv_file.read_text() if csv_file.exists() else ""
        if status == 0 or "Failed to find metric" not in text:
            break
    return text


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("implementation", help='a part of its name: "cuda", "triton", "flash", "cuDNN", "efficient"')
    add("--device", choices=("cpu", "cuda"), default="cuda", help="on the CPU: with --call alone")
    add("--direction", choices=("forward", "backward"), default="backward", help="backward: forward and backward")
    add("--length", type=positive, default=2048)
    add("--tokens", type=positive, default=16384, help="B = tokens / length")
    add("--heads", type=positive, default=16)
    add("--head-dim", type=positive, default=64)
    add("--mem-len", type=int, default=0)
    add("--both-streams", action="store_true", help="with query-stream rows")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--output", type=Path, help="default benchmarks/results/counters-IMPLEMENTATION-HEAD_DIM-DTYPE.json")
    add("--csv", type=Path, help="what ncu wrote before, instead of running it")
    add("--call", action="store_true", help="only the call, for ncu")
    add("--show", action="store_true", help="only print ncu's command line")
    options = parser.parse_args(arguments)
    if not chosen([options.implementation], options.device):
        parser.error(f"implementation: none has a name with {options.implementation!r} in it")
    name = f"counters-{options.implementation}-{options.head_dim}-{options.dtype}.json"
    options.output = options.output or session.RESULTS / name
    return options


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; 1 where nothing was measured."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    csv_file = options.output.with_suffix(".log")  # which git ignores: it names machine and folders
    if options.call:
        call(options)
        return 0
    if options.show:
        given = [word for word in arguments if word != "--show"]
        print(shlex.join(command(csv_file, [str(Path(__file__)), *given, "--call"])))
        return 0
    try:
        text = options.csv.read_text() if options.csv else measure(arguments, csv_file)
        kernels = [summarise(kernel) for kernel in read(text)]
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    left_out = ("output", "csv", "call", "show", "device")
    settings = {name: value for name, value in vars(options).items() if name not in left_out}
    facts = environment("cuda" if torch.cuda.is_available() else "cpu")
    results = {"benchmark": "counters", "environment": facts, "settings": settings, "kernels": kernels}
    write_json(options.output, results)
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
