"""What every test gets: uninitialised memory full of NaN, the available backends, reproducible random numbers."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

from cases import BACKENDS

# The same examples in every run; no deadline, since machines differ.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=40, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty gives NaN, so that an element no one has written shows in the result."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    """Each backend that can be used on this machine."""
    return request.param
