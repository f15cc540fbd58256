"""Counts of work of our GPU kernels and of plain flash attention on the machine: `make gpu-counts`.

    python benchmarks/gpu_counts.py --output benchmarks/results/gpu-counts.json

Our kernels run at the lengths of the table. What plain ones count, of which many tiles are tried, is a polynomial of
the length, exactly: they run at three shorter ones. Beside each bound are the cycles that a simulation predicts
(lib/timing). A star marks those that have the bound of a launch instead: its simulation was below it, or there is none.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import torch  # noqa: E402
import triton  # noqa: E402

import xlnet_kernels as xk  # noqa: E402
from compiled.sass import classify  # noqa: E402
from lib import bounds, kernel_tables, plain_attention  # noqa: E402
from lib.block_order import makespan  # noqa: E402
from lib.machine import cuda_driver  # noqa: E402
from lib.machine.machine import Counts  # noqa: E402
from lib.machine.machine_code import assemble  # noqa: E402
from lib.machine.package import serving  # noqa: E402
from lib.machine.triton_driver import Launch, on_machine  # noqa: E402
from lib.plain_attention import Config  # noqa: E402
from lib.timing import kernel as timing  # noqa: E402

LENGTHS = (256, 512, 768)  # of plain kernels; halves are whole tiles
REPORTED = (512, 2048)
HEAD_DIMS = (64, 128)
PRODUCTS = {"forward": 2, "backward": 5}  # of plain attention, without what is computed again
# All but the first have an order and segments. Two streams: a query row for every sixth position, too, stacked with the
# content rows. Cycles are still for 1024 pairs of a content row and a key, beside which there are 171 of query rows.
CASES = ("none", "order+segments", "dropout", "deterministic", "two streams")
# Tiles of the plain kernels; the table has the best of those that do not spill.
PLAIN = {
    "forward": [Config(128, n, warps, stages) for n in (64, 128) for warps in (4, 8) for stages in (2, 3)],
    "keys": [Config(m, 128, warps, 2) for m in (32, 64) for warps in (4, 8)],
    "rows": [Config(128, n, warps, 2) for n in (32, 64) for warps in (4, 8)],
}


def sum_of(counts: list[Counts], weights: list[Fraction]) -> Counts:
    """A weighted sum, field by field; of lines only that they exist."""

    def combine(values: list):
        if isinstance(values[0], dict):
            return {
                key: combine([value.get(key, 0) for value in values])
                for key in dict.fromkeys(k for v in values for k in v)
            }
        return sum(weight * value for weight, value in zip(weights, values, strict=True))

    return Counts(
        **{f.name: combine([getattr(c, f.name) for c in counts]) for f in fields(Counts) if f.name != "lines"}
    )


def polynomial(length: int, lengths: Sequence[int]) -> list[Fraction]:
    """Factors of the values at `lengths`, whose sum is at `length` of the polynomial through them."""
    weights = []
    for own in lengths:
        weight = Fraction(1)
        for other in lengths:
            if other != own:
                weight *= Fraction(length - other, own - other)
        weights.append(weight)
    return weights


def executed(launches: Sequence[Launch], architecture: int, factors: list[Fraction]) -> Counter[str]:
    """Instructions of machine code by class, of launches of one kernel times their factors."""
    code = assemble(launches[-1].ptx, launches[-1].name, architecture)
    weights = code.weights(launches[-1].counts.lines)
    total: Counter[str] = Counter()
    for launch, factor in zip(launches, factors, strict=True):
        for name, count in code.executed(weights, launch.counts.lines).items():
            total[classify(name)] += count * float(factor)
    return total


def segments_and_order(length: int, two_streams: bool) -> dict:
    """Two segments, half a sequence each; a random order in which every sixth token is predicted, content stream."""
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(1, length, generator=generator).argsort(1).argsort(1)
    mask = xk.RankMask.from_order(order, order % 6 == 0)
    ids = of_rows = (torch.arange(length) >= length // 2).long()[None]
    positions = None
    if two_streams:
        positions = torch.cat([torch.arange(length), torch.arange(0, length, 6)])[None]
        mask, of_rows = mask.rows(positions), ids.gather(1, positions)
    return {"mask": mask, "ids": (of_rows, ids), "positions": positions}


def ours(backend: str, architecture: int, head_dim: int, case: str, length: int) -> dict[str, list[Launch]]:
    """Launches of forward and of backward, one head."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()

    torch.manual_seed(length)
    options: dict = {"content_bias": normal(1, head_dim), "position_bias": normal(1, head_dim)}
    rows = length
    if case != "none":
        given = segments_and_order(length, case == "two streams")
        embed, bias = normal(2, 1, head_dim), normal(1, head_dim)
        options |= {"mask": given["mask"], "segments": xk.Segments(*given["ids"], embed, bias)}
        if given["positions"] is not None:
            options["query_positions"], rows = given["positions"], given["positions"].shape[1]
    if case == "dropout":
        options["dropout_p"] = 0.1
    x = [normal(1, 1, rows, head_dim), normal(1, 1, length, head_dim), normal(1, 1, length, head_dim)]
    rel_key, deterministic = normal(1, 2 * length, head_dim), case == "deterministic"
    with serving(architecture, check=False) as record:
        out = xk.rel_attention(*x, rel_key, backend=backend, deterministic=deterministic, **options)
        forward = len(record.launches)
        out.sum().backward()
    return {"forward": record.launches[:forward], "backward": record.launches[forward:]}


