"""Builds the package, runs the GPU tests and the attention benchmark on this machine's GPU: `make gpu-check`.

    python benchmarks/gpu_check.py [FOLDER]         results go into FOLDER, default benchmarks/results

Needs torch, Triton and pytest, no network; uses pytest-xdist where it is there. Every step has its limit, all together
take less than eight minutes, and what a step had found when it was stopped is kept.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOTAL, TESTS, SANITIZER, BENCHMARK = 460, 200, 60, 150  # seconds; the benchmark gets what others leave
BUILDS = {"pip": 110, "in place": 60}  # seconds; the second goes on where the first was stopped
GRACE = 15  # seconds to write results after being told to stop
STARTING = 25  # seconds of the benchmark's limit that are not its budget: imports, and the last group running over
TEST_FILES = ("gpu/test_gpu", "operator/test_operator", "operator/test_dropout", "triton/test_backend")
# Errors of our kernels alone, because torch asks for missing driver functions as it starts.
SANITIZED = ("--kernel-name", "kns=xlnet_kernels", "--report-api-errors", "no", "--error-exitcode", "9")
SANITIZER_ERROR = r"^=+ +(Invalid |Misaligned |Error: Race )"
PEERS = ("triton", "cuda", "SDPA", "Flex", "eager")  # a second compiled peer of transformers would take a minute


class Check:
    """The record of one run, written after every step."""

    def __init__(self, folder: Path, gpu: str) -> None:
        self.began = time.monotonic()
        self.name = "gpu-check-" + re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
        self.folder = folder
        self.record: dict[str, object] = {"check": "gpu-check", "gpu": gpu, "complete": False}
        folder.mkdir(parents=True, exist_ok=True)

    def file(self, ending: str) -> Path:
        return self.folder / (self.name + ending)

    def left(self) -> float:
        return TOTAL - (time.monotonic() - self.began)

    def save(self) -> None:
        from lib.harness import write_json

        self.record["seconds"] = round(time.monotonic() - self.began, 1)
        write_json(self.file(".json"), self.record)

    def build(self) -> None:
        """In place; pip cannot where the environment is read-only."""
        log = self.file("-build.log")
        log.unlink(missing_ok=True)
        pip = ["-m", "pip", "install", "--disable-pip-version-check", "--no-index"]
        editable = [*pip, "--no-build-isolation", "--no-deps", "-e", "."]
        self.record["build"] = "failed"
        for how, command in (("pip", editable), ("in place", ["setup.py", "build_ext", "--inplace"])):
            if run(command, BUILDS[how], log) == 0:
                self.record["build"] = how
                return

    def test(self) -> None:
        """Runs the tests of every backend that have a GPU."""
        lines, log = self.file("-tests.jsonl"), self.file("-tests.log")
        for left_over in (lines, log):
            left_over.unlink(missing_ok=True)
        command = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "tests.gpu.outcomes"]
        environment = {"OUTCOMES": str(lines)}
        if importlib.util.find_spec("xdist"):  # most of the time goes into compiling kernels
            cores = len(os.sched_getaffinity(0))
            workers = min(cores, 12)
            command += ["-n", str(workers), "--dist", "worksteal"]
            environment["OMP_NUM_THREADS"] = str(max(1, cores // workers))
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes in every worker
        command += ["-k", "triton or cuda or gpu", *(f"tests/{name}.py" for name in TEST_FILES)]
        limit = min(TESTS, self.left() - SANITIZER - BENCHMARK)
        try:
            status = run(command, limit, log, environment)
        finally:
            self.record["tests"] = count(lines)
        self.record["tests"]["finished"] = status in (0, 1)
        lines.unlink(missing_ok=True)

    def sanitize(self) -> None:
        """The CUDA backend under compute-sanitizer, where that is there."""
        self.record["sanitizer"] = found = {}
        program = shutil.which("compute-sanitizer")
        for tool in ("memcheck", "racecheck"):
            found[tool] = "compute-sanitizer is not there"
            if program:
                log = self.file(f"-{tool}.log")
                log.unlink(missing_ok=True)
                command = [program, "--tool", tool, *SANITIZED, sys.executable, "-m", "tests.gpu.small_calls"]
                # Every tensor in an allocation of its own: beyond its end is then beyond that of the allocation.
                environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
                status = run(command, SANITIZER / 2, log, environment, program=[])
                if status == -1 and re.search(SANITIZER_ERROR, log.read_text(errors="replace"), re.MULTILINE):
                    status = 9
                found[tool] = {0: "clean", 9: "errors", -1: "stopped"}.get(status, f"exit status {status}")

    def measure(self) -> None:
        output, limit = self.file("-attn.json"), self.left() - GRACE
        command = ["benchmarks/attn.py", "--device", "cuda", "--budget", str(int(limit - STARTING)), "--seconds", "0.3"]
        command += ["--lengths", "128", "512", "2048", "8192", "--compiled-lengths", "128", "2048"]
        command += ["--sections", "core", "streams", "long"]
        output.unlink(missing_ok=True)
        self.record["benchmark"] = {"file": output.name}
        status = run([*command, "--implementations", *PEERS, "--output", str(output)], limit)
        self.record["benchmark"]["finished"] = status == 0

    def run(self) -> int:
        """Exit status 0; 1 where the build, a test or the benchmark failed; 130 where it was stopped."""
        stopped = False
        try:
            print("building ...", flush=True)
            self.build()
            sys.path.insert(0, str(ROOT))
            from lib.harness import environment

            self.record["environment"] = environment("cuda")
            for step in (self.test, self.sanitize, self.measure):
                self.save()
                print(f"{step.__name__} ...", flush=True)
                step()
            self.record["complete"] = True
        except KeyboardInterrupt:
            stopped = True
        with contextlib.suppress(ImportError):
            self.save()
        for line in self.table():
            print(line)
        if stopped:
            return 130
        tests, benchmark = self.record.get("tests", {}), self.record.get("benchmark", {})
        good = self.record["build"] != "failed" and tests["failed"] == 0 and tests["passed"] > 0
        good = good and "errors" not in self.record.get("sanitizer", {}).values()
        return 0 if good and tests["finished"] and benchmark["finished"] else 1

    def table(self) -> list[str]:
        """The lines that are printed last."""
        tests, lines = self.record.get("tests"), []
        if self.file("-attn.json").exists() and "benchmark" in self.record:
            from lib import counted
            from lib.headline import headline

            results = json.loads(self.file("-attn.json").read_text())
            lines += [*headline(results["rows"]), *counted.text(results)]
        if tests:
            for failure in tests["failures"][:20]:
                lines.append(f"FAILED {failure['test']}: {failure['reason']}"[:200])
            end = "" if tests.get("finished") else " (stopped before the end)"
            for tool, result in self.record.get("sanitizer", {}).items():
                lines.append(f"{tool}: {result}")
            lines.append(f"tests: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped{end}")
        return [
            *lines,
            f"{self.record['gpu']}; build: {self.record.get('build', 'not reached')}; "
            f"{time.monotonic() - self.began:.0f} s; results: {self.file('*')}",
        ]


def run(
    command: list[str],
    limit: float,
    log: Path | None = None,
    environment: dict[str, str] | None = None,
    program: Sequence[str] = (sys.executable,),
) -> int:
    """The exit status of Python with `command`, in the repository; negative where it was stopped at `limit` seconds."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    variables.pop("TRITON_INTERPRET", None)
    with contextlib.ExitStack() as stack:
        out = None if log is None else stack.enter_context(log.open("a"))
        child = subprocess.Popen(
            [*program, *command], cwd=ROOT, env=variables | (environment or {}), stdout=out,
            stderr=None if log is None else subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return child.wait(max(limit, 1))
        except subprocess.TimeoutExpired:
            print(f"stopped after {limit:.0f} s: {' '.join(command[:3])}", flush=True)
            return -1
        finally:
            if child.poll() is None:
                _stop(child)


def _stop(child: subprocess.Popen) -> None:
    """It and all that it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)


def count(lines: Path) -> dict:
    """Outcomes of the plugin tests/gpu/outcomes.py; a test that failed once has failed."""
    found: dict[str, dict] = {}
    for text in lines.read_text().splitlines() if lines.exists() else []:
        if not text.endswith("}"):  # it was stopped while it wrote
            continue
        one = json.loads(text)
        if found.get(one["test"], {}).get("outcome") != "failed":
            found[one["test"]] = one
    counts = Counter(one["outcome"] for one in found.values())
    result = {outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")}
    skipped = Counter(one["reason"] for one in found.values() if one["outcome"] == "skipped")
    return result | {
        "skipped_because": dict(skipped),
        "failures": [one for one in found.values() if one["outcome"] == "failed"],
        "slowest": sorted(found.values(), key=lambda one: -one["seconds"])[:10],
    }


def main(arguments: list[str]) -> int:
    try:
        import torch
    except ImportError:
        print("gpu-check: torch is not installed; it needs torch with CUDA, Triton and pytest", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("gpu-check: torch finds no CUDA device on this machine, so there is nothing to check", file=sys.stderr)
        return 2

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    folder = Path(arguments[0]) if arguments else ROOT / "benchmarks" / "results"
    return Check(folder.resolve(), torch.cuda.get_device_name()).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
