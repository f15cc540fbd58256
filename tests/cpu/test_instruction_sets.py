"""The CPU kernels exist once per instruction set, chosen at run time: each must be right, not only the best."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.cases import COMPILED

if "cpu" not in COMPILED:
    pytest.skip("the compiled extension is not there", allow_module_level=True)

REFUSED = "XLNET_KERNELS_CPU names no instruction set that this processor has"


def run_with(instruction_set: str, *command: str) -> subprocess.CompletedProcess:
    """A process of its own, since the choice is made once."""
    environment = os.environ | {"XLNET_KERNELS_CPU": instruction_set}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


SMALL_CALL = """
import torch, xlnet_kernels as xk
x = torch.randn(1, 1, 2, 8)
xk.rel_attention(x, x, x, torch.randn(1, 4, 8), backend="cpu")
"""


@pytest.mark.parametrize("instruction_set", ["avx2", "generic"])
def test_is_as_right_as_the_best_one(instruction_set):
    if REFUSED in run_with(instruction_set, "-c", SMALL_CALL).stderr:
        pytest.skip(f"this processor has no {instruction_set}")
    file = str(ROOT / "tests/operator/test_operator.py")
    chosen = "cpu and (dtypes or blocks_of_ranks or strided or tile-plus-one)"
    found = run_with(instruction_set, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", chosen)
    assert found.returncode == 0, found.stdout[-4000:]


def test_unknown_name_is_refused():
    assert REFUSED in run_with("avx1024", "-c", SMALL_CALL).stderr


@pytest.mark.parametrize("name, expected", [("generic", "generic"), ("avx1024", None)])
def test_info_says_which_one_is_used(name, expected):
    facts = json.loads(run_with(name, "-m", "xlnet_kernels.info", "--json").stdout)
    assert facts["compiled"]["cpu_instruction_set"] == expected