def plain(kernel: str, config: Config, architecture: int, head_dim: int, length: int) -> list[Launch]:
    x = [torch.randn(1, length, head_dim, dtype=torch.bfloat16) for _ in range(6)]
    lse = torch.zeros(1, length)
    with on_machine(architecture, check=False) as record:
        if kernel == "forward":
            plain_attention.forward(*x[:3], config)
        else:
            plain_attention.backward(x[3], x[4], lse, *x[:3], config, config, only=kernel)
    return record.launches


def row(
    kernel: str, direction: str, head_dim: int, architecture: int, case: str, runs: dict[int, list[Launch]], length: int
):
    """One row of the table; `runs`: the launches at each length. Its "launches" have what was counted itself."""
    gpu = bounds.GPUS[architecture]
    total: dict[str, float] = {}
    issued = machine = bound = time = 0.0
    bounds_of, counted, factors = {}, [], polynomial(length, list(runs))
    for launches in zip(*runs.values(), strict=True):  # the same kernel at every length
        counts = sum_of([launch.counts for launch in launches], factors)
        of_machine = executed(launches, architecture, factors)
        issued, machine = issued + counts.issued, machine + of_machine.total()
        needed = {
            name: float(value) * bounds.PAIRS / length**2
            for name, value in bounds.cycles(counts, gpu, of_machine.total()).items()
        }
        total = {name: total.get(name, 0) + value for name, value in needed.items()}
        by = max((name for name in needed if name != bounds.ASSUMED), key=needed.get)
        bound += needed[by]  # kernels run one after the other
        bounds_of[needed[by]] = by
        predicted = prediction(launches, architecture, factors, needed[by] * length**2 / bounds.PAIRS)
        time += predicted["predicted_cycles"] * bounds.PAIRS / length**2
        counted.append(
            {"name": launches[-1].name, "bound_cycles": round(needed[by], 1), "bound_by": by}
            | predicted
            | plainly(counts)
            | {"machine_instructions": {name: round(count) for name, count in of_machine.items()}}
        )
    code = [assemble(launch.ptx, launch.name, architecture) for launch in runs[max(runs)]]
    return {
        "kernel": kernel, "direction": direction, "dtype": "bfloat16", "head_dim": head_dim,
        "architecture": architecture, "length": length, "case": case,
        "bound_cycles": round(bound, 1), "bound_by": bounds_of[max(bounds_of)],
        "predicted_cycles": round(time, 1) if any(x["simulated_cycles"] for x in counted) else None,
        "launches_at_bound": sum(x["at_bound"] for x in counted),
        "ratio_to_limit": round(bound / bounds.limit(gpu, head_dim, PRODUCTS[direction]), 3),
        "spilled_bytes": sum(x.spilled_bytes for x in code), "registers": max(x.registers for x in code),
        "machine_to_ptx": round(machine / float(issued), 3),
        "cycles": {name: round(value, 1) for name, value in total.items()},
        "launches": counted,
    }  # fmt: skip


