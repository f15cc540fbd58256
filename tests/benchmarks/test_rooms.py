"""Benchmarks measure and write results, tests do not; benchmarks import from the package and benchmarks/lib.

The machines that execute GPU kernels on the host lie in benchmarks/lib, because tests and benchmarks use both.
Experiments train what examples/ train, and import from both.
"""

from __future__ import annotations

import ast

from tests import ROOT


def imported(file) -> set[str]:
    """The first words of all modules that a file imports from elsewhere than its own folder."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_benchmarks_import_neither_tests_nor_examples():
    examples = {"claims", "examples", "experiments", "parts"} | {file.stem for file in (ROOT / "examples").glob("*.py")}
    files = {file: imported(file) for file in (ROOT / "benchmarks").rglob("*.py")}
    assert {"gpu_counts.py", "cuda_driver.py", "on_host.py"} <= {file.name for file in files}
    assert [file for file, names in files.items() if names & {"tests", *examples}] == []


OF_GPU_KERNELS = [path for name in ("machine", "cuda") for path in (ROOT / "tests" / name).rglob("*.*")]


def test_what_executes_gpu_kernels_is_not_in_tests():
    assert {path.name for path in OF_GPU_KERNELS if path.suffix not in (".py", ".pyc")} == {
        "sample.cu",
        "selftest.cu",
        "shift.cu",
    }


def test_tests_of_gpu_kernels_write_no_results():
    files = [path for path in OF_GPU_KERNELS if path.suffix == ".py"]
    assert len(files) > 20
    for file in files:
        text = file.read_text()
        assert not any(word in text for word in ("benchmarks/results", "write_json", '"--output"')), file
        assert not {"json"} & imported(file), file
