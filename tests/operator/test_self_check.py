"""Comparison of a backend with the reference by the command, and its problems."""

from __future__ import annotations

import pytest
import torch

import xlnet_kernels as xk
from tests.operator.fake_backend import BACKENDS, Fake, installed
from xlnet_kernels import info
from xlnet_kernels.backends import self_check


@pytest.mark.parametrize("problem", self_check.problems(), ids=lambda p: f"{p.name} {p.dtype}")
def test_each_problem_is_right_on_the_cpu_and_tells_a_wrong_result(problem):
    wrong = Fake(factor=1.05)
    assert self_check.compare(wrong, problem, "cpu")
    if xk.backends()["cpu"].available:
        assert self_check.compare(BACKENDS["cpu"], problem, "cpu") == []


def test_float32_on_the_cpu_may_be_as_wrong_as_its_precision(monkeypatch):
    """Under torch's "medium" operands are rounded to bfloat16."""
    problem = next(problem for problem in self_check.problems() if problem.dtype == torch.float32)
    monkeypatch.setattr(self_check, "float32_precision", lambda device_type: 2)
    assert self_check.compare(Fake(factor=1.02), problem, "cpu") == []
    assert self_check.compare(Fake(factor=1.2), problem, "cpu")


def test_the_check_stays_sharp_at_high_precision(monkeypatch):
    """On the CPU operands are then two bfloat16 numbers, in a problem of as many rows and keys as that takes."""
    monkeypatch.setattr(self_check, "float32_precision", lambda device_type: 1)
    problems = [problem for problem in self_check.problems() if problem.dtype == torch.float32]
    assert any(problem.length >= 64 and problem.mem_len + problem.length >= 256 for problem in problems)
    assert all(self_check.compare(Fake(factor=1.005), problem, "cpu") for problem in problems if problem.length > 1)


def test_the_command_prints_a_table_and_fails_where_a_backend_does(capsys):
    with installed() as use:
        use(factor=1.5)
        assert not info.check()
        text = capsys.readouterr().out
    assert max(map(len, text.split("fake, plain")[0].splitlines())) <= 80
    assert "\u2717" in text and "-" in text and "fake, order, float32: out is off by" in text
    with installed() as use:
        use()
        assert info.check()
    assert "All right." in capsys.readouterr().out