def prediction(launches: Sequence[Launch], architecture: int, factors: list[Fraction], bound: float) -> dict:
    """Predicted cycles of a multiprocessor for all of a launch, its blocks, and how many of them run side by side.

    Predicted are the simulated ones, but those of the bound if these are more, or if the kernel cannot be simulated at
    each length, when simulated_cycles is None. `launches`, `factors`: see executed.
    """
    total: float | None = 0.0
    blocks, resident = 0.0, None
    for launch, factor in zip(launches, factors, strict=True):
        code = assemble(launch.ptx, launch.name, architecture)
        count = math.prod(launch.grid)
        sizes = count, launch.threads, launch.shared_bytes
        found = timing.predict(code, launch.counts, *sizes, architecture)
        blocks += float(factor * count)
        if found is None or total is None:
            total = resident = None
        else:
            total, resident = total + float(factor * count) * found.cycles / found.resident, found.resident
    at_bound = total is None or total < bound
    return {
        "predicted_cycles": round(bound if at_bound else total),
        "simulated_cycles": None if total is None else round(total), "at_bound": at_bound,
        "blocks": round(blocks), "resident": resident,
    }  # fmt: skip


def plainly(counts: Counts) -> dict:
    """Every count, by its name in Counts, of one head and all of a sequence; those by class and by instruction too."""

    def whole(value):
        return {key: whole(part) for key, part in value.items()} if isinstance(value, dict) else round(value)

    return {f.name: whole(getattr(counts, f.name)) for f in fields(Counts) if f.name != "lines"}


def best_plain(direction: str, architecture: int, head_dim: int, say: Callable) -> dict[int, list[Launch]]:
    """Launches at each length of the plain kernels with the tiles of least bound, of these the fastest predicted."""
    found: dict[int, list[Launch]] = {length: [] for length in LENGTHS}
    for kernel in ("forward",) if direction == "forward" else ("keys", "rows"):
        best, least = None, (float("inf"),)
        for config in PLAIN[kernel]:
            try:
                runs = {length: plain(kernel, config, architecture, head_dim, length) for length in LENGTHS}
            except triton.runtime.errors.OutOfResources:
                continue
            last = row("plain", direction, head_dim, architecture, "none", runs, REPORTED[-1])
            cost = last["spilled_bytes"], last["bound_cycles"], last["predicted_cycles"] or math.inf
            bound = f"{last['bound_cycles']} {last['bound_by']}, predicted {kernel_tables.predicted(last)}"
            say(f"plain {kernel} sm_{architecture} D{head_dim} {tuple(config)}: {bound}")
            if cost < least:
                best, least = runs, cost
        for length, more in best.items():
            found[length] += more if kernel != "rows" else [launch for launch in more if launch.name != "delta_kernel"]
    return found


def table(
    architectures: list[int],
    kernels: list[str],
    cases: Sequence[str],
    say: Callable,
    earlier: list[dict] | None = None,
) -> list[dict]:
    """The rows of these kernels, and of the plain one, which is not counted again where rows of `earlier` have it."""
    rows = []
    for architecture in architectures:
        for head_dim in HEAD_DIMS:
            floor = {}
            for r in earlier or []:
                if (r["kernel"], r["architecture"], r["head_dim"]) == ("plain", architecture, head_dim):
                    rows.append(r)
                    floor[r["direction"], r["length"]] = r["bound_cycles"]
            for direction in PRODUCTS if earlier is None else ():
                runs = best_plain(direction, architecture, head_dim, say)
                for length in REPORTED:
                    rows.append(row("plain", direction, head_dim, architecture, "none", runs, length) | {"ratio": 1.0})
                    floor[direction, length] = rows[-1]["bound_cycles"]
            for kernel in kernels:
                for case in cases:
                    runs = {length: ours(kernel, architecture, head_dim, case, length) for length in REPORTED}
                    for direction in PRODUCTS:
                        for length, run in runs.items():
                            this = {length: run[direction]}
                            found = row(kernel, direction, head_dim, architecture, case, this, length)
                            found["ratio"] = round(found["bound_cycles"] / floor[direction, length], 3)
                            rows.append(found)
                            say(json.dumps(found))
    return rows


def with_the_rest(rows: list[dict], earlier: list[dict]) -> list[dict]:
    """These rows and those of `earlier` for other kernels and architectures, in its order."""

    def identity(r: dict) -> tuple:
        return tuple(r[key] for key in ("kernel", "direction", "head_dim", "architecture", "length", "case"))

    found = {identity(r): r for r in earlier} | {identity(r): r for r in rows}
    return list(found.values())


