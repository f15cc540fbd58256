"""Fixtures of every test: uninitialised memory full of NaN, the available backends, reproducible random numbers."""

from __future__ import annotations

import gc
import os

import pytest
import torch

# Read when cuBLAS is first used; without it torch refuses matrix products in its deterministic mode.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("XLNET_KERNELS_POISON", "1")  # as `poisoned_memory`, for what csrc/stable/tensor.cpp allocates
MACHINE = os.environ.get("XLNET_KERNELS_MACHINE")  # an architecture, such as 80: GPU kernels run on lib/machine
if MACHINE and not MACHINE.isdecimal():
    raise pytest.UsageError(f"XLNET_KERNELS_MACHINE must be an architecture in digits, such as 80, got {MACHINE!r}")
if MACHINE:
    os.environ["TRITON_INTERPRET"] = "0"
elif not torch.cuda.is_available():  # the Triton kernels run in Triton's interpreter; it reads this when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

if MACHINE:
    from lib.machine import package

    _serving = package.serving(int(MACHINE))
    _serving.__enter__()  # before cases.py asks which backends are ready; until the process ends

from tests import ROOT, covers  # noqa: E402
from tests.cases import BACKENDS  # noqa: E402
from tests.triton import fast_interpreter, interpreter_bounds  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    fast_interpreter.install()
    interpreter_bounds.install()

try:
    from hypothesis import settings
except ImportError:  # a machine that only runs what needs no more than torch and pytest
    collect_ignore = ["operator/test_properties.py"]
else:
    # Equal examples in every run; no deadline, since machines differ.
    settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=40, database=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty gives NaN, so that an element without a value shows in the result."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def scripts(monkeypatch):
    """Files of these folders are found by bare name, as they find each other when run as scripts."""
    for folder in ("benchmarks", "examples", "experiments"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


@pytest.fixture(autouse=True)
def several_threads(request):
    """Kernels divide their work, where `make test` has one thread for a worker."""
    threads = torch.get_num_threads()
    if request.path.parent.name in ("cpu", "operator"):
        torch.set_num_threads(max(2, threads))
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread():
    """For tiny sizes, where waking threads costs more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    """Each backend that can be used on this machine."""
    return request.param


def pytest_collection_finish():
    """Objects of collected tests and imported modules live to the end: the garbage collector leaves them out."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    # To avoid nanobind's warnings, at exit, about objects of Triton that live on
    gc.unfreeze()


def pytest_collection_modifyitems(config, items):
    """Fewer cases where they are slow; slow tests first, so that workers end at about the same time."""
    items[:], left_out = covers.select(items)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
