"""Fixtures of accelerated models: the toolkits' classes, and the operator's arguments."""

from __future__ import annotations

import pytest

import xlnet_kernels as xk
from tests.integrations import conventions
from tests.integrations.toolkit_cases import real
from xlnet_kernels import attention
from xlnet_kernels.integrations import _window, adapter


@pytest.fixture(params=["small", pytest.param("real", marks=pytest.mark.slow)])
def toolkits(request, scripts):
    """toolkit -> what has its classes."""
    if request.param == "real":
        yield real
    else:
        with conventions.installed():
            yield lambda toolkit: conventions


@pytest.fixture
def small():
    with conventions.installed():
        yield conventions


@pytest.fixture
def calls(monkeypatch) -> list[dict]:
    """The keyword arguments of each call of the operator."""
    seen: list[dict] = []

    def spy(*args, **kwargs):
        seen.append(kwargs)
        return xk.rel_attention(*args, **kwargs)

    for module in (adapter, _window):
        monkeypatch.setattr(module, "rel_attention", spy)
    return seen


@pytest.fixture
def operator(calls, monkeypatch):
    """The operator's arguments, with the calls of XLNet."""

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return xk.rel_attention(*args, **kwargs)

    monkeypatch.setattr(attention, "rel_attention", spy)
    return calls
