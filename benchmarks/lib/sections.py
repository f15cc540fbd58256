"""Measurements of the benchmark: one function per section of its report."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .harness import CannotRun, Run, at_precision
from .implementations import BASELINE, TRANSFORMERS, Implementation, package_backend, plain_sdpa
from .measure import DIRECTIONS, USED_UP, Bench, Job
from .modules import MODULE, TRANSFORMERS_MODULE, module_reference, our_module, transformers_module
from .problem import Case, Problem, build_problem
from .products import Products, add_shares

CHECKED_LENGTH = 512  # the longest sequence that is also computed in float64, every map in memory
# what a problem has of (mask, segments, memory of half its length, query stream)
TERMS = {
    "mask, segments": (True, True, False, False),
    "no mask": (False, True, False, False),
    "no segments": (True, False, False, False),
    "positions alone": (False, False, False, False),
    "with memory": (True, True, True, False),
    "with query stream": (True, True, False, True),
    "everything": (True, True, True, True),
}
# The dtype of a problem's tensors, the dtype whose tolerance the results have, torch's float32 precision.
PRECISIONS = {
    "float32": (torch.float32, torch.float32, "highest"),
    "high float32": (torch.float32, torch.bfloat16, "high"),
    "medium float32": (torch.float32, torch.bfloat16, "medium"),
    "bfloat16": (torch.bfloat16, torch.bfloat16, "highest"),
}
LONG_LENGTHS = {"cpu": 8192, "cuda": 65536}
LEFT_OUT = "left out to stay within the time budget (--budget, --full)"
COMPILING = 20  # seconds that compiling a peer is thought to take before one has been compiled
LONG_LIMIT = 4_000_000_000  # bytes; what needs more at that length is left out with that as its reason

Reference = Callable[[str], dict[str, Tensor]]


def core(
    bench: Bench,
    implementations: dict[str, Implementation],
    cases: list[Case],
    compiled_lengths: list[int] | None = None,
    reserved: float = 0.0,
) -> None:
    """Every implementation at every length, each checked at one of them; compiled ones where they are asked for.

    Samples become fewer, down to one, so that `reserved` seconds are left and all lengths have as much time.
    """
    if not implementations:
        return
    checked = _checked(cases, compiled_lengths)
    rest = sorted((case for case in cases if case != checked), key=lambda case: case.length)
    for done, case in enumerate([checked, *rest]):
        if bench.used_up(0.0):
            bench.skip("core", "all", labels(case), USED_UP)
            continue
        limit = max(0.0, bench.remaining() - reserved) / (1 + len(rest) - done)
        if case == checked:
            here = implementations
        else:
            here = {name: one for name, one in implementations.items() if _asked(one, case, compiled_lengths)}
        measured = _core_group(bench, here, case, check=case == checked, limit=limit)
        if case == checked:  # what does not run there at all does not run at other lengths either: one row says so
            implementations = {name: one for name, one in implementations.items() if name in measured}


def peers(
    bench: Bench,
    implementations: dict[str, Implementation],
    cases: list[Case],
    compiled_lengths: list[int] | None = None,
) -> None:
    """Others beside what `core` has measured, at as many lengths as the time that is left allows.

    Each of them is checked at one length first; then come long lengths before short ones.
    """
    if not implementations:
        return
    checked = _checked(cases, compiled_lengths)
    compiled = [name for name, one in implementations.items() if one.compiled]
    first = {name: _if_it_fits(bench, one, compiled) for name, one in implementations.items()}
    estimates = _core_group(bench, first, checked, check=True)
    for case in sorted((case for case in cases if case != checked), key=lambda case: -case.length):
        costs = {
            name: _cost(bench, implementations[name], rows, checked, case)
            for name, rows in estimates.items()
            if _asked(implementations[name], case, compiled_lengths)
        }
        left_out = plan(costs, bench.remaining())
        for name in left_out:
            bench.skip("core", name, labels(case), LEFT_OUT)
        chosen = {name: implementations[name] for name in costs if name not in left_out}
        if chosen:
            _core_group(bench, chosen, case, check=False)


def _checked(cases: list[Case], compiled_lengths: list[int] | None) -> Case:
    """The case at which everything is to run and is checked: what does not run there is dropped."""
    lengths = compiled_lengths or [case.length for case in cases]
    short = [case for case in cases if case.length <= CHECKED_LENGTH and case.length in lengths]
    if short:
        return max(short, key=lambda case: case.length)
    return replace(min(cases, key=lambda case: case.length), length=CHECKED_LENGTH // 2, batch=1)


def _asked(one: Implementation, case: Case, compiled_lengths: list[int] | None) -> bool:
    """Whether `one` is to run at this length."""
    return not one.compiled or not compiled_lengths or case.length in compiled_lengths


def _if_it_fits(bench: Bench, one: Implementation, compiled: list[str]) -> Implementation:
    """`one`, given up where compiling it would take longer than there is time."""

    def prepare(problem: Problem) -> Run:
        spent = _compiling(bench.rows, compiled)
        if one.compiled and bench.remaining() < max(spent, default=COMPILING):
            why = f"compiling others has taken {sum(spent):.0f} s" if spent else f"compiling takes about {COMPILING} s"
            raise CannotRun(f"left out to stay within the time budget: {why} (--budget, --full)")
        return one.prepare(problem)

    return replace(one, prepare=prepare)


def _compiling(rows: list[dict], compiled: list[str]) -> list[float]:
    """Seconds that each of the peers `compiled` has taken to compile, all directions together."""
    spent: dict[str, float] = {}
    for row in rows:
        if row["implementation"] in compiled and "estimate_s" in row:
            name, took = row["implementation"], row.get("first_call_s", 0.0) - row["estimate_s"]
            spent[name] = spent.get(name, 0.0) + max(0.0, took)
    return list(spent.values())


def plan(costs: dict[str, float], budget: float) -> list[str]:
    """Names in `costs`, in seconds, that do not fit into `budget`, the first ones first.

    >>> plan({"peer": 3.0, "slow": 5.0, "other": 2.0}, 6.0)
    ['slow']
    """
    left_out = []
    for name, cost in costs.items():
        if cost <= budget:
            budget -= cost
        else:
            left_out.append(name)
    return left_out


def streams(bench: Bench, backend: str, cases: list[Case]) -> None:
    """The cost of the query stream: L/6 rows stacked under the content rows."""
    for case in cases:
        jobs = []
        for name, two_streams in (("content stream", False), ("both streams, N = L/6", True)):
            problem = build_problem(case, two_streams)
            jobs.append(_job(name, case, problem, package_backend(backend), _reference(problem, case)))
        bench.group("streams", jobs, labels(case), baseline="content stream")


def terms(bench: Bench, implementations: dict[str, Implementation], case: Case) -> None:
    """The cost of each part of the problem, left out or added, against plain SDPA of as many rows and keys."""
    for name, (masked, segmented, memory, two_streams) in TERMS.items():
        sized = replace(case, mem_len=case.length // 2 if memory else 0)
        problem = build_problem(sized, two_streams)
        if not masked:
            problem = replace(problem, mask=None)
        if not segmented:
            problem = replace(problem, query_ids=None, key_ids=None)
        reference = _reference(problem, sized)
        jobs = [_implementation_job(one, sized, problem, reference) for one in implementations.values()]
        bench.group("terms", jobs, labels(sized) | {"case": name}, baseline=BASELINE)


def precision(bench: Bench, backend: str, cases: list[Case]) -> None:
    """This package's backend and plain SDPA in PRECISIONS."""
    for case in cases:
        jobs = []
        for name, (dtype, rounds_like, allowed) in PRECISIONS.items():
            if allowed != "highest" and case.device != "cpu":  # CUDA takes TF32 there, as for other precisions
                continue
            typed, prepares = replace(case, dtype=dtype), (package_backend(backend), plain_sdpa)
            problem = build_problem(typed)
            if allowed != "highest":
                prepares = tuple(functools.partial(_at_precision, allowed, prepare) for prepare in prepares)
            own = _job(f"xlnet_kernels {name}", typed, problem, prepares[0], _reference(problem, typed))
            jobs += [
                replace(own, dtype=rounds_like),
                _job(f"{BASELINE}, {name}", typed, problem, prepares[1], None),
            ]
        bench.group("precision", jobs, labels(case), baseline="xlnet_kernels float32")


