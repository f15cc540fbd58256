"""Linear: torch's linear by another library's products, the same within float32 rounding."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xlnet_kernels as xk
from tests.model.twins import theirs
from xlnet_kernels import _environment, info
from xlnet_kernels import linear as module
from xlnet_kernels.integrations import transformers
from xlnet_kernels.linear import linear

OPERATOR = torch.ops.xlnet_kernels.linear
LARGE = (4, 96, 128, 192)  # batch, rows, in, out: enough multiplications to be served


@pytest.fixture(params=["onednn", "mkl"])
def library(request, monkeypatch):
    monkeypatch.setenv("XLNET_KERNELS_LINEAR", request.param)
    module.choice.cache_clear()
    if request.param == "onednn" and not module.has_onednn_linear():
        pytest.skip("this torch has no oneDNN")
    yield request.param
    module.choice.cache_clear()


@pytest.fixture
def onednn(monkeypatch):
    monkeypatch.setattr(module, "choice", lambda: ("onednn", "for a test"))


@pytest.fixture
def with_flags(monkeypatch):
    """A function that gives the processor other instructions, and a torch that allows a precision."""
    before = torch.get_float32_matmul_precision()

    def give(flags: str, precision: str = "medium") -> None:
        monkeypatch.setattr(module, "_cpuinfo", lambda: f"vendor_id : AuthenticAMD\nflags : avx2 {flags}\n")
        module.can_round.cache_clear()
        torch.set_float32_matmul_precision(precision)

    yield give
    torch.set_float32_matmul_precision(before)
    module.can_round.cache_clear()


@pytest.fixture
def few(monkeypatch):
    """As an AMD processor without AVX-512 has it."""
    monkeypatch.setattr(module, "choice", lambda: module._FASTER["AMD"])


def operands(batch, rows, inside, outside, dtype=torch.float32):
    x, weight, bias = torch.randn(batch, rows, inside), torch.randn(outside, inside), torch.randn(outside)
    return [tensor.to(dtype).requires_grad_() for tensor in (x, weight, bias)]


def test_sizes_are_served():
    assert LARGE[0] * LARGE[1] * LARGE[2] * LARGE[3] >= module._SMALLEST


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("layout", ["plain", "transposed weight", "strided input", "expanded gradient"])
def test_values_and_gradients_are_those_of_torch(library, layout, with_bias):
    x, weight, bias = operands(*LARGE)
    given_x, given_weight = x, weight
    if layout == "transposed weight":
        weight = torch.randn(LARGE[2], LARGE[3]).requires_grad_()
        given_weight = weight.mT
    elif layout == "strided input":
        x = torch.randn(LARGE[1], LARGE[0], LARGE[2]).requires_grad_()
        given_x = x.transpose(0, 1)
    bias = bias if with_bias else None
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    found = linear(given_x, given_weight, bias)
    assert ("xlnet_kernels_linear" in type(found.grad_fn).__name__) == (library == "onednn")
    grad = torch.randn(()).expand_as(found) if layout == "expanded gradient" else torch.randn_like(found)
    exact = F.linear(given_x.double(), given_weight.double(), None if bias is None else bias.double())
    wanted = torch.autograd.grad(exact, leaves, grad.double())
    for result, want in zip((found, *torch.autograd.grad(found, leaves, grad)), (exact, *wanted), strict=True):
        assert result.shape == want.shape
        # sums of at most 384 products, each rounded once
        assert (result - want).abs().max() <= 384**0.5 * torch.finfo(torch.float32).eps * 8 * want.abs().max()


def test_frozen_operands_get_no_gradient(onednn):
    x, weight, bias = operands(*LARGE)
    linear(x.detach(), weight, bias.detach()).sum().backward()
    assert weight.grad is not None and x.grad is None and bias.grad is None


def test_the_operator_is_well_registered():
    torch.library.opcheck(OPERATOR, tuple(operands(2, 3, 8, 5)))


def test_so_is_the_one_for_few_rows(few):
    x, weight, bias = operands(97, 2, 8, 5)
    torch.library.opcheck(OPERATOR, (x.transpose(0, 1), weight, bias))


def test_second_derivatives(onednn):
    x, weight, bias = operands(*LARGE)

    def grad_of_square(function):
        (grad,) = torch.autograd.grad(function(x, weight, bias).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), weight)[0]

    found, wanted = grad_of_square(linear), grad_of_square(F.linear)
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()  # six products, each with 1e-6 to 1e-5


def fused(function, *args) -> bool:
    """Whether the operator is called in `function`."""
    with torch.profiler.profile() as profile:
        function(*args)
    return any(event.key == "xlnet_kernels::linear" for event in profile.key_averages())


def test_what_is_left_to_torch(onednn):
    x, weight, bias = operands(*LARGE)
    assert fused(linear, x, weight, bias)
    assert not fused(linear, x[:1, :1], weight, bias)  # small
    assert not fused(linear, x.double(), weight.double(), bias.double())
    assert not fused(linear, x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
        assert not fused(linear, x, weight, bias)
    assert not fused(torch.func.vmap(linear, in_dims=(0, None, None)), x, weight, bias)
    assert not fused(torch.func.grad(lambda x: linear(x, weight, bias).sum()), x)
    empty = linear(x[:0], weight, bias)
    assert empty.shape == (0, LARGE[1], LARGE[3])


def products(function, *args) -> list[str]:
    """The libraries of the products in `function`, in their order."""
    names = {"mkldnn::_linear_pointwise": "onednn", "aten::addmm": "mkl", "aten::mm": "mkl"}
    with torch.profiler.profile() as profile:
        function(*args)
    return [names[event.name] for event in profile.events() if event.name in names]


def test_few_rows_go_by_onednn_and_gradients_by_mkl(few):
    x, weight, bias = operands(1, 193, 512, 64)
    assert products(linear, x[:, :192], weight, bias) == ["onednn"]
    assert products(linear, x, weight, bias) == ["mkl"]
    out = linear(x[:, :192], weight, bias)
    assert products(out.sum().backward) == ["mkl", "mkl"]
    assert x.grad is not None and weight.grad is not None and bias.grad is not None


@pytest.mark.parametrize("with_bias", [True, False])
def test_compiled_for_any_number_of_rows(few, with_bias):
    """One graph serves all, and looks at the rows when it runs."""
    weight, bias = torch.randn(96, 64), torch.randn(96) if with_bias else None
    torch._dynamo.reset()
    compiled = torch.compile(linear, dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (90, 96, 97, 200):
        x = torch.randn(2, rows, 64, requires_grad=True)
        with torch._dynamo.config.patch(error_on_recompile=rows > 90):
            found, wanted = compiled(x, weight, bias), F.linear(x, weight, bias)
        assert torch.allclose(found, wanted, atol=1e-4)
        grad = torch.randn_like(wanted)
        (own,), (theirs,) = torch.autograd.grad(found, x, grad), torch.autograd.grad(wanted, x, grad)
        assert torch.allclose(own, theirs, atol=1e-4)
        assert products(compiled, x, weight, bias) == ["onednn" if 2 * rows <= 192 else "mkl"]


def test_compiled_and_exported(onednn):
    layer = xk.Linear(LARGE[2], LARGE[3])
    x = torch.randn(LARGE[:3])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert fused(compiled, x)
    assert torch.allclose(compiled(x), layer(x), atol=1e-4)
    program = torch.export.export(layer, (x,))
    assert OPERATOR.default not in [node.target for node in program.graph.nodes]  # others run it without this package


def test_the_module_is_torchs(onednn):
    ours, theirs = xk.Linear(LARGE[2], LARGE[3]), nn.Linear(LARGE[2], LARGE[3])
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(LARGE[:3])
    assert fused(ours, x) and torch.allclose(ours(x), theirs(x), atol=1e-4)


def test_the_hot_path_uses_it(onednn):
    config = xk.XLNetConfig(vocab_size=64, d_model=128, n_head=2, d_inner=256, n_layer=1)
    model = xk.XLNetLMHeadModel(config).eval()
    with torch.profiler.profile() as profile:
        model(torch.randint(64, (2, 160)))
    (calls,) = (event.count for event in profile.key_averages() if event.key == "xlnet_kernels::linear")
    assert calls == 8  # q, k, v, r, o, both of feed-forward, logits


@pytest.mark.parametrize("wish", ["", "mkl", "onednn"])
@pytest.mark.parametrize("has_onednn", [False, True])
@pytest.mark.parametrize(
    ("cpuinfo", "faster"),
    [
        ("", "mkl"),
        ("vendor_id : GenuineIntel\nflags : fpu avx2 avx512f\n", "mkl"),
        ("vendor_id : AuthenticAMD\nflags : fpu avx2 vaes\n", "onednn for few rows"),
        ("vendor_id : AuthenticAMD\nflags : fpu avx2 avx512f avx512dq\n", "onednn"),
    ],
    ids=["unknown", "Intel", "AMD without AVX-512", "AMD with AVX-512"],
)
def test_the_choice_and_its_reason_are_told(monkeypatch, wish, has_onednn, cpuinfo, faster):
    monkeypatch.setenv("XLNET_KERNELS_LINEAR", wish)
    monkeypatch.setattr(module, "has_onednn_linear", lambda: has_onednn)
    monkeypatch.setattr(module, "_cpuinfo", lambda: cpuinfo)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    module.choice.cache_clear()
    try:
        if wish == "onednn" and not has_onednn:
            _environment.leave_aside.cache_clear()
            with pytest.warns(
                RuntimeWarning, match="got 'onednn': this torch has no oneDNN, its own products are taken"
            ):
                module.library()
            wish = ""
        said = info.linear_library()
        assert module.library() == (wish or (faster if has_onednn else "mkl"))
        assert said.split(" (")[0] == module.library()
        assert (wish and "XLNET_KERNELS_LINEAR" in said) or ("AMD" if has_onednn else "no oneDNN") in said
        assert said in info.render(info.collect())
    finally:
        module.choice.cache_clear()


@pytest.mark.parametrize("case", ["vector", "bias of one", "weight of one dimension", "no features"])
def test_what_torch_serves_and_onednn_does_not(onednn, monkeypatch, case):
    monkeypatch.setattr(module, "_SMALLEST", 0)
    x, weight, bias = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8), torch.randn(3)
    given = {
        "vector": (x[0], weight, bias),
        "bias of one": (x, weight, bias[:1]),
        "weight of one dimension": (x, weight[0], None),
        "no features": (x[:, :0], weight[:, :0], bias),
    }[case]
    found, wanted = linear(*given), F.linear(*given)
    assert torch.allclose(found, wanted, atol=1e-5)
    if case != "no features":
        (grad,) = torch.autograd.grad(found.sum(), x)
        assert torch.allclose(grad, torch.autograd.grad(wanted.sum(), x)[0], atol=1e-5)


def test_wrong_shapes_are_told_by_torch(onednn, monkeypatch):
    monkeypatch.setattr(module, "_SMALLEST", 0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(torch.randn(4, 7), torch.randn(3, 8))


def test_batches_of_gradients(onednn):
    x, weight, bias = operands(*LARGE)
    grads = torch.randn(2, *LARGE[:2], LARGE[3])
    for function in (linear, F.linear):
        out = function(x, weight, bias)
        found = torch.autograd.grad(out, (x, weight, bias), grads, is_grads_batched=True)
        assert [gradient.shape for gradient in found] == [(2, *leaf.shape) for leaf in (x, weight, bias)]


def test_linears_are_accelerated_where_asked(onednn):
    model = theirs("XLNetLMHeadModel", d_model=128, d_inner=256)
    plain = copy.deepcopy(transformers.accelerate(model))
    assert {type(module) for module in plain.modules() if isinstance(module, nn.Linear)} == {nn.Linear}
    transformers.accelerate(model, linears=True)
    kinds = {type(module) for module in model.modules() if isinstance(module, nn.Linear)}
    assert all(issubclass(kind, xk.Linear) for kind in kinds)
    ids = torch.randint(10, (2, 160))
    found, wanted = model(ids).logits, plain(ids).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert type(pickle.loads(pickle.dumps(model)).lm_loss) in kinds
    assert type(transformers.restore(model).lm_loss) is nn.Linear
    with pytest.raises(ValueError, match="must have supported relative attention"):
        transformers.accelerate(nn.Sequential(nn.Linear(2, 2)), linears=True)


needs_switch = pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="torch 2.9 and newer have it")


def results(function, grad, *given):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@needs_switch
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_medium_precision_rounds_operands_where_torch_does_not(onednn, with_flags, compiled):
    given = [torch.randn(*LARGE[:2], LARGE[3]), *operands(*LARGE)]
    exact = results(F.linear, *(tensor.double() for tensor in given))
    rounded = results(F.linear, *(tensor.bfloat16().double() for tensor in given))
    with_flags("avx512f avx512_bf16")
    torch._dynamo.reset()
    found = results(torch.compile(linear, backend="aot_eager") if compiled else linear, *given)
    for value, operand, wanted in zip(found[:3], rounded[:3], exact[:3], strict=True):
        # At most 1.5 because the product is rounded too; exact float32 has 1e-4 of this error.
        assert value.dtype == torch.float32
        assert 0.5 <= (value - wanted).norm() / (operand - wanted).norm() <= 1.5
    torch.testing.assert_close(found[3].double(), exact[3], rtol=1e-4, atol=1e-4)  # the bias has no product


@needs_switch
def test_gradients_have_the_precision_of_forward(onednn, with_flags):
    given = operands(*LARGE)

    def gradient(forward: str, backward: str):
        with_flags("avx512f avx512_bf16", forward)
        out = linear(*given)
        torch.set_float32_matmul_precision(backward)
        return torch.autograd.grad(out, given[1], torch.ones_like(out))[0]

    assert torch.equal(gradient("medium", "highest"), gradient("medium", "medium"))
    assert torch.equal(gradient("highest", "highest"), gradient("highest", "highest"))
    assert not torch.equal(gradient("medium", "highest"), gradient("highest", "highest"))


@needs_switch
def test_compiled_products_follow_the_precision(onednn, with_flags):
    given = [tensor.detach() for tensor in operands(*LARGE)]
    torch._dynamo.reset()
    compiled = torch.compile(linear, backend="aot_eager")
    for precision in ("highest", "medium", "highest"):
        with_flags("avx512f avx512_bf16", precision)
        assert torch.equal(compiled(*given), linear(*given)), precision


@needs_switch
def test_few_rows_are_not_rounded(onednn, with_flags):
    x, weight = torch.randn(module._ROUNDED_ROWS, 256), torch.randn(128, 256)
    with_flags("avx512f avx512_bf16")
    assert not torch.equal(linear(x, weight), F.linear(x, weight))
    assert torch.equal(linear(x[:-1], weight), F.linear(x[:-1], weight))


@needs_switch
@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("flags", ["avx512f", "avx512f avx512_bf16 amx_bf16"], ids=["without bf16", "AMX"])
def test_medium_precision_is_left_to_torch_otherwise(onednn, with_flags, flags, precision):
    x, weight, bias = (tensor.detach() for tensor in operands(*LARGE))
    with_flags(flags, precision)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


@needs_switch
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_exact_precisions_do_not_round(onednn, with_flags, precision):
    given = [torch.randn(*LARGE[:2], LARGE[3]), *operands(*LARGE)]
    with_flags("avx512f avx512_bf16", precision)
    for value, wanted in zip(results(linear, *given), results(F.linear, *given), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4)


@needs_switch
def test_the_wish_for_mkl_leaves_products_to_torch(library, with_flags):
    """XLNET_KERNELS_LINEAR=mkl leaves every product to torch."""
    x, weight, bias = (tensor.detach() for tensor in operands(*LARGE))
    with_flags("avx512f avx512_bf16")
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias)) == (library == "mkl")
    assert ("bfloat16 operands at medium precision" in info.linear_library()) == (library == "onednn")
