"""Fixtures of the benchmarks' tests."""

import pytest


@pytest.fixture
def environment(scripts) -> dict:
    """The machine, as results files have it."""
    from lib.harness import environment

    return environment("cpu")