def _at_precision(precision: str, prepare: Callable[[Problem], Run], problem: Problem) -> Run:
    return at_precision(prepare(problem), precision)


def module(bench: Bench, backend: str, case: Case) -> None:
    """The whole layer, both streams: projections, attention, output projection, residual and LayerNorm."""
    reference = functools.cache(lambda direction: module_reference(case, direction))
    jobs = [
        Job(MODULE, lambda: our_module(case, backend), reference, dtype=case.dtype),
        Job(TRANSFORMERS_MODULE, lambda: transformers_module(case), reference, dtype=case.dtype),
    ]
    bench.group("module", jobs, labels(case), base=TRANSFORMERS_MODULE)


def long(bench: Bench, implementations: dict[str, Implementation], case: Case) -> None:
    """Peak memory of one forward and backward pass at a length where L x K maps hurt."""
    problem = build_problem(case)
    bench = replace(bench, directions=("backward",))  # the rows list is shared
    jobs = [_implementation_job(one, case, problem) for one in implementations.values()]
    bench.group("long", jobs, labels(case), baseline=BASELINE, memory_limit=LONG_LIMIT, single_pass=True)


def _core_group(
    bench: Bench, implementations: dict[str, Implementation], case: Case, check: bool, limit: float = math.inf
) -> dict[str, dict]:
    """Returns each measured implementation's rows by direction; earlier ones at the same length stand beside them."""
    here = labels(case).items()
    beside = [row for row in bench.rows if row["section"] == "core" and here <= row.items()]
    problem = build_problem(case)
    reference = _reference(problem, case) if check else None
    jobs = [_implementation_job(one, case, problem, reference) for one in implementations.values()]
    products = Products(case)
    products.sample()
    rows = bench.group("core", jobs, labels(case), baseline=BASELINE, base=TRANSFORMERS, limit=limit, beside=beside)
    products.sample()
    add_shares(rows, case, products)
    bench.save()
    found: dict[str, dict] = {}
    for row in rows:
        if row["status"] == "ok":
            found.setdefault(row["implementation"], {})[row["direction"]] = row
    return found


