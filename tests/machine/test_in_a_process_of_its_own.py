"""The machine's tests in a normal run, where Triton interprets: in a process in which it compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
HERE = Path(__file__).parent
NAMES = (
    "test_proofs.py",
    "test_operator_on_machine.py",
    "test_ordered_accumulation.py",
    "../benchmarks/test_gpu_counts.py",
    "../benchmarks/test_timing.py",
    "test_triton_launch_cache.py",
    "test_unread_on_machine.py",
)


@pytest.mark.slow
@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="Triton compiles in this process")
@pytest.mark.parametrize("name", NAMES)
def test_where_triton_compiles(name):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / name)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
