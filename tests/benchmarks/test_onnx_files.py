"""benchmarks/onnx_files.py: files at lengths that the exporter has not seen, checked and timed."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests import ROOT

pytest.importorskip("transformers.models.parakeet")
sys.path.insert(0, str(ROOT / "benchmarks"))
import onnx_files  # noqa: E402


def test_without_the_exporter_its_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    output = tmp_path / "onnx.json"
    assert onnx_files.main(["--quick", "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert row["status"] == "skipped" and "pip install '.[onnx]'" in row["reason"]


@pytest.mark.slow
def test_files_are_checked_and_timed(tmp_path, monkeypatch):
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(needed, reason="pip install xlnet-kernels[onnx]")
    output = tmp_path / "onnx.json"
    assert onnx_files.main(["--quick", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    found = {(row["length"], "window" in row["case"], row["implementation"]) for row in rows}
    cases = [(70, False), (70, True), (150, True)]
    wanted = {(*case, name) for case in cases for name in (onnx_files.OWN, onnx_files.FILE)}
    assert found == wanted | {(70, False, onnx_files.LIBRARY)}
    for row in rows:
        assert row["check"]["passed"] and ("bytes" in row) == (row["implementation"] == onnx_files.FILE), row

    def other(problem, path):
        run = right(problem, path)
        run.forward = lambda forward=run.forward: forward() + 0.1
        return run

    right = onnx_files.Problem.run_file
    monkeypatch.setattr(onnx_files.Problem, "run_file", other)
    assert onnx_files.main(["--quick", "--output", str(output)]) == 1


def test_files_run_on_cpus_alone(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        onnx_files.main(["--device", "cuda"])
    assert "--device" in capsys.readouterr().err
