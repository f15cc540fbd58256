"""The CPU kernels exist once per instruction set, chosen at run time: each must be right, not only the best."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests import ROOT
from tests.cases import COMPILED
from xlnet_kernels import _extension

if "cpu" not in COMPILED:
    pytest.skip("the compiled extension is not there", allow_module_level=True)

REFUSED = "XLNET_KERNELS_CPU names no instruction set that this processor has"


def run_with(instruction_set: str, *command: str, **variables: str) -> subprocess.CompletedProcess:
    """A process of its own, since the choice is made once."""
    environment = os.environ | {"XLNET_KERNELS_CPU": instruction_set, **variables}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


def skip_own(instruction_set: str) -> None:
    """Skip this process's own instruction set, with which it runs the tests' files anyway."""
    module = _extension.module
    if instruction_set in (module.cpu_instruction_set, module.cpu_bfloat16_products):
        pytest.skip(f"the files themselves run with {instruction_set} here")


SMALL_CALL = """
import torch, xlnet_kernels as xk
x = torch.randn(1, 1, 2, 8)
xk.rel_attention(x, x, x, torch.randn(1, 4, 8), backend="cpu")
"""


# A process of its own for each takes seconds, so that all files share it.
OPERATOR = "test_operator and cpu and (dtypes or blocks_of_ranks or strided or tile-plus-one)"
FLOAT32 = f"({OPERATOR}) or (test_unread and cpu and float32)"
BFLOAT16 = "test_bfloat16 or test_float32_precision or (test_unread and cpu and bfloat16)"


@pytest.mark.parametrize(
    "instruction_set", ["avx2", "neon", "generic", "amx_bf16", "avx512_bf16", "neon_bf16", "emulated_bf16"]
)
def test_is_as_right_as_the_best_one(instruction_set):
    """Float32, or products of 16 bits; unread rows count as zeros."""
    skip_own(instruction_set)
    if REFUSED in run_with(instruction_set, "-c", SMALL_CALL).stderr:
        pytest.skip(f"this processor, or this build, has no {instruction_set}")
    names, chosen = ["operator/test_operator.py"], FLOAT32
    if "bf16" in instruction_set:
        names, chosen = ["cpu/test_bfloat16.py", "cpu/test_float32_precision.py"], BFLOAT16
    files = [str(ROOT / "tests" / name) for name in (*names, "operator/test_unread.py")]
    found = run_with(instruction_set, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", chosen)
    assert found.returncode == 0 and " passed" in found.stdout, found.stdout[-4000:]


HASH = """
import hashlib
import torch
from tests.cases import make

torch.manual_seed(0)
torch.set_float32_matmul_precision("medium")
for dtype in (torch.bfloat16, torch.float32):
    problem = make(2, 2, 150, mem=40, width=40, mask="order", dtype=dtype).with_options(dropout_p=0.1)
    found = problem.results("cpu")
    print(hashlib.sha256(b"".join(found[name].float().numpy().tobytes() for name in sorted(found))).hexdigest())
"""


def test_the_emulation_is_the_instruction():
    """The C++ of avx512_bf16's instruction gives its results to the bit, also in float32 at precision "medium"."""
    native, emulated = (run_with(name, "-c", HASH) for name in ("avx512_bf16", "emulated_bf16"))
    assert emulated.returncode == 0, emulated.stderr
    if REFUSED in native.stderr:
        pytest.skip("this processor, or this build, has no avx512_bf16")
    assert native.stdout == emulated.stdout


FORK = """
import os
import torch
from tests.cases import make

torch.set_num_threads(1)  # torch's own threads do not survive a fork
problem = make(1, 1, 40, dtype=torch.bfloat16)
wanted = problem.results("cpu")
child = os.fork()
found = problem.results("cpu")
same = all(torch.equal(found[name], value) for name, value in wanted.items())
if child == 0:
    os._exit(0 if same else 1)
assert same and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_16_bit_products_survive_a_fork():
    found = run_with("", "-c", FORK)
    assert found.returncode == 0, found.stderr


def test_unknown_name_is_refused_and_the_torch_backend_serves(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ask = "import logging; logging.basicConfig(level='INFO')" + SMALL_CALL.replace(', backend="cpu"', "") + SMALL_CALL
    found = run_with("avx1024", "-c", ask).stderr
    warning, served, *_, refusal = [line for line in found.splitlines() if "XLNET_KERNELS_CPU" in line]
    assert "RuntimeWarning: XLNET_KERNELS_CPU must be an instruction set that this processor has, of amx_" in warning
    assert warning.endswith("""got 'avx1024': backend "torch" serves instead of "cpu\"""")
    assert "the torch backend serves tensors on cpu" in served and REFUSED in served
    assert refusal == f'RuntimeError: backend="cpu" is unavailable: {REFUSED}: avx1024'


@pytest.mark.parametrize("name, expected", [("generic", "generic"), ("avx1024", None)])
def test_info_says_which_one_is_used(name, expected):
    facts = json.loads(run_with(name, "-m", "xlnet_kernels.info", "--json").stdout)
    assert facts["compiled"]["cpu_instruction_set"] == expected
    assert facts["compiled"]["cpu_bfloat16_products"] is None
    assert (facts["backends"]["cpu"] == "ready") == (expected is not None)


def test_info_refuses_an_unknown_name():
    found = run_with("avx1024", "-m", "xlnet_kernels.info")
    assert found.returncode == 1 and re.search(rf"cpu +{REFUSED}: avx1024\n", found.stdout)


def test_info_says_which_products_bfloat16_takes():
    found = run_with("emulated_bf16", "-m", "xlnet_kernels.info")
    assert "generic; bfloat16: emulated_bf16, float32 in parts too\n" in found.stdout


def test_check_names_the_instruction_set():
    without_triton = {"TRITON_INTERPRET": "0"}  # interpreting it takes most of the time
    found = run_with("generic", "-m", "xlnet_kernels.info", "--check", **without_triton)
    names, sets = found.stdout.splitlines()[2:4]
    assert names.index("cpu") + len("cpu") == sets.index("generic") + len("generic")
