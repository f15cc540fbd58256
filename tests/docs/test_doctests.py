"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import xlnet_kernels as xk

FOLDER = Path(xk.__file__).parent
FILES = sorted(path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.py") if ">>> " in path.read_text())
MODULES = [".".join(path.parts).removesuffix(".__init__") for path in FILES]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"xlnet_kernels.{name}")
    names = {public: getattr(xk, public) for public in xk.__all__} | {"torch": torch}
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
