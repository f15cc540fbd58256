"""A pytest plugin, `-p tests.gpu.outcomes`: writes every test's outcome at once, as a line of JSON, into $OUTCOMES.

What a run that is stopped has found is not lost. A worker of pytest-xdist to which the GPU has reported an error ends
itself, for every later call in that process would fail as well; xdist starts another.
"""

from __future__ import annotations

import json
import os

WORKER = "PYTEST_XDIST_WORKER" in os.environ
GPU_ERRORS = ("CUDA error", "Triton Error [CUDA]", "rel_attention: the CUDA kernel")
_gpu_is_lost = False


def pytest_runtest_logreport(report) -> None:
    if WORKER:  # the main process hears of it too, and writes
        global _gpu_is_lost
        _gpu_is_lost |= report.failed and any(text in report.longreprtext for text in GPU_ERRORS)
    elif report.when == "call" or not report.passed:
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        line |= {} if report.passed else {"reason": _reason(report)}
        with open(os.environ["OUTCOMES"], "a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_runtest_logfinish(nodeid: str) -> None:
    if _gpu_is_lost:
        os._exit(1)


def _reason(report) -> str:
    """Why it failed or was skipped, one line."""
    if report.skipped:
        return (
            report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "expected to fail"
        )
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash:
        return next(iter(crash.message.splitlines()), "")[:300]
    return report.longreprtext.strip().rpartition("\n")[2][:300]  # a worker died: after what it was comes why
