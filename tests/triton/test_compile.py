"""The Triton kernels compiled for real GPUs, without one: what the compiler made of the table's configurations.

Each class, and each kernel on each architecture here; all of them are in benchmarks/results/triton-compiled.json.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from benchmarks.compiled.triton_report import SHARED_MEMORY  # noqa: E402
from tests import ROOT  # noqa: E402
from xlnet_kernels.backends.triton import tuning  # noqa: E402

COMMITTED = ROOT / "benchmarks/results/triton-compiled.json"
ARCHITECTURES = (80, 90, 100)
# Spilled loads and stores in all of a kernel's code, at most. A plain forward in 16 bits has none, but for heads of
# 128; with memory and query positions a kernel holds two loops.
SPILLS = {"forward": 400, "rows": 1400, "keys": 1700}
SPILLS_OF_FLOAT32 = {"forward": 1900, "rows": 5000, "keys": 4000}  # on tensor cores, in heads of 256: chosen by counts
# Instructions of a warp for 1024 scores, at most, in 16 bits at head_dim 64 where all keys of a tile are seen and of
# one segment: a few per cent more than there are.
INSTRUCTIONS = {"forward": 1000, "rows": 2800, "keys": 1700}
# Shuffles of a warp for 1024 scores, at most, where a tile is a fragment: 32 for each rotation, of which the kernel of
# rows has two, and a few for sums. A butterfly would have twice as many.
SHUFFLES = {"forward": 48, "rows": 80, "keys": 40}
MATRIX_INSTRUCTION = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}


def check(row: dict) -> None:
    assert 0 < row["shared_memory"] <= SHARED_MEMORY[row["architecture"]], row
    ways = row["loop"]
    assert 0 < ways["shortest"]["all"] <= ways["longest"]["all"] < row["instructions"], row
    if (row["kind"], row["head_dim"], row["call"]) == ("16-bit", 64, "order"):
        scores = row["BLOCK_M"] * row["BLOCK_N"] / row["num_warps"]
        assert ways["shortest"]["all"] * 1024 / scores <= INSTRUCTIONS[row["kernel"]], row
        assert ways["shortest"]["all"] < ways["longest"]["all"], row
        if row["architecture"] < 100:
            assert ways["shortest"]["shuffles"] * 1024 / scores <= SHUFFLES[row["kernel"]], row
    assert row["spills"] <= (SPILLS_OF_FLOAT32 if row["kind"] == "float32" else SPILLS)[row["kernel"]], row
    if row["kernel"] == "forward" and row["kind"] == "16-bit" and row["call"] == "order" and row["architecture"] < 100:
        assert row["spills"] <= (120 if row["head_dim"] == 128 else 8), row
    if row["kind"] == "ieee":
        assert set(row["products"]) == {"FFMA"} and row["products"]["FFMA"] > 500, row
    else:
        assert MATRIX_INSTRUCTION[row["architecture"]] in row["products"], row


def in_a_process(cache: Path, *arguments: str, first: Path | None = None, **environment: str) -> str:
    """Output of Python, with Triton as a compiler; `first`: folder of another Triton."""
    folders = [*([first] if first else []), ROOT]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        **environment,
    }
    command = [sys.executable, "-W", "ignore", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_nothing_counts_as_an_overflow_when_debugging(tmp_path):
    """The shift and Philox count modulo 2^32."""
    code = """if True:
        import torch
        from benchmarks.compiled import triton_report
        from xlnet_kernels.backends.triton.forward import forward_kernel
        call = triton_report.inputs(16, torch.float16, "order")
        triton_report.compile_kernel(80, "forward", call)
        (compiled,) = forward_kernel.device_caches[80][0].values()
        print(compiled.asm["ttir"])"""
    ttir = in_a_process(tmp_path, "-c", code, TRITON_DEBUG="1")
    assert "tt.dot" in ttir and "overflow" not in ttir


def test_amd_code_objects_are_read(tmp_path):
    """One kernel for each architecture of AMD's; spills, whose number takes one byte here, more in heads of 256."""
    pytest.importorskip("triton.backends.amd", reason="this Triton has no compiler for AMD")
    code = """if True:
        import json
        from benchmarks.compiled import triton_report
        for case in (("gfx942", "16-bit", 64, "forward", "order"), ("gfx950", "16-bit", 256, "keys", "order")):
            print(json.dumps(triton_report.report(*case)))"""
    none, many = map(json.loads, in_a_process(tmp_path, "-c", code).splitlines())
    assert none["spills"] == none["scratch_bytes"] == 0 < none["shared_memory"] <= SHARED_MEMORY["gfx942"]
    assert 128 <= none["registers"] <= 512 and 128 <= many["spills"] and 0 < many["scratch_bytes"]


def test_no_kernel_function_returns_none_in_a_tuple():
    """Triton 3.6 compiles none that does."""
    seen = 0
    for path in (ROOT / "xlnet_kernels/backends/triton").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or "triton.jit" not in map(
                ast.unparse, function.decorator_list
            ):
                continue
            for end in (node for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None):
                seen += 1
                parts = end.value.args if isinstance(end.value, ast.Call) else getattr(end.value, "elts", [])
                assert "None" not in map(ast.unparse, parts), f"{path.name}, line {end.lineno}"
    assert seen > 50


@pytest.mark.slow
def test_compiles_for_gpus_that_are_not_here(tmp_path):
    output = in_a_process(tmp_path, "-m", "benchmarks.compiled.triton_report", "--sample", *map(str, ARCHITECTURES))
    report = [json.loads(line) for line in output.splitlines()]
    classes = {(kind, head_dim) for _, kind, head_dim in tuning.TABLE}
    assert {(row["kind"], row["head_dim"]) for row in report} == classes
    assert {(row["kernel"], row["architecture"]) for row in report} == {
        (kernel, architecture) for kernel in tuning.KERNELS for architecture in ARCHITECTURES
    }
    for row in report:
        check(row)
        assert row["hazards"] == [], row


def test_the_committed_report_is_of_this_table():
    rows = json.loads(COMMITTED.read_text())["rows"]
    found = {(r["architecture"], r["kind"], r["head_dim"], r["kernel"], r["call"]): r for r in rows}
    classes = {(kind, head_dim) for _, kind, head_dim in tuning.TABLE}
    assert set(found) == {
        (architecture, *key, kernel, call)
        for architecture in ARCHITECTURES
        for key in classes
        for kernel in tuning.KERNELS
        for call in ("order", "stacked")
    }
    for row in rows:
        check(row)
        capability = divmod(row["architecture"], 10)
        config = tuning.choose(row["kernel"], row["kind"], row["head_dim"], capability)
        assert config._asdict().items() <= row.items(), row
