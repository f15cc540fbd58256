"""The operator as torch's machinery sees it: opcheck, torch.compile, autocast, checkpointing, out-of-the-way uses."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

import xlnet_kernels as xk
from tests.cases import BACKENDS, COMPILED, INTERPRETED, MODULES, READY, assert_right, make
from xlnet_kernels import fast_path
from xlnet_kernels._precision import float32_precision

# Problems for torch.library's checks: schema, aliases, fake against real (strides too), gradients, AOTAutograd.
PROBLEMS = {
    "plain": dict(biases=False, segments=False),
    "everything": dict(mem=3, mask="order", positions=True, rel_batch=True),
    "dense": dict(mask="dense", rel_rows="uni"),
    "no-rows": dict(length=0, keys=4, mem=2),
}


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the arguments of every call of our operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "xlnet_kernels":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


OPERATORS = {
    "cpu": "rel_attention",
    "triton": "rel_attention_triton",
    "torch": "rel_attention_torch",
    "cuda-on-host": "rel_attention_simt",
}


def recorded(problem, backward: bool, backend: str):
    """The (operator, arguments) that a call of rel_attention, or its backward, ends in."""
    with Recorder() as recorder:
        problem.results(backend) if backward else problem.call(backend)
    name = OPERATORS[backend] + ("_backward" if backward else "")
    return next(call for call in recorder.calls if call[0]._opname == name)


@pytest.mark.parametrize("backend", [name for name in READY if name != "reference"])
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_opcheck(problem, backward, backend):
    if backend in INTERPRETED and problem in ("plain", "dense"):
        pytest.skip("the operators of all backends have the same schema, and interpreters are slow")
    problem = make(*((1, 2) if backend in INTERPRETED else (2, 2)), **PROBLEMS[problem])
    if not backward:
        problem = problem.map(lambda leaf: leaf.requires_grad_())
    function, arguments = recorded(problem, backward, backend)
    tests = ["test_schema", "test_faketensor"]
    if not backward:  # the backward operator has no gradient of its own
        tests += ["test_autograd_registration", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(function, arguments, test_utils=tests)


@pytest.mark.parametrize("backend", [name for name in READY if name != "reference"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("missing", "text"),
    [
        (("segment_embed", "query_ids", "key_ids"), "segment_bias must come with segment_embed"),
        (("segment_embed",), "query_ids and segment_embed must come together"),
        (("key_ids",), "query_ids and key_ids must come together"),
    ],
    ids=["bias-alone", "no-embed", "no-key-ids"],
)
def test_operators_refuse_parts_of_segments(missing, text, backward, backend):
    """Kernels look at one of them only, and would read the others from nowhere, or sums that do not exist."""
    function, arguments = recorded(make(1, 2), backward, backend)
    names = [argument.name for argument in function._schema.arguments]
    arguments = [None if name in missing else given for name, given in zip(names, arguments, strict=True)]
    with pytest.raises(ValueError, match=text):
        function(*arguments)


@pytest.mark.skipif("cpu" not in COMPILED, reason="the compiled extension is not there")
def test_output_is_laid_out_for_the_projection_that_follows():
    problem = make(2, 3, 5)
    assert problem.call("cpu")[0].transpose(1, 2).is_contiguous()


# inductor takes long over the reference, whose operations it knows well, and treats kernels all alike
@pytest.mark.parametrize(
    "backend, compiler", [(name, "aot_eager") for name in BACKENDS] + [(name, "inductor") for name in COMPILED]
)
def test_compiles_into_one_graph_and_not_again(backend, compiler):
    problem = make(2, 2, 20, mem=5, mask="order", positions=True)
    compiled = torch.compile(problem.call, fullgraph=True, backend=compiler)
    out, lse = compiled(backend)
    wanted, wanted_lse = problem.call(backend)
    assert torch.allclose(out, wanted, atol=1e-5) and torch.allclose(lse, wanted_lse, atol=1e-5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(backend)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch 2.9 and newer")
def test_compiled_calls_follow_what_is_said_of_float32_products():
    """The question that the checks ask for tensors on a GPU, without one."""
    matmul = torch.backends.cuda.matmul
    compiled = torch.compile(lambda x: x + float32_precision("cuda"), fullgraph=True, backend="eager")
    before = matmul.fp32_precision
    try:
        for said, found in (("ieee", 0), ("tf32", 1), ("ieee", 0)):
            matmul.fp32_precision = said
            assert compiled(torch.zeros(1)) == found
    finally:
        matmul.fp32_precision = before


def test_compiled_gradients_equal_eager(backend):
    problem = make(2, 2, 20, mem=5, mask="order", segments=True).map(lambda leaf: leaf.requires_grad_())
    leaves = list(problem.leaves.values())

    def loss():
        out, lse = problem.call(backend)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(loss(), leaves)
    with torch._dynamo.config.patch(error_on_recompile=False):
        torch.autograd.grad(compiled(), leaves)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = torch.autograd.grad(compiled(), leaves)
    for f, w in zip(found, wanted, strict=True):
        assert torch.allclose(f, w, rtol=1e-4, atol=1e-4)


def test_compiles_with_dynamic_shapes(backend):
    compiled = torch.compile(
        lambda q, k, v, r: xk.rel_attention(q, k, v, r, backend=backend),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for length in (5, 9, 12):
        leaves = list(make(1, 2, length, biases=False, segments=False).leaves.values())
        wanted = xk.rel_attention(*leaves, backend=backend)
        if length == 12:
            with torch._dynamo.config.patch(error_on_recompile=True):
                found = compiled(*leaves)
        else:
            found = compiled(*leaves)
        assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("mask", [xk.RankMask.causal(2, 7), torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()])
def test_masks_of_a_known_size_compile_with_dynamic_shapes(mask):
    """`in` compares a symbol with a number as if they were never equal."""
    attend = partial(xk.rel_attention, mask=mask, backend="reference")
    leaves = list(make(2, 2, 7, biases=False, segments=False).leaves.values())
    found = torch.compile(attend, dynamic=True, backend="eager", fullgraph=True)(*leaves)
    assert torch.allclose(found, attend(*leaves), atol=1e-5)


def test_autocast_casts_everything_to_its_dtype(backend):
    problem = make(2, 2, 30, mem=9, mask="order").map(lambda leaf: leaf.requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = problem.call(backend)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    out.float().sum().backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in problem.leaves.values() if leaf.grad is not None)
    wanted = problem.to(torch.bfloat16).call(backend)[0]
    assert torch.equal(out, wanted)


def test_autocast_leaves_float64_alone(backend):
    problem = make(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert problem.call(backend)[0].dtype == torch.float64


def test_gradient_checkpointing(backend):
    # the second forward must draw the same dropout, which torch's generator state brings back
    problem = make(2, 2, 20, mem=3, mask="order").map(lambda leaf: leaf.requires_grad_())
    leaves = list(problem.leaves.values())

    def run(*leaves):
        given = replace(problem, leaves=dict(zip(problem.leaves, leaves, strict=True)))
        return given.call(backend, dropout_p=0.3)[0].square().sum()

    torch.manual_seed(1)
    wanted = torch.autograd.grad(run(*leaves), leaves)
    torch.manual_seed(1)
    loss = torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=False)
    for f, w in zip(torch.autograd.grad(loss, leaves), wanted, strict=True):
        assert torch.equal(f, w)


@functools.cache  # operators are defined once
def python_gradients():
    """The operator with its gradients wired up in Python, as it is where there is no extension."""
    with mock.patch.object(xk._extension, "module", None):
        call = xk.ops.define("rel_attention_python")
    for end in ("", "_backward"):
        kernel = getattr(torch.ops.xlnet_kernels, f"rel_attention{end}")
        torch.library.impl(f"xlnet_kernels::rel_attention_python{end}", "CPU")(
            lambda *args, kernel=kernel: kernel(*args)
        )
    return call


@pytest.mark.skipif("cpu" not in COMPILED, reason="the compiled extension is not there")
def test_gradients_wired_up_in_python_and_in_cpp_are_the_same():
    problem = make(2, 2, 20, mem=5, mask="order", dtype=torch.bfloat16)
    wanted = problem.results("cpu")
    without_fast_path = mock.patch.object(fast_path, "attend", lambda *_: None)
    with without_fast_path, mock.patch.object(MODULES["cpu"], "rel_attention", python_gradients()):
        found = problem.results("cpu")
        problem = problem.map(lambda leaf: leaf.requires_grad_())
        out = problem.call("cpu")[0]
        assert "RelAttention" in type(out.grad_fn).__name__
        gradients = torch.autograd.grad(out.sum(), problem.leaves["query"], create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives"):
            gradients[0].sum().backward()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


# All operations of the reference are torch's, which it compiles for a minute.
@pytest.mark.parametrize("backend", [*COMPILED, pytest.param("reference", marks=pytest.mark.thorough)])
def test_compiled_autograd(backend):
    problem = make(2, 2, 20, mask="order").map(lambda leaf: leaf.requires_grad_())
    leaves = list(problem.leaves.values())
    wanted = torch.autograd.grad(problem.call(backend)[0].square().sum(), leaves)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        problem.call(backend)[0].square().sum().backward()
    for leaf, w in zip(leaves, wanted, strict=True):
        assert torch.allclose(leaf.grad, w, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif("cpu" not in COMPILED, reason="the compiled extension is not there")
def test_compiled_autograd_without_the_fast_path():
    without_fast_path = mock.patch.object(fast_path, "attend", lambda *_: None)
    with without_fast_path, mock.patch.object(MODULES["cpu"], "rel_attention", python_gradients()):
        test_compiled_autograd("cpu")


def test_second_derivatives_are_right_or_refused(backend):
    # kernels have none; to go on as if the gradient were a constant would be silently wrong
    problem = make(dtype=torch.float64).map(lambda leaf: leaf.requires_grad_())
    query = problem.leaves["query"]
    (gradient,) = torch.autograd.grad(problem.call(backend)[0].square().sum(), query, create_graph=True)
    if backend == "reference":
        assert torch.autograd.grad(gradient.sum(), query)[0].abs().sum() > 0
    else:
        with pytest.raises(RuntimeError, match="second derivatives"):
            (query + gradient).sum().backward()


@pytest.mark.parametrize("backend", COMPILED)  # the reference computes with copies of the keys
def test_inputs_changed_in_place_before_backward_are_noticed(backend):
    problem = make().map(lambda leaf: leaf.requires_grad_())
    key = problem.leaves["key"] * 1.0
    out = replace(problem, leaves=problem.leaves | {"key": key}).call(backend)[0]
    key.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_fake_tensors_need_no_computation():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        out, lse = make(2, 3, 8).map(lambda leaf: torch.empty(leaf.shape)).call(None)
    assert out.shape == (2, 3, 8, 16) and lse.shape == (2, 3, 8)


def test_default_backend_is_right():
    assert_right(make(mem=3, mask="order"), None)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
        lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
        lambda f, x: torch.func.vmap(f)(x[None])[0],
    ],
    ids=["jvp", "grad", "vmap"],
)
def test_function_transforms_take_the_reference_or_are_refused(transform):
    leaves = make(biases=False, segments=False).leaves
    query = leaves.pop("query").detach()
    expected = transform(lambda x: xk.rel_attention(x, **leaves, backend="reference"), query)
    torch.testing.assert_close(transform(lambda x: xk.rel_attention(x, **leaves), query), expected)
    for backend in COMPILED:
        with pytest.raises(RuntimeError, match="torch.func"):
            transform(partial(xk.rel_attention, **leaves, backend=backend), query)


@pytest.mark.skipif("cpu" not in COMPILED, reason="the compiled extension is not there")
def test_the_operator_itself_stays_inside_its_tensors():
    function, arguments = recorded(make(mem=3, mask="order", positions=True), False, "cpu")
    names = [argument.name for argument in function._schema.arguments]
    changes = {"key": lambda x: x[:1], "value": lambda x: x.double(), "rel_key": lambda x: x[:, :, :1]}
    changes |= {"memory_value": lambda x: None, "key_rank": lambda x: x[:, 1:], "query_ids": lambda x: x[:, 1:]}
    changes |= {"query_positions": lambda x: x + 1000, "max_distance": lambda x: 2**31, "dropout_p": lambda x: 0.5}
    for name, change in changes.items():
        index = names.index(name)
        with pytest.raises(ValueError):
            function(*arguments[:index], change(arguments[index]), *arguments[index + 1 :])
