"""Measuring a group of implementations on one problem: check, memory, interleaved times, ratios; each one a row."""

from __future__ import annotations

import gc
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .harness import CannotRun, Run, free_memory, peak_memory, seconds, summary, tidy, time_interleaved

USED_UP = "left out: the time budget is used up (--budget, --full)"
DIRECTIONS = ("forward", "backward")  # "backward" stands for forward and backward together

# Largest difference from float64, relative to the largest value; gradients are sums of many rounded terms.
TOLERANCE = {
    torch.float64: {"forward": 1e-12, "backward": 1e-11},
    torch.float32: {"forward": 1e-5, "backward": 5e-5},
    torch.float16: {"forward": 4e-3, "backward": 2e-2},
    torch.bfloat16: {"forward": 3e-2, "backward": 1e-1},
}


MOST_ERRORS = 20  # of a row; of a model with more weights the three largest are kept


@dataclass
class Job:
    """One implementation on one problem.

    `reference` gives, per direction, the float64 values to compare with, or is None where there is nothing to check.
    `peer` gives, per direction, by how much a peer in the same dtype misses them: twice as much is right too.
    `needs` are bytes per direction, 0 where they are small. `labels` go into the row and win over the group's.
    """

    name: str
    prepare: Callable[[], Run]
    reference: Callable[[str], dict[str, Tensor]] | None = None
    peer: Callable[[str], dict[str, float]] | None = None
    needs: dict[str, int] = field(default_factory=dict)
    labels: dict[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


@dataclass
class Bench:
    """One session: how to measure, where the rows go and when to stop."""

    device: str
    directions: tuple[str, ...]
    seconds: float  # of samples per implementation and direction
    rounds: tuple[int, int]  # at least and at most so many samples
    budget: float  # seconds in all
    once: bool = False  # every implementation is called once, checked, and that call is its time
    rows: list[dict] = field(default_factory=list)
    save: Callable[[], None] = lambda: None
    on_step: Callable[[str, int, int], None] = lambda text, done, total: None
    started: float = field(default_factory=lambda: time.perf_counter())

    def remaining(self) -> float:
        return self.budget - (time.perf_counter() - self.started)

    def used_up(self, owed: float) -> bool:
        """Whether `owed` seconds are all that is left, or more; something is measured whatever the budget."""
        return self.remaining() < owed and any(row["status"] == "ok" for row in self.rows)

    def group(
        self,
        section: str,
        jobs: Iterable[Job],
        labels: dict[str, object],
        baseline: str | None = None,
        base: str | None = None,
        memory_limit: int | None = None,
        single_pass: bool = False,
        limit: float = math.inf,
        beside: Sequence[dict] = (),
    ) -> list[dict]:
        """Measure `jobs` side by side; `baseline` and `base` name the jobs that ratio and speed-up refer to.

        The baseline is the fastest of those jobs whose names begin with `baseline`, and rows say which it was; rows
        `beside` this group's, of the same problem, count among them. With `single_pass`, each runs once, for its peak
        memory; nothing is checked. Samples take at most `limit` seconds, or one sample of each job where that is
        longer. The budget is looked at before each job and direction: at most one of these begins too late. An
        interruption before all are ready (compiling takes longest) comes through after a few samples of those that are.
        """
        rows: list[dict] = []
        ready: dict[str, dict[str, tuple[Run, dict]]] = {direction: {} for direction in self.directions}
        sample_seconds, interruption = self.seconds, None

        def used_up() -> bool:
            return self.used_up(0.0 if single_pass else sum(map(_one_sample_of_each, ready.values())))

        try:
            for done, job in enumerate(jobs):
                for direction, row, run in self._warm_up(
                    job, section, labels, memory_limit, single_pass, done, used_up
                ):
                    rows.append(row)
                    self.rows.append(row)  # at once, so that an interruption keeps it
                    if run is not None:
                        ready[direction][job.name] = (run, row)
        except KeyboardInterrupt as error:
            sample_seconds, interruption = 0.0, error
        if not single_pass:
            owed = sum(map(_one_sample_of_each, ready.values()))
            for direction, runs in ready.items():
                owed -= _one_sample_of_each(runs)
                left = min(limit / len(ready), self.remaining() - owed)
                self._time(direction, runs, labels, sample_seconds, left)
        for direction in self.directions:
            _relate(
                *([row for row in some if row["direction"] == direction] for some in (rows, beside)), baseline, base
            )
        self.save()
        if interruption is not None:
            raise interruption
        gc.collect()
        return rows

    def skip(self, section: str, name: str, labels: dict[str, object], reason: str) -> list[dict]:
        """Rows without numbers."""
        rows = [_row(section, name, one, labels, status="skipped", reason=reason) for one in self.directions]
        self.rows.extend(rows)
        return rows

    def _warm_up(
        self,
        job: Job,
        section: str,
        labels: dict,
        memory_limit: int | None,
        single_pass: bool,
        done: int,
        used_up: Callable[[], bool],
    ) -> Iterator[tuple[str, dict, Run | None]]:
        """Yields direction, row and, where it can be timed, the run that has been called twice (compiled, measured)."""
        run: Run | None = None
        failure: Exception | None = None
        for direction in self.directions:
            self.on_step(f"{_title(section, labels)}: {job.name}", done, 0)
            row = _row(section, job.name, direction, labels | job.labels)
            try:
                if used_up():
                    raise CannotRun(USED_UP)
                _check_memory(job.needs.get(direction, 0), memory_limit, self.device)
                if run is None and failure is None:
                    try:
                        run = job.prepare()
                    except Exception as error:
                        failure = error
                if run is None:
                    raise failure
                self._first_calls(job, run, direction, row, single_pass)
                yield direction, row, None if self.once else run
            except CannotRun as error:
                yield direction, row | {"status": "skipped", "reason": tidy(error)}, None
            except Exception as error:  # whatever a peer raises is its result
                yield direction, row | {"status": "failed", "reason": tidy(error)}, None

    def _first_calls(self, job: Job, run: Run, direction: str, row: dict, single_pass: bool) -> None:
        outputs: list[tuple[Tensor, ...]] = []
        expected, missed = None, None
        if not single_pass and job.reference is not None:
            expected = job.reference(direction)
            missed = None if job.peer is None else job.peer(direction)

        def keep() -> tuple[Tensor, ...]:
            outputs.append(run.step(direction))
            return outputs[0]

        if self.once:
            row["peak_bytes"], elapsed = peak_memory(keep, self.device)
        elif not single_pass:
            row["first_call_s"] = round(seconds(keep, self.device), 4)
        if expected is not None:
            row["check"] = _shortened(compare(run, direction, outputs[0], expected, job.dtype, missed))
        outputs.clear()
        if not self.once:
            row["peak_bytes"], elapsed = peak_memory(lambda: run.step(direction), self.device)
        row["estimate_s"] = round(elapsed, 6)
        if single_pass or self.once:
            row |= summary([elapsed])

    def _time(
        self, direction: str, runs: dict[str, tuple[Run, dict]], labels: dict, sample_seconds: float, left: float
    ) -> None:
        """Samples of `runs` in turn, in `left` seconds or one sample of each."""
        calls = {name: (lambda run=run: run.step(direction)) for name, (run, _) in runs.items()}
        if not calls:
            return
        estimates = {name: row["estimate_s"] for name, (_, row) in runs.items()}
        least, most = self.rounds
        if least * sum(estimates.values()) > left:
            least = 1
        spare = max(0.0, left - least * sum(estimates.values()))
        samples = time_interleaved(
            calls,
            estimates,
            self.device,
            min(sample_seconds, spare / len(calls)),
            (least, most),
            lambda name, done, total: self.on_step(f"{_title('', labels)} {direction}: {name}", done, total),
        )
        for name, (_, row) in runs.items():
            row |= summary(samples[name])


def compare(
    run: Run,
    direction: str,
    outputs: tuple[Tensor, ...],
    expected: dict[str, Tensor],
    dtype: torch.dtype,
    missed: dict[str, float] | None = None,
) -> dict[str, object]:
    """Largest difference of each output or gradient from `expected`, relative to its largest value.

    Right is what differs by no more than the dtype's tolerance. With what is `missed` by a peer, twice that is right
    too, and the tolerance is relative to the largest value of the same weight in any layer: in some it nearly cancels.
    """
    names = list(run.leaves) if direction == "backward" else (["out"] if len(outputs) == 1 else ["out", "out_g"])
    got = {name: run.standard(name, tensor).double() for name, tensor in zip(names, outputs, strict=True)}
    got, expected = _join_memory(got), _join_memory(expected)
    errors, scales = {}, {}
    for name, value in got.items():
        want = expected[name]
        if value.shape != want.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, the reference {tuple(want.shape)}")
        if want.numel():
            scales[name] = want.abs().max().clamp(min=torch.finfo(torch.float64).tiny).item()
            errors[name] = float(f"{(value - want).abs().max().item() / scales[name]:.3g}")
    tolerance = TOLERANCE[dtype][direction]
    allowed = dict.fromkeys(errors, tolerance)
    if missed is not None:
        for name in errors:
            largest = max(scale for other, scale in scales.items() if _any_layer(other) == _any_layer(name))
            allowed[name] = max(tolerance * largest / scales[name], 2 * missed.get(name, 0.0))
    # "not above" would let a NaN through
    passed = all(error <= allowed[name] for name, error in errors.items())
    check = {"passed": passed, "tolerance": tolerance, "errors": errors}
    return check if missed is None else check | {"missed_by_peer": missed}


def _shortened(check: dict) -> dict:
    """The check with the largest errors alone, where all of many weights pass."""
    errors = check["errors"]
    if not check["passed"] or len(errors) <= MOST_ERRORS:
        return check
    largest = sorted(errors, key=errors.__getitem__)[-3:]
    parts = {
        part: {name: check[part].get(name, 0.0) for name in largest}
        for part in ("errors", "missed_by_peer")
        if part in check
    }
    return check | parts


def _any_layer(name: str) -> str:
    """The name of a weight without the number of its layer."""
    return re.sub(r"\b\d+\b", "*", name)


def _join_memory(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keys and values of memory and segment as one, as implementations without memory of their own see them."""
    values = dict(values)
    for name in ("key", "value"):
        memory = values.pop(f"memory_{name}", None)
        if memory is not None and name in values:
            values[name] = torch.cat([memory, values[name]], 2)
    return values


def _check_memory(need: int, limit: int | None, device: str) -> None:
    free = free_memory(device)
    if limit is not None and need > limit:
        raise CannotRun(f"would need about {need / 1e9:.0f} GB")
    if free is not None and need > 0.8 * free:
        raise CannotRun(f"would need about {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")


def _one_sample_of_each(runs: dict[str, tuple[Run, dict]]) -> float:
    """Seconds, by the estimates of the warm-up."""
    return sum(row["estimate_s"] for _, row in runs.values())


def _relate(rows: list[dict], beside: Iterable[dict], baseline: str | None, base: str | None) -> None:
    """Writes into `rows` their ratio to the baseline and their speed-up, which may be `beside` them."""
    medians = {row["implementation"]: row["median_ms"] for row in (*beside, *rows) if "median_ms" in row}
    baselines = [name for name in medians if baseline is not None and name.startswith(baseline)]
    fastest = min(baselines, key=medians.get, default=None)
    for row in rows:
        if "median_ms" not in row:
            continue
        if fastest is not None:
            row |= {"ratio_to_baseline": round(row["median_ms"] / medians[fastest], 3), "baseline": fastest}
        if base in medians:
            row["speedup"] = round(medians[base] / row["median_ms"], 3)


def _row(section: str, name: str, direction: str, labels: dict, status: str = "ok", reason: str | None = None) -> dict:
    row = {"section": section, "implementation": name, **labels, "direction": direction, "status": status}
    return row | ({} if reason is None else {"reason": reason})


def _title(section: str, labels: dict) -> str:
    return " ".join([*([section] if section else []), f"L {labels['length']}"])
