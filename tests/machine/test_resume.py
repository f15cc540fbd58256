"""A run that was ended goes on with what has not passed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT

TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(3))
def test(number):
    assert number != int(os.environ["FAILS"])
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_has_passed_is_not_run_again(tmp_path, workers):
    (tmp_path / "test_three.py").write_text(TESTS)
    passed = tmp_path / "build" / "passed.txt"
    environment = os.environ | {"XLNET_KERNELS_RESUME": str(passed), "PYTHONPATH": str(ROOT)}

    def run(fails: int) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "tests.machine.resume", "-n", workers, "-q", str(tmp_path)]
        done = subprocess.run(
            [*command, "--rootdir", str(tmp_path)], env=environment | {"FAILS": str(fails)}, cwd=tmp_path,
            capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout

    assert "1 failed, 2 passed" in run(1)
    assert "1 passed" in run(-1) and passed.read_text().count("test_three") == 3
    if workers == "0":  # the file is the same with workers, which take seconds to start
        assert "1 passed" not in run(-1)
        passed.write_text("other sources\n" + passed.read_text().split("\n", 1)[1])
        assert "3 passed" in run(-1)
