"""The edits of docs/how-to/add-a-term.md, made in a copy of the tree, add a term to three backends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.cases import COMPILED

PAGE = (ROOT / "docs/how-to/add-a-term.md").read_text()
EDIT = re.compile(r"^`([\w./]+)`(?:, [^\n]*)?:$|^```(diff|cpp)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CHECK = """
import sys, torch, xlnet_kernels as xk
torch.manual_seed(0)
B, H, L, M, D = 2, 3, 70, 30, 16

def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

query, key, value, rel_key = leaf(B, H, L, D), leaf(B, H, L, D), leaf(B, H, L, D), leaf(H, M + 2 * L, D)
memory = leaf(B, H, M, D), leaf(B, H, M, D)
key_bias = torch.randn(H, M + L)
leaves = query, key, value, rel_key, *memory
options = dict(mask=xk.RankMask.causal(B, L, M), scale=0.3)
grad = torch.randn(B, H, L, D, dtype=torch.float64)

def results(out):
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

def wider(x, column):
    return torch.cat([x, column.expand(*x.shape[:-1], 1)], -1)

def zero(x):
    return wider(x, torch.zeros((), dtype=x.dtype))

of_key = key_bias.double()[None, :, :, None]
keys = wider(memory[0], of_key[:, :, :M]), wider(key, of_key[:, :, M:])
expected = results(xk.rel_attention(
    wider(query, torch.ones((), dtype=torch.float64)), keys[1], zero(value), zero(rel_key),
    memory=(keys[0], zero(memory[1])), backend="reference", **options)[..., :D])
for backend in sys.argv[1:]:
    call = dict(memory=memory, backend=backend, **options)
    found = results(xk.rel_attention(query, key, value, rel_key, key_bias=key_bias, **call))
    without = results(xk.rel_attention(query, key, value, rel_key, **call))
    for a, b, c in zip(found, expected, without):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        assert not torch.allclose(a, c)
    print(backend, "has the term")

import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from xlnet_kernels.distributed.ring_attention import ring_attention

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
shards = distribute_tensor(query.detach(), mesh, [Shard(1)])
out = xk.rel_attention(shards, key, value, rel_key, key_bias=key_bias, memory=memory, backend=backend, **options)
torch.testing.assert_close(out.full_tensor().detach(), expected[0], rtol=1e-10, atol=1e-10)
given = dict(query=query, key=key, value=value, rel_key=rel_key[:, M:], key_bias=key_bias[:, M:], backend=backend)
torch.testing.assert_close(ring_attention(**given), xk.rel_attention(**given), rtol=1e-10, atol=1e-10)
dist.destroy_process_group()
"""


def add_the_term(tree: Path) -> list[str]:
    """Makes the page's edits and names the files. An edit whose context is not there, or there twice, fails."""
    edited, name = [], None
    for file, kind, text in EDIT.findall(PAGE):
        if file:
            name = file
            continue
        path = tree / name
        edited.append(name)
        if kind == "cpp":
            path.write_text(text)
            continue
        lines = text.splitlines()
        old, new = ("\n".join(line[1:] for line in lines if line[0] in f" {sign}") for sign in "-+")
        found = path.read_text()
        assert found.count(old) == 1, f"{name} has this {found.count(old)} times: {old}"
        path.write_text(found.replace(old, new))
    return list(dict.fromkeys(edited))


@pytest.fixture
def tree(tmp_path):
    for folder in ("xlnet_kernels", "csrc", "build_backend"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path / file)
    # An extension that is installed elsewhere does not have the term; until the copy is built it has none.
    (tmp_path / "xlnet_kernels/_build_info.json").write_text('{"torch": "0.0"}')
    return tmp_path


def run(tree: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_reference_has_the_term(tree):
    edited = add_the_term(tree)
    assert all(f"`{name}`" in PAGE.partition("## Python")[0] for name in edited) and len(edited) == 10
    assert run(tree, "-c", CHECK, "reference", "torch") == "reference has the term\ntorch has the term\n"


@pytest.mark.slow
@pytest.mark.skipif("cpu" not in COMPILED, reason="the compiled extension is not there")
def test_the_cpu_backend_has_the_term(tree):
    add_the_term(tree)
    run(tree, "setup.py", "build_ext", "--inplace")
    assert run(tree, "-c", CHECK, "reference", "cpu") == "reference has the term\ncpu has the term\n"