def calibrate(rows: list[dict]) -> list[dict]:
    """Published speeds beside what the plain kernel's bound and its predicted time would mean.

    The quotients are what a bound and a prediction are worth.
    """
    found = []
    keys = ("architecture", "direction", "head_dim", "length")
    for *values, heads, published, source in bounds.PUBLISHED:
        for r in rows:
            if r["kernel"] == "plain" and [r[key] for key in keys] == values:
                gpu, products = bounds.GPUS[r["architecture"]], PRODUCTS[r["direction"]]
                speed = bounds.teraflops(gpu, r["bound_cycles"], r["head_dim"], products)
                line = dict(zip(keys, values, strict=True)) | {
                    "bound_teraflops": round(speed), "published_teraflops": published,
                    "quotient": round(published / speed, 3), "source": source,
                }  # fmt: skip
                if r.get("predicted_cycles") is not None:
                    cycles = of_all_heads(r["launches"], heads, gpu.multiprocessors)
                    of_pairs = cycles * gpu.multiprocessors * bounds.PAIRS / (heads * r["length"] ** 2)
                    speed = bounds.teraflops(gpu, of_pairs, r["head_dim"], products)
                    line |= {"predicted_teraflops": round(speed), "prediction_error": round(speed / published - 1, 3)}
                found.append(line)
    return found


def of_all_heads(launches: list[dict], heads: int, multiprocessors: int) -> float:
    """Predicted cycles until the last block of all launches has ended; those of a launch take equally long."""
    total = 0.0
    for launch in launches:
        resident = launch["resident"] or 1
        of_block = launch["predicted_cycles"] * resident / launch["blocks"]
        total += makespan([of_block] * (heads * launch["blocks"]), multiprocessors * resident)
    return total


def show(rows: list[dict]) -> None:
    head = f"{'kernel':8}{'direction':10}{'D':>4}{'sm':>4}{'L':>6}  {'case':16}{'cycles':>8}  {'bound by':15}"
    print(head + f"{'/plain':>8}{'/limit':>8}{'spills':>8}{'predicted cycles':>18}")
    for r in sorted(
        rows, key=lambda r: (r["architecture"], r["head_dim"], r["direction"], r["length"], r["bound_cycles"])
    ):
        print(
            f"{r['kernel']:8}{r['direction']:10}{r['head_dim']:4}{r['architecture']:4}{r['length']:6}  {r['case']:16}"
            f"{r['bound_cycles']:8.1f}  {r['bound_by']:15}{r['ratio']:8.2f}{r['ratio_to_limit']:8.2f}"
            f"{r['spilled_bytes']:8}{kernel_tables.predicted(r):>18}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--kernels", nargs="*", default=["triton", "cuda"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--update", type=Path, help="write into this results file, whose other rows stay")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels = [k for k in options.kernels if k != "cuda" or cuda_driver.unavailable() is None]
    if kernels != options.kernels:
        print(f"cuda is left out: {cuda_driver.unavailable()}", file=sys.stderr)

    def say(line: str) -> None:
        if options.verbose:
            print(line, file=sys.stderr, flush=True)

    earlier = json.loads(options.update.read_text())["rows"] if options.update else None
    rows = table(options.architectures, kernels, options.cases, say, earlier)
    show(rows)
    rows = with_the_rest(rows, earlier or [])
    calibration = calibrate(rows)
    for r in calibration:
        print(
            f"plain {r['direction']} D{r['head_dim']} L{r['length']} on {bounds.GPUS[r['architecture']].name}: at most "
            f"{r['bound_teraflops']} TFLOP/s by its bound, {r.get('predicted_teraflops', '-')} predicted, "
            f"{r['published_teraflops']} measured ({r['source']})"
        )
    output = options.output or options.update
    if output:
        parts = [",\n".join(json.dumps(r) for r in part) for part in (calibration, rows)]
        head = f'"triton": "{triton.__version__}", "calibration": [\n{parts[0]}\n], "rows": [\n{parts[1]}\n]'
        output.write_text(f"{{{head}}}\n")


if __name__ == "__main__":
    main()
