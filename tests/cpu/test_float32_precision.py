"""float32 by the precision that torch is told: torch.set_float32_matmul_precision and fp32_precision of oneDNN.

test_instruction_sets.py runs this file with the emulated products, because few processors have those of hardware.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import xlnet_kernels as xk
from tests.cases import COMPILED, make
from tests.operator.test_trusted_gradients import OFFSETS, Sums
from xlnet_kernels import _extension, _precision

if "cpu" not in COMPILED:
    pytest.skip("the compiled extension is not there", allow_module_level=True)
if not hasattr(torch.backends.mkldnn, "matmul"):
    pytest.skip("torch 2.9 and newer have the switch", allow_module_level=True)

rounds = pytest.mark.skipif(
    _extension.module.cpu_bfloat16_products is None, reason="this processor has no bfloat16 products"
)
exact_only = pytest.mark.skipif(
    _extension.module.cpu_bfloat16_products is not None, reason="this processor has bfloat16 products"
)


@pytest.fixture
def told():
    """A function that tells torch a precision, which is taken back."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def equal(found, wanted) -> bool:
    return all(torch.equal(value, wanted[name]) for name, value in found.items())


PROBLEMS = {
    "order": dict(batch=2, heads=2, length=70, mem=40, width=40, mask="order"),
    "several tiles": dict(batch=1, heads=1, length=600, mem=30, width=64),
    "padding": dict(batch=2, heads=2, length=130, width=24, mask="padding", segments=True),
    "positions": dict(batch=2, heads=1, length=50, mem=20, mask="ranks", positions=True),
    "window": dict(batch=1, heads=2, length=300, window=(30, 61), width=16),
}


def problem_of(name: str):
    return make(**PROBLEMS[name])


def rounded(problem):
    return problem.map(lambda leaf: leaf.bfloat16().to(leaf.dtype))


@rounds
@pytest.mark.parametrize("name", PROBLEMS)
def test_errors_are_those_of_rounded_operands(told, name):
    problem = problem_of(name)
    exact, operands = (x.to(torch.float64).results("reference") for x in (problem, rounded(problem)))
    told("medium")
    found = problem.results("cpu")
    assert found["out"].dtype == torch.float32
    for key, value in exact.items():
        assert torch.equal(found[key].isinf(), value.isinf()), key  # the log-sum-exp of rows that see nothing
        found[key], operands[key], value = (
            x.double().nan_to_num(neginf=0.0) for x in (found[key], operands[key], value)
        )
        # 1.5 because P and dS are rounded too; 1e-6 for sums in float32.
        assert (found[key] - value).norm() <= 1.5 * (operands[key] - value).norm() + 1e-6 * value.norm(), key


@rounds
@pytest.mark.parametrize("kind", OFFSETS)
def test_gradients_that_sum_over_rows(told, kind):
    """As test_bfloat16.py has it for bfloat16: no worse than with 16-bit operands and all else exact."""
    narrow = Sums.make(kind, 512, torch.bfloat16, heads=1, head_dim=16)
    exact, operands = narrow.gradients("reference", torch.float64), narrow.with_rounded_operands()
    told("medium")
    for name, gradient in narrow.gradients("cpu", torch.float32).items():
        allowed = 2.5 if name.startswith("segment") else 1.5  # segments' errors are one number a row, which scatter
        assert (gradient - exact[name]).norm() <= allowed * (operands[name] - exact[name]).norm(), name


@rounds
def test_bfloat16_numbers_are_multiplied_alike(told):
    """float32 storage of bfloat16 numbers: scores, and so the log-sum-exp, are those of a bfloat16 call to the bit."""
    problem = make(2, 2, 70, mem=9, width=40, mask="order", biases=False, dtype=torch.bfloat16)
    wanted = problem.results("cpu", needs=())
    told("medium")
    found = problem.to(torch.float32).results("cpu", needs=())
    assert torch.equal(found["lse"], wanted["lse"]) and torch.equal(found["out"].bfloat16(), wanted["out"])


@rounds
def test_backward_has_the_precision_of_forward(told):
    problem = problem_of("order")

    def gradient(forward: str, backward: str):
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in problem.leaves.items()}
        told(forward)
        out, _ = replace(problem, leaves=leaves).call("cpu")
        told(backward)
        return torch.autograd.grad(out, leaves["query"], torch.ones_like(out))[0]

    wanted = gradient("medium", "medium")
    assert torch.equal(gradient("medium", "highest"), wanted)
    assert not torch.equal(gradient("highest", "medium"), wanted)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_exact_precisions_change_nothing(told, precision):
    problem = problem_of("order")
    wanted = problem.results("cpu")
    told(precision)
    assert equal(problem.results("cpu"), wanted)


@exact_only
def test_without_instructions_nothing_changes(told):
    problem = problem_of("order")
    wanted = problem.results("cpu")
    told("medium")
    assert equal(problem.results("cpu"), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_alone(told, dtype):
    problem = problem_of("order").to(dtype)
    wanted = problem.results("cpu")
    told("medium")
    assert equal(problem.results("cpu"), wanted)


def test_one_line_says_which_products_are_taken(told, caplog):
    _precision._tell_whether_products_are_rounded.cache_clear()
    x, rel_key = torch.randn(1, 2, 20, 16), torch.randn(2, 40, 16)
    told("medium")
    with caplog.at_level(logging.INFO, "xlnet_kernels"), torch.overrides.BaseTorchFunctionMode():  # not the fast path
        for _ in range(3):
            xk.rel_attention(x, x, x, rel_key, backend="cpu")
    (line,) = [record.message for record in caplog.records if "torch allows bfloat16" in record.message]
    products = _extension.module.cpu_bfloat16_products
    assert line.endswith("has none of AMX-BF16, AVX512-BF16 and BFMMLA" if products is None else f"takes {products}")


def test_the_fast_path_takes_the_same_products(told):
    x, rel_key = torch.randn(1, 2, 70, 16), torch.randn(2, 140, 16)
    told("medium")
    found = [xk.rel_attention(x, x, x, rel_key, backend="cpu") for _ in range(3)]
    with torch.overrides.BaseTorchFunctionMode():
        wanted = xk.rel_attention(x, x, x, rel_key, backend="cpu")
    assert all(torch.equal(out, wanted) for out in found)


def test_compiled_calls_follow(told):
    x, rel_key = torch.randn(1, 2, 70, 16), torch.randn(2, 140, 16)
    compiled = torch.compile(lambda x: xk.rel_attention(x, x, x, rel_key, backend="cpu"), backend="eager")
    for precision in ("highest", "medium", "highest"):
        told(precision)
        assert torch.equal(compiled(x), xk.rel_attention(x, x, x, rel_key, backend="cpu")), precision
