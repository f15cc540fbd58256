"""A pytest plugin: what has passed is left out of the next run, unless a source has changed since.

    XLNET_KERNELS_RESUME=build/passed.txt pytest -p tests.machine.resume ...

`make test-machine` takes hours; started again it goes on where it was ended.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest

FILE = Path(os.environ["XLNET_KERNELS_RESUME"])
ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".h", ".cuh", ".cu", ".cpp"}


def sources() -> str:
    """A digest of all sources that a result depends on."""
    found = hashlib.sha256(sys.version.encode())
    for folder in ("benchmarks", "csrc", "tests", "xlnet_kernels"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                found.update(path.read_bytes())
    return found.hexdigest()


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.passed = set(config.workerinput["passed"])
        return
    key, *lines = FILE.read_text().splitlines() if FILE.exists() else [""]
    config.passed = set(lines) if key == sources() else set()
    if not config.passed:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(sources() + "\n")
    config.pluginmanager.register(Keeper(), "what has passed")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_configure_node(node):
    node.workerinput["passed"] = sorted(node.config.passed)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    done = [item for item in items if item.nodeid in config.passed]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in config.passed]


class Keeper:
    """In the process that all reports come to."""

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            with FILE.open("a") as file:
                file.write(report.nodeid + "\n")
