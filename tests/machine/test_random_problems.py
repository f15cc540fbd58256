"""The command that runs random problems, without one: it starts on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT

pytest.importorskip("triton")


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_starts_without_a_gpu(backend):
    environment = {name: value for name, value in os.environ.items() if name != "XLNET_KERNELS_MACHINE"}
    command = [
        sys.executable,
        "tests/machine/random_problems.py",
        "1",
        "--backend",
        backend,
        "--only",
        "no-such-feature",
    ]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout == f"0 problems for {backend}, seed 0: 0 wrong or faulty\n"
