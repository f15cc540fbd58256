"""float32 by the precision that torch is told: torch.set_float32_matmul_precision and fp32_precision of oneDNN.

test_instruction_sets.py runs this file with the emulated products, because few processors have those of hardware.
"""

from __future__ import annotations

import logging
import math
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
splits = pytest.mark.skipif(
    _extension.module.cpu_products_of_parts is None, reason="this processor has no fast products of parts"
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
    "dropout": dict(batch=1, heads=2, length=280, width=16, options=dict(dropout_p=0.3)),
    "odd width": dict(batch=1, heads=2, length=280, width=20, mask="order", segments=True),
}
LONG = {name for name, sizes in PROBLEMS.items() if sizes["length"] + sizes.get("mem", 0) >= 256}
# Rows and keys of calls with operands in two parts, and of others
IN_PARTS, EXACT = [(64, 256), (70, 300)], [(63, 300), (64, 255), (8, 600)]


def problem_of(name: str):
    sizes = dict(PROBLEMS[name])
    options = sizes.pop("options", {})
    return make(**sizes).with_options(**options)


def rounded(x):
    return x.bfloat16().to(x.dtype)


def in_parts(x):
    return rounded(x) + rounded(x - rounded(x))


CASES = [pytest.param("medium", name, rounded, 1.5, marks=rounds) for name in PROBLEMS]
# Twice that, because low parts are not multiplied with each other.
CASES += [pytest.param("high", name, in_parts, 3, marks=splits) for name in sorted(LONG)]


@pytest.mark.parametrize("precision, name, narrow, times", CASES)
def test_errors_are_those_of_the_operands(told, precision, name, narrow, times):
    problem = problem_of(name)
    exact, operands = (x.to(torch.float64).results("reference") for x in (problem, problem.map(narrow)))
    told(precision)
    found = problem.results("cpu")
    assert found["out"].dtype == torch.float32
    for key, value in exact.items():
        assert torch.equal(found[key].isinf(), value.isinf()), key  # the log-sum-exp of rows that see nothing
        found[key], operands[key], value = (
            x.double().nan_to_num(neginf=0.0) for x in (found[key], operands[key], value)
        )
        # `times` because P and dS are rounded too; 1e-6 for sums in float32.
        assert (found[key] - value).norm() <= times * (operands[key] - value).norm() + 1e-6 * value.norm(), key


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


@pytest.mark.parametrize("precision", [pytest.param("medium", marks=rounds), pytest.param("high", marks=splits)])
def test_backward_has_the_precision_of_forward(told, precision):
    problem = problem_of("several tiles")

    def gradient(forward: str, backward: str):
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in problem.leaves.items()}
        told(forward)
        out, _ = replace(problem, leaves=leaves).call("cpu")
        told(backward)
        return torch.autograd.grad(out, leaves["query"], torch.ones_like(out))[0]

    wanted = gradient(precision, precision)
    assert torch.equal(gradient(precision, "highest"), wanted)
    assert not torch.equal(gradient("highest", precision), wanted)


def changes(told, name: str, precision: str) -> bool:
    problem = problem_of(name)
    wanted = problem.results("cpu")
    told(precision)
    return not equal(problem.results("cpu"), wanted)


def test_the_highest_precision_is_the_default(told):
    assert not changes(told, "order", "highest")


@pytest.mark.parametrize("name", ["order", "several tiles"])
def test_precisions_change_results_where_there_are_products(told, name):
    assert changes(told, name, "medium") == (_extension.module.cpu_bfloat16_products is not None)


@pytest.mark.parametrize("rows, keys", [*IN_PARTS, *EXACT])
def test_operands_in_parts_are_for_long_calls(told, rows, keys):
    problem = make(1, 2, rows, mem=keys - rows)
    wanted = problem.results("cpu")
    told("high")
    found = problem.results("cpu")
    takes_parts = _extension.module.cpu_products_of_parts is not None and (rows, keys) in IN_PARTS
    for name in ("out", "grad query"):
        assert torch.equal(found[name], wanted[name]) != takes_parts, name


