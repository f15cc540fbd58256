"""The edits of key_bias.md, made in a copy of the tree, add a term to every backend; all are needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lib.simt import simt_build
from tests import ROOT

PAGE = (ROOT / "docs/how-to/add-a-term.md").read_text()
ALL_EDITS = (ROOT / "tests/docs/key_bias.md").read_text()
EDIT = re.compile(r"^`([\w./]+)`(?:, [^\n]*)?:$|^```(diff|cpp|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Start of a backend's program, in the copy
FAST_INTERPRETER = """
from tests.triton import fast_interpreter
fast_interpreter.install()
"""
# Compiled for the host: one instruction set, or one dtype and head_dim. call.cpp comes first, because most edits that
# are left out are errors there.
COMPILED_PARTS = {
    "cpu": """
import torch
from tests import ROOT
from lib.simt import simt_build
from xlnet_kernels.backends import cpu
cpu.unavailable = lambda device=None: None
files = ["csrc/call.cpp", "csrc/stable/tensor.cpp", "csrc/cpu/register.cpp", "csrc/cpu/kernels_generic.cpp"]
files.append("one_instruction_set.cpp")
torch.ops.load_library(simt_build.extension([ROOT / name for name in files], "term", ["-std=c++20", "-O0"]))
""",
    "cuda-on-host": """
from tests import ROOT
from lib.simt import on_host
instances = {"forward_float32.cu", "backward_float32.cu"}
sources = [path for path in on_host.SOURCES if path.parent.name != "instances" or path.name in instances]
on_host.SOURCES = [*reversed(sources), ROOT / "one_dtype.cu"]
on_host.FLAGS = tuple(flag.replace("-O1", "-O0") for flag in on_host.FLAGS)
on_host.unavailable, on_host.max_head_dim = lambda device=None: None, lambda dtype, device=None: 128
on_host.install()
""",
}
HEAD_DIMS = "<int, 32, 64, 96, 128>"  # of all CUDA kernels; those of 32 serve the test
PARTS_LEFT_OUT = {
    "one_instruction_set.cpp": """
#include <cstdlib>
#include "csrc/cpu/bfloat16/products.h"
#include "csrc/cpu/kernels.h"

namespace xlnet_kernels::cpu {
Choice choose_kernels() {
  if (std::getenv("XLNET_KERNELS_CPU") == nullptr) return {generic_kernels.name, &generic_kernels, nullptr};
  return {generic_kernels.emulated->name, &generic_kernels, generic_kernels.emulated};
}
}  // namespace xlnet_kernels::cpu
""",
    "one_dtype.cu": """
#include "csrc/cuda/dispatch.cuh"

namespace xlnet_kernels::cuda {
template <> std::string forward_of<Half>(const Call&, Stream) { return "not compiled"; }
template <> std::string forward_of<BFloat16>(const Call&, Stream) { return "not compiled"; }
template <> std::string backward_of<Half>(const Backward&, Stream) { return "not compiled"; }
template <> std::string backward_of<BFloat16>(const Backward&, Stream) { return "not compiled"; }
}  // namespace xlnet_kernels::cuda
""",
}
CHECK = """
import inspect, sys, torch, xlnet_kernels as xk
dtype, backends = getattr(torch, sys.argv[1]), sys.argv[2:]
floor = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-3}[dtype]
close = dict.fromkeys(("rtol", "atol"), max(floor, 4 * torch.finfo(dtype).eps))  # a few roundings of an output
torch.manual_seed(0)
B, H, L, M, D = 2, 2, 70, 30, 16

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
    rounded = results(xk.rel_attention(query, key, value, rel_key, memory=memory, content_bias=content_bias,
                                       key_bias=key_bias, backend="reference", **options))
    for backend in backends:
        call = dict(memory=memory, content_bias=content_bias, backend=backend, **options)
        found = results(xk.rel_attention(query, key, value, rel_key, key_bias=key_bias, **call))
        limits = [3 * (d - b).abs().max() + floor * (1 + b.abs().max()) for b, d in zip(expected, rounded)]
        assert all((a - b).abs().max() < limit for a, b, limit in zip(found, expected, limits))
        without = results(xk.rel_attention(query, key, value, rel_key, **call))
        assert all(limit < (a - c).abs().max() for a, c, limit in zip(found, without, limits))

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
assert inspect.getsource(sys.modules["xlnet_kernels.functional"]).count("    key_bias: Tensor | None") == 3  # overloads
print(*backends, "have the term")
"""
# Kernels check their arguments themselves, because another language's checks may be left out.
REFUSAL = """
import importlib
from xlnet_kernels import call_checks
from xlnet_kernels.call import collect, replace

