"""A plugin for pytest in the test run of another library: accelerates its models and writes down each test's outcome.

peers.py starts such runs. The plugin must not import `tests`, because the other library has a package by that name.
"""

from __future__ import annotations

import functools
import json
import platform
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xlnet_kernels as xk
from xlnet_kernels.integrations._accelerated_class import ORIGINAL, known_bases

_LIBRARIES = ("transformers", "nemo", "speechbrain")
_refused: set[str] = set()
_tests: dict[str, dict[str, Any]] = {}
_local = threading.local()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("xlnet_kernels")
    group.addoption("--peer-accelerate", action="store_true", help="accelerate each model at its first call")
    group.addoption("--peer-seed", type=int, default=0, help="of the random numbers of each test")
    group.addoption("--peer-outcomes", help="the JSON file of outcomes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--peer-accelerate"):
        nn.Module.__call__ = _accelerating(nn.Module.__call__)  # type: ignore[method-assign]


def _accelerating(original: Any) -> Any:
    """`nn.Module.__call__` that first accelerates a model which no other module calls."""

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(_local, "is_inside", False):
            return original(self, *args, **options)
        _accelerate(self)
        _local.is_inside = True
        try:
            return original(self, *args, **options)
        finally:
            _local.is_inside = False

    return call


def _accelerate(model: nn.Module) -> None:
    known = [module for module in model.modules() if _is_known(type(module))]
    if not all(hasattr(type(module), ORIGINAL) for module in known):
        try:
            xk.accelerate(model)
        except ValueError as refusal:
            _refused.add(str(refusal))
    _local.is_accelerated |= any(hasattr(type(module), ORIGINAL) for module in known)


@functools.cache
def _is_known(cls: type) -> bool:
    return bool(known_bases(cls))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed = item.config.getoption("--peer-seed")
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    _local.is_accelerated = False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    item.user_properties.append(("peer", {"accelerated": _local.is_accelerated, "refused": sorted(_refused)}))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _tests[report.nodeid] = {"outcome": "failed", "message": _last_line(report), "accelerated": False}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    test = _tests.setdefault(report.nodeid, {"outcome": "passed", "message": "", "accelerated": False})
    if report.failed:
        test["outcome"], test["message"] = "failed", _last_line(report)
    elif report.skipped and type(report) is pytest.TestReport and test["outcome"] == "passed":  # not a subtest
        test["outcome"] = "skipped"
    for name, value in report.user_properties:
        if name == "peer":
            test["accelerated"] |= value["accelerated"]
            _refused.update(value["refused"])


def _last_line(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The error in one line: the last of those that pytest marks with E, or of all."""
    lines = [line.strip() for line in report.longreprtext.splitlines() if line.strip()]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return (errors[:1] or lines[-1:] or [""])[0][:300]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    file = session.config.getoption("--peer-outcomes")
    if file is None or hasattr(session.config, "workerinput"):  # a process of pytest-xdist
        return
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        versions |= {name: version} if version else {}
    facts = {"versions": versions, "refused": sorted(_refused), "tests": _tests}
    Path(file).write_text(json.dumps(facts))
