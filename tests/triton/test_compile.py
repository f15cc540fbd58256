"""The Triton kernels compiled for real GPUs, without one: what the compiler made of the table's configurations.

One architecture for each kernel and class here; all of them are in benchmarks/results/triton-compiled.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.compiled.triton_report import SHARED_MEMORY  # noqa: E402
from tests import ROOT  # noqa: E402
from xlnet_kernels.backends.triton import tuning  # noqa: E402

SCRIPT = ROOT / "benchmarks/compiled/triton_report.py"
COMMITTED = ROOT / "benchmarks/results/triton-compiled.json"
ARCHITECTURES = (80, 90, 100)
# Spilled loads and stores in all of a kernel's code, at most. A plain forward in 16 bits has none, but for sm_100; with
# memory and query positions a kernel holds two walks.
SPILLS = {"forward": 60, "rows": 750, "keys": 750}
# Instructions of a warp for 1024 scores, at most, in 16 bits at width 64 where all keys of a tile are seen and of one
# segment: a few per cent more than there are.
INSTRUCTIONS = {"forward": 1000, "rows": 2800, "keys": 1700}
DTYPE = {"16-bit": torch.bfloat16, "float32": torch.float32}
MATRIX_INSTRUCTION = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}


def check(row: dict) -> None:
    assert 0 < row["shared_memory"] <= SHARED_MEMORY, row
    ways = row["loop"]
    assert 0 < ways["shortest"]["all"] <= ways["longest"]["all"] < row["instructions"], row
    if (row["kind"], row["width"], row["stacked"]) == ("16-bit", 64, False):
        scores = row["BM"] * row["BN"] / row["num_warps"]
        assert ways["shortest"]["all"] * 1024 / scores <= INSTRUCTIONS[row["kernel"]], row
        assert ways["shortest"]["all"] < ways["longest"]["all"], row
    assert row["spills"] <= SPILLS[row["kernel"]], row
    if row["kernel"] == "forward" and row["kind"] == "16-bit" and not row["stacked"] and row["architecture"] < 100:
        assert row["spills"] == 0, row
    if row["kind"] == "float32":  # without TF32 there are no tensor cores for it
        assert set(row["products"]) == {"FFMA"} and row["products"]["FFMA"] > 500, row
    else:
        assert MATRIX_INSTRUCTION[row["architecture"]] in row["products"], row


@pytest.mark.slow
def test_compiles_for_gpus_that_are_not_here(tmp_path):
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--sample", *map(str, ARCHITECTURES)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    report = [json.loads(line) for line in result.stdout.splitlines()]
    classes = {(kind, width) for _, kind, width in tuning.TABLE}
    assert {(row["kernel"], row["kind"], row["width"]) for row in report} == {
        (kernel, *of) for kernel in tuning.KERNELS for of in classes
    }
    assert {(row["kernel"], row["architecture"]) for row in report} == {
        (kernel, architecture) for kernel in tuning.KERNELS for architecture in ARCHITECTURES
    }
    for row in report:
        check(row)


def test_the_committed_report_is_of_this_table():
    rows = json.loads(COMMITTED.read_text())["rows"]
    found = {(r["architecture"], r["kind"], r["width"], r["kernel"], r["stacked"]): r for r in rows}
    classes = {(kind, width) for _, kind, width in tuning.TABLE}
    assert set(found) == {
        (architecture, *of, kernel, stacked)
        for architecture in ARCHITECTURES
        for of in classes
        for kernel in tuning.KERNELS
        for stacked in (False, True)
    }
    for row in rows:
        check(row)
        capability = divmod(row["architecture"], 10)
        config = tuning.choose(row["kernel"], DTYPE[row["kind"]], row["width"], capability)
        assert config._asdict().items() <= row.items(), row
