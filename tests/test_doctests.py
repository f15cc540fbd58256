"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

import xlnet_kernels as xk

MODULES = [
    "attention",
    "backends",
    "functional",
    "masks",
    "model.config",
    "model.encoder",
    "model.generation",
    "model.heads",
    "model.sampling",
    "positions",
    "segments",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"xlnet_kernels.{name}")
    names = {public: getattr(xk, public) for public in xk.__all__} | {"torch": torch}
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
