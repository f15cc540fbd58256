"""Benchmarks measure and write results, tests do not; benchmarks stand on the package and on benchmarks/lib.

Experiments train what examples/ train, and stand on both.
"""

from __future__ import annotations

import ast

from tests import ROOT

# What executes the GPU kernels on the host is the tests' own; these count or time what it executes.
ON_HOST = {"gpu_counts.py", "long_counts.py", "bounds.py", "host_time.py"}


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
    assert {file.name for file, names in files.items() if "tests" in names} == ON_HOST
    assert {file.name for file, names in files.items() if names & examples} == set()


def test_the_machine_writes_no_results():
    files = list((ROOT / "tests" / "machine").rglob("*.py"))
    assert len(files) > 20
    for file in files:
        text = file.read_text()
        assert not any(word in text for word in ("benchmarks/results", "write_json", '"--output"')), file
        assert not {"json"} & imported(file), file
