"""`pip install .` against a CUDA build of torch, where no GPU is needed: compiles, links, loads, says what it is.

Thorough: torch for CUDA takes 5 GB and a minute, the kernels for one architecture about four minutes on two cores. One
test leaves out the kernels' code. In `make test` cuda/test_compile.py compiles a sample of kernels, machine/ links and
runs the host's code, test_cuda_architectures.py and test_build_decisions.py have the choices of a build.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.compiled import ptxas_report
from tests import ROOT
from tests.packaging.test_install import compiler, run  # noqa: F401

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: set PATH to where CUDA's compiler is"),
]
ASK = """
import torch, xlnet_kernels as xk
x = torch.randn(1, 2, 5, 64)
assert xk.rel_attention(x, x, x, torch.randn(2, 10, 64)).isfinite().all()
try:
    xk.rel_attention(x, x, x, torch.randn(2, 10, 64), backend="cuda")
except RuntimeError as error:
    print(error)
"""


def leave_kernels_out(tree: Path) -> None:
    """Make each instance of the kernels a function without them."""
    instances = [*tree.glob("csrc/cuda/instances/*.cu"), *tree.glob("csrc/cuda/sm90/*.cu")]
    assert len(instances) == 6 + 6
    for path in instances:
        text = re.sub(r'#include ".*"', '#include "../dispatch.cuh"', path.read_text())
        instance = r"template (std::string \w+<[\w, ]+>\(.*\));"
        text, count = re.subn(instance, r'template <> \1 { return "left out"; }', text)
        assert count == 1, path
        path.write_text(text)


@pytest.mark.parametrize("has_kernels", [False, True])
def test_builds_for_a_gpu_that_is_not_here(tmp_path, has_kernels, compiler):  # noqa: F811
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    status, output = run(python, "-m", "pip", "install", "torch", "numpy", cwd=tmp_path, check=False)
    if status:
        pytest.skip(f"no other torch can be had here: {output[-300:]}")
    if run(python, "-c", "import torch; print(torch.version.cuda)", cwd=tmp_path).strip() == "None":
        pytest.skip("the newest torch that can be had here is a build without CUDA")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "build", "*.so", "results"))
    if not has_kernels:
        leave_kernels_out(tree)
    variables = {} if has_kernels else dict(compiler)
    architectures, names = ("8.0", "sm_80") if has_kernels else ("8.0;9.0a", "sm_80, sm_90a")
    variables["TORCH_CUDA_ARCH_LIST"] = architectures
    output = run(python, "-m", "pip", "install", "-v", ".", cwd=tree, **variables)
    assert f"--threads {1 if has_kernels else 2} " in output  # nvcc compiles for all architectures at once
    found = ptxas_report.kernels(output)
    assert len(found) == (2 * 3 * 4 if has_kernels else 0)  # forward and backward, three dtypes, four widths
    if has_kernels:
        ptxas_report.check(found)

    # not in `tree`, whose package has no compiled kernels
    facts = json.loads(run(python, "-m", "xlnet_kernels.info", "--json", cwd=tmp_path))
    assert facts["compiled"]["cuda_architectures"] == architectures
    if not facts["cuda_devices"]:
        assert facts["backends"]["cuda"] == f"compiled for {names}, no CUDA device"
        refused = run(python, "-c", ASK, cwd=tmp_path)
        assert refused.strip() == f'backend="cuda" is unavailable: compiled for {names}, no CUDA device'