checked = call_checks.check(collect(query, key, value, rel_key, memory=memory, key_bias=key_bias))
module = importlib.import_module("xlnet_kernels.backends")._BACKENDS[backend]
try:
    module.rel_attention(replace(checked, key_bias=key_bias[:, 1:]))
except (ValueError, RuntimeError) as error:
    assert "key_bias must be" in str(error)
else:
    raise AssertionError("a key_bias of another shape is taken")
"""


def edits(page: str = ALL_EDITS) -> list[tuple[str, str, str]]:
    """(file, kind, text) of each edit on a page."""
    found, name = [], ""
    for file, kind, text in EDIT.findall(page):
        name = file or name
        if kind:
            found += [(name, kind, hunk) for hunk in text.split("@@\n")]
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


def copy_of_the_tree(to: Path) -> Path:
    for folder in ("xlnet_kernels", "csrc", "build_backend", "benchmarks/lib", "tests/triton"):
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "tests/__init__.py"):
        shutil.copy(ROOT / file, to / file)
    # An extension that is installed elsewhere does not have the term; until the copy is built it has none.
    (to / "xlnet_kernels/_build_info.json").write_text('{"torch": "0.0"}')
    return to


@pytest.fixture
def tree(tmp_path):
    return copy_of_the_tree(tmp_path)


def environment(tree: Path, **own: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(tree), "PYTHONWARNINGS": "ignore", "TRITON_INTERPRET": "1"} | own


def attempt(tree: Path, *command: str, **own: str) -> subprocess.CompletedProcess:
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=tree, env=environment(tree, **own), capture_output=True, text=True)


def run(tree: Path, *command: str, **own: str) -> str:
    done = attempt(tree, *command, **own)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


# Python that has imported all but the tree: a fork of it runs each script, to avoid seconds of imports.
FORKS = """
import importlib, json, os, sys
for name in ("numpy", "torch", "torch.distributed.tensor", "triton.language"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for line in sys.stdin:
    tree, script, *arguments = json.loads(line)
    pid = os.fork()
    if pid == 0:
        output = os.open(os.path.join(tree, "output"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2), os.chdir(tree)
        sys.path[0], sys.argv = tree, ["-c", *arguments]
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def in_fork(tmp_path_factory):
    """in_fork(tree, script, *arguments) -> (exit status, what it printed)."""
    nowhere = tmp_path_factory.mktemp("forks")
    command, pipe = [sys.executable, "-c", FORKS], subprocess.PIPE
    with subprocess.Popen(command, cwd=nowhere, env=environment(nowhere), stdin=pipe, stdout=pipe, text=True) as server:

        def run(tree: Path, script: str, *arguments: str) -> tuple[int, str]:
            server.stdin.write(json.dumps([str(tree), script, *arguments]) + "\n")
            server.stdin.flush()
            return int(server.stdout.readline()), (tree / "output").read_text()

        yield run
        server.stdin.close()


def test_the_table_names_the_files_that_are_edited():
    table = PAGE.partition("|---|")[2].partition("\n\n")[0]
    named = re.findall(r"`([\w/]+/[\w.]+\.\w+)`", table)
    assert sorted(named) == sorted({name for name, _, _ in edits()})


def test_the_page_shows_edits():
    """Each of them whole, or lines of a new file."""
    shown = edits(PAGE)
    assert {kind for _, kind, _ in shown} == {"diff", "cpp", "python"}
    for edit in shown:
        name, kind, text = edit
        is_part = kind != "diff" and any(name == file and text in whole for file, _, whole in edits())
        assert edit in edits() or is_part, edit


def test_backends_in_python_have_the_term(tree, in_fork):
    make(tree, edits())
    assert in_fork(tree, CHECK, "float64", "reference", "torch") == (0, "reference torch have the term\n")


NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@NEEDS_TRITON
def test_the_triton_backend_has_the_term(tree, in_fork):
    make(tree, edits())
    assert in_fork(tree, FAST_INTERPRETER + CHECK, "float32", "triton") == (0, "triton have the term\n")


PYTHON_EDITS = [edit for edit in edits() if edit[0].endswith(".py")]
CPP_EDITS = [edit for edit in edits() if edit not in PYTHON_EDITS]


def left_out_edits() -> list:
    """Numbers of PYTHON_EDITS; in a normal run one of Triton's, whose kernels take seconds each."""
    triton = [number for number, (name, _, _) in enumerate(PYTHON_EDITS) if "/triton/" in name]
    marks = {number: [pytest.mark.thorough] for number in triton[1:]}
    return [
        pytest.param(number, marks=marks.get(number, []), id=f"{name}-{number}")
        for number, (name, _, _) in enumerate(PYTHON_EDITS)
    ]


@NEEDS_TRITON
@pytest.mark.parametrize("left_out", left_out_edits())
def test_a_forgotten_edit_fails(tree, in_fork, left_out):
    make(tree, PYTHON_EDITS[:left_out] + PYTHON_EDITS[left_out + 1 :])
    name, is_triton = PYTHON_EDITS[left_out][0], "/triton/" in PYTHON_EDITS[left_out][0]
    arguments = ("float32", "triton") if is_triton else ("float64", "reference", "torch")
    status, output = in_fork(tree, FAST_INTERPRETER + CHECK, *arguments)
    assert status == 1, name + output


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A copy with all edits, whose compiled files are kept beside it."""
    if simt_build.COMPILER is None:
        pytest.skip(simt_build.NO_COMPILER)
    tree = copy_of_the_tree(tmp_path_factory.mktemp("compiled"))
    make(tree, edits())
    for name, text in PARTS_LEFT_OUT.items():
        (tree / name).write_text(text)
    sizes = (tree / "csrc/cuda/tile_sizes.h").read_text()
    assert sizes.count(HEAD_DIMS) == 1
    (tree / "csrc/cuda/tile_sizes.h").write_text(sizes.replace(HEAD_DIMS, "<int, 32>"))
    (tree / "cache").mkdir()
    for backend, dtype in ("cpu", "float64"), ("cpu", "bfloat16"), ("cuda-on-host", "float32"):
        assert run(tree, *in_parts(backend, dtype), **kept_in(tree / "cache", dtype)) == f"{backend} have the term\n"
    return tree


def in_parts(backend: str, dtype: str) -> tuple[str, ...]:
    return "-c", COMPILED_PARTS[backend] + CHECK + REFUSAL, dtype, backend


def kept_in(folder: Path, dtype: str) -> dict[str, str]:
    return {"TMPDIR": str(folder)} | ({"XLNET_KERNELS_CPU": "emulated_bf16"} if dtype == "bfloat16" else {})


@pytest.mark.slow
def test_compiled_backends_have_the_term(compiled):
    """In the fixture, because tests of forgotten edits start from the same copy."""
    assert any((compiled / "cache").iterdir())


# These compile one source file again. The others compile nearly all, so `make test-machine` has them.
QUICK = [i for i, (name, _, _) in enumerate(CPP_EDITS) if name.endswith("/call.cpp")]
LEFT_OUT = range(len(CPP_EDITS)) if "XLNET_KERNELS_MACHINE" in os.environ else QUICK


@pytest.mark.slow
@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_a_forgotten_edit_of_cpp_fails(compiled, left_out, tmp_path):
    """One that others do not need for compiling: the term is not there, or a wrong shape is taken."""
    name = CPP_EDITS[left_out][0]
    backend = "cpu" if "/cpu/" in name else "cuda-on-host"
    whole = (compiled / name).read_text()
    (compiled / name).unlink()
    if (ROOT / name).exists():
        shutil.copy(ROOT / name, compiled / name)
    make(compiled, [edit for i, edit in enumerate(CPP_EDITS) if edit[0] == name and i != left_out])
    shutil.copytree(compiled / "cache", tmp_path / "cache", copy_function=os.link)
    try:
        dtypes = ("float64", "bfloat16") if backend == "cpu" else ("float32",)
        done = [attempt(compiled, *in_parts(backend, d), **kept_in(tmp_path / "cache", d)).returncode for d in dtypes]
        assert 1 in done
    finally:
        (compiled / name).write_text(whole)
