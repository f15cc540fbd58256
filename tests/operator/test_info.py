"""`python -m xlnet_kernels.info` and `python -m xlnet_kernels` in the terminals and pipes that there are."""

from __future__ import annotations

import io
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest

import xlnet_kernels as xk
from tests import ROOT
from xlnet_kernels import info
from xlnet_kernels.backends import reference


@pytest.mark.parametrize("module", ["xlnet_kernels", "xlnet_kernels.info"])
def test_a_reader_that_closes_the_pipe_early_gets_no_traceback(module):
    """`true` has ended long before anything is printed."""
    command = f'"{sys.executable}" -m {module} | true; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", "1\n")


@pytest.mark.parametrize(("encoding", "mark"), [("ascii", "ok"), ("utf-8", "\u2713")])
def test_check_prints_in_any_encoding(monkeypatch, encoding, mark):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    problem = next(iter(info.self_check.problems()))
    monkeypatch.setattr(info.self_check, "problems", lambda: [problem])
    monkeypatch.setattr(info.self_check, "compare", lambda *arguments: [])
    ready = [name for name, state in xk.backends().items() if state.available and name != "reference"]
    monkeypatch.setattr(sys, "argv", ["info", "--check"])
    assert info.run() == 0
    assert written.getvalue().decode(encoding).count(mark) >= len(ready)


def test_check_takes_backends_that_serve_every_device_and_dtype(monkeypatch, capsys):
    every = SimpleNamespace(DEVICE=None, DTYPES=None, rel_attention=reference.rel_attention)
    monkeypatch.setitem(info._BACKENDS, "every", every)
    monkeypatch.setattr(xk, "backends", lambda: {name: xk.Available("ready") for name in ("torch", "every")})
    problems = [problem for problem in info.self_check.problems() if problem.name in ("plain", "order")]
    assert {problem.dtype.itemsize for problem in problems} == {2, 4}
    monkeypatch.setattr(info.self_check, "problems", lambda: problems)
    assert info.check() and capsys.readouterr().out.endswith("All right.\n")


def test_paths_print_in_any_encoding(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(info, "cpu_name", lambda: "a processor of caf\u00e9s")
    monkeypatch.setattr(sys, "argv", ["info"])
    assert info.run() == 0 and b"caf\\xe9s" in written.getvalue()


def test_package_is_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["xlnet_kernels", "--models"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("xlnet_kernels", run_name="__main__")
    assert stopped.value.code == 0 and "accelerate" in capsys.readouterr().out


def test_dir_has_public_names_alone():
    names = {name for name in dir(xk) if not name.startswith("__")}
    assert set(xk.__all__) <= names | {"__version__"} and "masks" in names
    assert not names & {"Any", "TYPE_CHECKING", "annotations", "importlib", "sys"}
    assert not [name for name in names if name.startswith("_")]
    assert {name for name in dir(xk.integrations) if not name.startswith("__")} == set(xk.integrations.__all__)