@splits
def test_fully_masked_rows_count_as_zeros_in_parts(told):
    problem = make(2, 2, 280, mask="padding", width=16)
    told("high")
    wanted = problem.results("cpu")
    masked = wanted["lse"].isneginf()
    assert masked.any() and not masked.all()
    query = problem.leaves["query"].detach().clone()
    query[masked] = math.inf
    assert equal(replace(problem, leaves=problem.leaves | {"query": query.requires_grad_()}).results("cpu"), wanted)


@splits
@pytest.mark.parametrize("leaf", ["key", "value", "rel_key"])
@pytest.mark.parametrize("number", [math.inf, torch.finfo(torch.float32).max])
def test_numbers_that_round_to_infinity_count_as_nan_in_parts(told, leaf, number):
    def where_finite(precision: str, number: float):
        problem = problem_of("window")
        changed = problem.leaves[leaf].detach().clone()
        changed[..., 1, 3] = number
        told(precision)
        found = replace(problem, leaves=problem.leaves | {leaf: changed.requires_grad_()}).results("cpu")
        return {name: value.isfinite() for name, value in found.items()}

    found = where_finite("high", number)
    assert found["out"].any() and not found["out"].all()
    assert equal(found, where_finite("medium", math.nan))


@pytest.mark.parametrize("precision", ["medium", "high"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_alone(told, dtype, precision):
    problem = problem_of("several tiles").to(dtype)
    wanted = problem.results("cpu")
    told(precision)
    assert equal(problem.results("cpu"), wanted)


@pytest.mark.parametrize(
    "precision, fact, calls, missing",
    [
        ("medium", "cpu_bfloat16_products", "", "has none of AMX-BF16, AVX512-BF16 and BFMMLA"),
        ("high", "cpu_products_of_parts", " for 64 rows and 256 keys or more", "only AMX-BF16 makes that faster"),
    ],
)
def test_one_line_says_which_products_are_taken(told, caplog, precision, fact, calls, missing):
    _precision._tell_products.cache_clear()
    x, rel_key = torch.randn(1, 2, 20, 16), torch.randn(2, 40, 16)
    told(precision)
    with caplog.at_level(logging.INFO, "xlnet_kernels"), torch.overrides.BaseTorchFunctionMode():  # not the fast path
        for _ in range(3):
            xk.rel_attention(x, x, x, rel_key, backend="cpu")
    (line,) = [record.message for record in caplog.records if "torch allows" in record.message]
    products = getattr(_extension.module, fact)
    assert line.endswith(missing if products is None else f"attention takes {products}{calls}")


@pytest.mark.parametrize("precision", ["medium", "high"])
def test_the_fast_path_takes_the_same_products(told, precision):
    x, rel_key = torch.randn(1, 2, 260, 16), torch.randn(2, 520, 16)
    told(precision)
    found = [xk.rel_attention(x, x, x, rel_key, backend="cpu") for _ in range(3)]
    with torch.overrides.BaseTorchFunctionMode():
        wanted = xk.rel_attention(x, x, x, rel_key, backend="cpu")
    assert all(torch.equal(out, wanted) for out in found)


# In two tests, because Dynamo takes both precisions for the same state
@pytest.mark.parametrize("precision", ["medium", "high"])
def test_compiled_calls_follow(told, precision):
    torch.compiler.reset()
    x, rel_key = torch.randn(1, 2, 260, 16), torch.randn(2, 520, 16)
    compiled = torch.compile(lambda x: xk.rel_attention(x, x, x, rel_key, backend="cpu"), backend="eager")
    for allowed in ("highest", precision, "highest"):
        told(allowed)
        assert torch.equal(compiled(x), xk.rel_attention(x, x, x, rel_key, backend="cpu")), allowed
