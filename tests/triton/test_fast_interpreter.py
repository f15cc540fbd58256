"""The interpreter of the tests gives Triton's results."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT

pytest.importorskip("triton")

TWICE = """
import torch
from tests.cases import make
from tests.triton import fast_interpreter

torch.manual_seed(0)
problem = make(1, 2, 20, mem=5, width=16, mask="order", dtype=torch.float16).with_options(dropout_p=0.1)
state = torch.tensor([1, 2])
import xlnet_kernels.dropout
xlnet_kernels.dropout.new_state = lambda device: state
wanted = problem.results("triton")
fast_interpreter.install()
found = problem.results("triton")
assert found.keys() == wanted.keys() and all(torch.equal(found[name], value) for name, value in wanted.items())
"""


def test_results_are_those_of_tritons_own():
    """To the bit, in a process without the other patches of the tests."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "benchmarks"])),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TWICE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