def _cost(bench: Bench, implementation: Implementation, rows: dict[str, dict], measured: Case, case: Case) -> float:
    """Seconds that `implementation` will take at `case`, from its rows at `measured`."""
    if implementation.longest is not None and case.length > implementation.longest:
        return 0.0
    growth = case.map_bytes / measured.map_bytes
    if growth > 1 and implementation.maps[0]:
        growth *= 1.5  # maps that were still in the cache
    cost = 0.0
    for row in rows.values():
        once = row["estimate_s"] * growth
        compiling = max(0.0, row["first_call_s"] - row["estimate_s"]) if implementation.compiled else 0.0
        cost += compiling + 2 * once + max(bench.rounds[0] * once, bench.seconds)
    return cost


def _implementation_job(one: Implementation, case: Case, problem: Problem, reference: Reference | None = None) -> Job:
    def prepare(problem: Problem) -> Run:
        if one.longest is not None and case.length > one.longest:
            raise CannotRun(f"only up to L {one.longest}: it keeps every L x K map")
        return one.prepare(problem)

    needs = {direction: int(maps * case.map_bytes) for direction, maps in zip(DIRECTIONS, one.maps, strict=True)}
    return replace(_job(one.name, case, problem, prepare, reference if one.checked else None), needs=needs)


def _job(
    name: str, case: Case, problem: Problem, prepare: Callable[[Problem], Run], reference: Reference | None
) -> Job:
    labels = {"dtype": _short(case.dtype), "rows": problem.query.shape[2]}
    return Job(name, lambda: prepare(problem), reference, labels=labels, dtype=case.dtype)


def _reference(problem: Problem, case: Case) -> Reference | None:
    """Output or gradients in float64, computed once per direction; None where the maps would be too large."""
    if case.length > CHECKED_LENGTH:
        return None
    return functools.cache(functools.partial(operator_reference, problem))


def operator_reference(problem: Problem, direction: str) -> dict[str, Tensor]:
    """Output or gradients in float64."""
    run = package_backend("reference")(problem.double())
    values = run.step(direction)
    return dict(zip(["out"] if direction == "forward" else run.leaves, values, strict=True))


def labels(case: Case) -> dict[str, object]:
    """Labels of a row for its problem."""
    return {
        "length": case.length,
        "batch": case.batch,
        "rows": case.length,
        "mem_len": case.mem_len,
        "heads": case.heads,
        "head_dim": case.head_dim,
        "dtype": _short(case.dtype),
    }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
