"""The edits of docs/how-to/add-a-term.md, made in a copy of the tree, add a term to all backends but CUDA."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import ROOT
from tests.cases import COMPILED

PAGE = (ROOT / "docs/how-to/add-a-term.md").read_text()
EDIT = re.compile(r"^`([\w./]+)`(?:, [^\n]*)?:$|^```(diff|cpp|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FAST_INTERPRETER = """
from tests.triton import fast_interpreter
fast_interpreter.install()
"""
CHECK = """
import sys, torch, xlnet_kernels as xk
dtype, backends = getattr(torch, sys.argv[1]), sys.argv[2:]
close = dict(rtol=1e-10, atol=1e-10) if dtype == torch.float64 else dict(rtol=1e-4, atol=1e-4)
torch.manual_seed(0)
B, H, L, M, D = 2, 3, 70, 30, 16

def leaf(*shape):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)

query, key, value, rel_key = leaf(B, H, L, D), leaf(B, H, L, D), leaf(B, H, L, D), leaf(H, M + 2 * L, D)
memory, bias = (leaf(B, H, M, D), leaf(B, H, M, D)), leaf(H, D)
key_bias = torch.randn(H, M + L)
grad = torch.randn(B, H, L, D, dtype=dtype)

def wider(x, column):
    return torch.cat([x.double(), column.double().expand(*x.shape[:-1], 1)], -1)

def zero(x):
    return wider(x, torch.zeros(()))

of_key = key_bias[None, :, :, None]
keys = wider(memory[0], of_key[:, :, :M]), wider(key, of_key[:, :, M:])
wide_memory = keys[0], zero(memory[1])
# Backward has kernels of its own where it is deterministic.
for scale, deterministic, content_bias in (0.3, True, None), (-0.3, False, bias):
    leaves = [query, key, value, rel_key, *memory, *([] if content_bias is None else [bias])]
    options = dict(mask=xk.RankMask.causal(B, L, M), scale=scale, deterministic=deterministic)

    def results(out):
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype), retain_graph=True)]

    expected = results(xk.rel_attention(
        wider(query, torch.ones(())), keys[1], zero(value), zero(rel_key), memory=wide_memory,
        content_bias=None if content_bias is None else zero(bias), backend="reference", **options)[..., :D])
    for backend in backends:
        call = dict(memory=memory, content_bias=content_bias, backend=backend, **options)
        found = results(xk.rel_attention(query, key, value, rel_key, key_bias=key_bias, **call))
        without = results(xk.rel_attention(query, key, value, rel_key, **call))
        for a, b, c in zip(found, expected, without):
            torch.testing.assert_close(a, b.to(dtype), **close)
            assert not torch.allclose(a, c, **close)

import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from xlnet_kernels.distributed.ring_attention import ring_attention

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
shards = distribute_tensor(query.detach(), mesh, [Shard(1)])
out = xk.rel_attention(shards, key, value, rel_key, key_bias=key_bias, **call)
torch.testing.assert_close(out.full_tensor().detach(), expected[0].to(dtype), **close)
given = dict(query=query, key=key, value=value, rel_key=rel_key[:, M:], key_bias=key_bias[:, M:], backend=backend)
torch.testing.assert_close(ring_attention(**given), xk.rel_attention(**given), **close)
dist.destroy_process_group()
assert "        key_bias: " in xk.rel_attention.__doc__
print(*backends, "have the term")
"""


def edits() -> list[tuple[str, str, str]]:
    """(file, kind, text) of each of the page's edits."""
    found, name = [], ""
    for file, kind, text in EDIT.findall(PAGE):
        name = file or name
        if kind:
            found.append((name, kind, text))
    return found


def make(tree: Path, wanted: list[tuple[str, str, str]]) -> None:
    """Makes edits. One whose context is not there, or there twice, fails."""
    for name, kind, text in wanted:
        path = tree / name
        if kind != "diff":
            assert not path.exists(), f"{name} is there already"
            path.write_text(text)
            continue
        lines = text.splitlines()
        old, new = ("\n".join(line[1:] for line in lines if line[0] in f" {sign}") for sign in "-+")
        found = path.read_text()
        assert found.count(old) == 1, f"{name} has this {found.count(old)} times: {old}"
        path.write_text(found.replace(old, new))


@pytest.fixture
def tree(tmp_path):
    for folder in ("xlnet_kernels", "csrc", "build_backend"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests/__init__.py", tmp_path / "tests")
    shutil.copytree(ROOT / "tests/triton", tmp_path / "tests/triton")
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path / file)
    # An extension that is installed elsewhere does not have the term; until the copy is built it has none.
    (tmp_path / "xlnet_kernels/_build_info.json").write_text('{"torch": "0.0"}')
    return tmp_path


def attempt(tree: Path, *command: str) -> subprocess.CompletedProcess:
    own = {"PYTHONPATH": str(tree), "PYTHONWARNINGS": "ignore", "TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, *command], cwd=tree, env=os.environ | own, capture_output=True, text=True)


def run(tree: Path, *command: str) -> str:
    done = attempt(tree, *command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_table_names_the_files_that_are_edited():
    table = PAGE.partition("## Python")[0].partition("|---|")[2]
    named = re.findall(r"`([\w/]+/[\w.]+\.\w+)`", table.partition("\n\n")[0])
    assert sorted(named) == sorted({name for name, _, _ in edits()})


def test_backends_in_python_have_the_term(tree):
    make(tree, edits())
    assert run(tree, "-c", CHECK, "float64", "reference", "torch") == "reference torch have the term\n"


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_triton_backend_has_the_term(tree):
    make(tree, edits())
    assert run(tree, "-c", FAST_INTERPRETER + CHECK, "float32", "triton") == "triton have the term\n"


PYTHON_EDITS = [edit for edit in edits() if edit[0].endswith(".py")]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("left_out", range(len(PYTHON_EDITS)))
def test_a_forgotten_edit_fails(tree, left_out):
    make(tree, PYTHON_EDITS[:left_out] + PYTHON_EDITS[left_out + 1 :])
    name, is_triton = PYTHON_EDITS[left_out][0], "/triton/" in PYTHON_EDITS[left_out][0]
    arguments = ("float32", "triton") if is_triton else ("float64", "reference", "torch")
    assert attempt(tree, "-c", FAST_INTERPRETER + CHECK, *arguments).returncode == 1, name


@pytest.mark.slow
@pytest.mark.skipif("cpu" not in COMPILED, reason="the compiled extension is not there")
def test_the_cpu_backend_has_the_term(tree):
    make(tree, edits())
    run(tree, "setup.py", "build_ext", "--inplace")
    assert run(tree, "-c", CHECK, "float64", "cpu") == "cpu have the term\n"
