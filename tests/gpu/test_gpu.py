"""GPU backends under what training on a GPU does to them: compilation, CUDA graphs, autocast, long sequences, models.

Results on small shapes are those of operator/test_operator.py, whose backends include those for a GPU.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import xlnet_kernels as xk
from tests.cases import GPU_BACKENDS, MODULES, Problem, assert_right, make

_REASONS = "; ".join(f"{name}: {state}" for name, state in xk.backends().items() if not state.available)
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not GPU_BACKENDS, reason=f"no GPU backend is ready ({_REASONS})"),
]
# with memory, so that no row is fully masked and every log-sum-exp is finite
PROBLEMS = {
    "content": dict(length=200, mem=40, width=32, mask="order"),
    "rows-in-any-order": dict(length=200, mem=40, width=32, mask="order", positions=True),
}


@pytest.fixture(params=GPU_BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture(params=PROBLEMS)
def problem(request) -> Problem:
    return on_gpu(make(**PROBLEMS[request.param]))


def on_gpu(problem: Problem) -> Problem:
    """The problem with everything on the GPU, the leaves differentiable."""

    def move(value):
        return value.to("cuda") if hasattr(value, "to") else value

    options = {name: move(value) for name, value in problem.options.items()}
    leaves = {name: move(leaf.detach()).requires_grad_() for name, leaf in problem.leaves.items()}
    return Problem(leaves, move(problem.query_ids), move(problem.key_ids), options)


def forward_backward(problem: Problem, backend: str, **options) -> dict[str, torch.Tensor]:
    """Results and the gradients of half the sum of their squares."""
    out, lse = problem.run(backend, "cuda", **options)
    gradients = torch.autograd.grad((out, lse), list(problem.leaves.values()), (out.detach(), lse.detach()))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(problem.leaves, gradients, strict=True))}


def assert_same_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def assert_near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    """Within `tolerance` of the largest value of each tensor."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        error = (found[name].cpu() - value.cpu()).abs().max().item()
        assert error <= tolerance * value.abs().max().item(), f"{name}: error {error:.3g}"


def test_compiles_into_one_graph_with_the_same_gradients(backend, problem):
    leaves = list(problem.leaves.values())

    def loss():
        out, lse = problem.run(backend, "cuda")
        return out.square().sum() + lse.square().sum()

    compiled = torch.compile(loss, fullgraph=True)
    found, wanted = ({"loss": value} for value in (compiled(), loss()))
    for results in (found, wanted):
        results |= zip(problem.leaves, torch.autograd.grad(results["loss"], leaves), strict=True)
    assert_near(found, wanted, 1e-5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled()


def captured(function):
    """A CUDA graph of function(), and the results that a replay overwrites."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what the first calls do, compiling above all, cannot be captured
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def test_cuda_graph_replays_on_new_values(backend, problem):
    graph, found = captured(lambda: forward_backward(problem, backend))
    with torch.no_grad():
        for leaf in problem.leaves.values():
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    assert_same_bits(found, forward_backward(problem, backend))


def test_cuda_graph_replays_the_dropout_of_the_state_tensor(backend, problem, monkeypatch):
    state = torch.tensor([2**62 + 12345, 2**61 + 2**40 + 77], device="cuda")
    monkeypatch.setattr("xlnet_kernels.dropout.new_state", lambda device: state)
    graph, found = captured(lambda: forward_backward(problem, backend, dropout_p=0.3))
    graph.replay()
    first = {name: value.clone() for name, value in found.items()}
    assert_same_bits(first, forward_backward(problem, backend, dropout_p=0.3))
    state += 2**33 + 1
    graph.replay()
    assert not torch.equal(found["out"], first["out"])
    assert_same_bits(found, forward_backward(problem, backend, dropout_p=0.3))


def test_cuda_graph_draws_new_dropout_for_every_replay(backend, problem):
    graph, found = captured(lambda: forward_backward(problem, backend, dropout_p=0.3))
    graph.replay()
    first = found["out"].clone()
    graph.replay()
    assert not torch.equal(found["out"], first)


def test_positions_that_a_graph_has_not_computed_yet_are_not_kept():
    layer, h = xk.TwoStreamAttention(64, 4, device="cuda"), torch.randn(2, 33, 64, device="cuda")

    def forward():
        xk.positions._kept.cache_clear()
        return layer(h)[0].detach()

    wanted = forward()
    graph, found = captured(forward)
    assert torch.equal(layer(h)[0], wanted)
    graph.replay()
    assert torch.equal(found, wanted)


def test_autocast_computes_in_bfloat16(backend, problem):
    with torch.autocast("cuda", torch.bfloat16):
        out, lse = problem.run(backend, "cuda")
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    out.float().sum().backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in problem.leaves.values())
    assert torch.equal(out, problem.to(torch.bfloat16).run(backend, "cuda")[0])


def test_gradient_checkpointing_draws_the_same_dropout_again(backend, problem):
    leaves = list(problem.leaves.values())

    def loss(*leaves):
        given = replace(problem, leaves=dict(zip(problem.leaves, leaves, strict=True)))
        return given.run(backend, "cuda", dropout_p=0.3)[0].square().sum()

    torch.manual_seed(1)
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    torch.manual_seed(1)
    found = torch.autograd.grad(torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False), leaves)
    assert_same_bits(*(dict(zip(problem.leaves, gradients, strict=True)) for gradients in (found, wanted)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("positions", [False, True], ids=["", "positions"])
def test_deterministic_gradients_have_the_same_bits_in_every_run(backend, dtype, positions):
    # enough programs that the order in which they finish differs from run to run
    problem = on_gpu(make(4, 4, 1000, mem=130, width=64, mask="order", positions=positions, dtype=dtype))
    first = forward_backward(problem, backend, deterministic=True)
    for _ in range(3):
        assert_same_bits(forward_backward(problem, backend, deterministic=True), first)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [512, 1024])
@pytest.mark.parametrize("positions", [False, True], ids=["", "positions"])
@pytest.mark.parametrize("deterministic", [True, False], ids=["", "atomic"])
def test_bfloat16_is_as_accurate_as_it_should_be(backend, width, length, positions, deterministic):
    problem = make(
        1, 2, length, mem=length // 4, width=width, mask="order", positions=positions, dtype=torch.bfloat16
    ).with_options(deterministic=deterministic)
    assert_right(problem, backend)


@pytest.mark.parametrize("deterministic", [True, False], ids=["", "atomic"])
@pytest.mark.parametrize("positions", [False, True], ids=["", "positions"])
def test_memory_is_linear_in_length(backend, deterministic, positions):
    peaks = {}
    for length in (8192, 16384):
        problem = on_gpu(make(1, 4, length, width=64, mask="order", positions=positions, dtype=torch.bfloat16))
        forward_backward(problem, backend, deterministic=deterministic)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward_backward(problem, backend, deterministic=deterministic)
        peaks[length] = torch.cuda.max_memory_allocated() - before
    assert peaks[16384] <= 2.2 * peaks[8192], peaks  # a little for what the allocator rounds up


@pytest.fixture(params=[None, *GPU_BACKENDS])
def module_backend(request, monkeypatch) -> str | None:
    """The backend to ask for, None for the best; the test fails where another one serves."""
    served, calls = request.param or GPU_BACKENDS[0], []
    original = MODULES[served].rel_attention
    monkeypatch.setattr(MODULES[served], "rel_attention", lambda *a, **k: calls.append(a) or original(*a, **k))
    yield request.param
    assert calls


def permutation(batch: int, length: int, targets: int, mem_len: int) -> tuple[xk.RankMask, torch.Tensor]:
    """The mask of a random factorisation order whose last tokens are predicted, and their positions."""
    order = torch.stack([torch.randperm(length) for _ in range(batch)])
    positions = order.argsort(1)[:, -targets:]
    predicted = torch.zeros(batch, length, dtype=torch.bool).scatter(1, positions, True)
    return xk.RankMask.from_order(order, predicted, mem_len=mem_len), positions


def gradients_on(device: str, module: torch.nn.Module, loss, inputs: dict) -> dict[str, torch.Tensor]:
    """The loss and the gradients of one training step of a copy of `module`."""
    module = copy.deepcopy(module).to(device).train()
    value = loss(module, {name: x.to(device) for name, x in inputs.items()})
    value.backward()
    return {"loss": value.detach()} | {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def test_two_stream_layer_trains_as_on_the_cpu(module_backend):
    layer = xk.TwoStreamAttention(64, 4)
    layer.reset_parameters(0.2)
    mask, positions = permutation(2, 75, 12, mem_len=37)
    inputs = dict(
        h=torch.randn(2, 75, 64), g=torch.randn(2, 12, 64), mems=torch.randn(2, 37, 64), mask=mask,
        segment_ids=torch.randint(2, (2, 75)), target_positions=positions,
    )  # fmt: skip
    weights = {size: torch.randn(2, size, 64) for size in (75, 12)}  # the mean square after a LayerNorm is a constant

    def loss(layer, inputs):
        layer.backend = module_backend if inputs["h"].is_cuda else "reference"
        return sum((out * weights[out.shape[1]].to(out.device)).sum() for out in layer(**inputs))

    found, wanted = (gradients_on(device, layer, loss, inputs) for device in ("cuda", "cpu"))
    assert len(wanted) == 1 + len(list(layer.parameters()))
    assert_near(found, wanted, 5e-4)


def test_language_model_trains_as_on_the_cpu(module_backend):
    config = xk.XLNetConfig(vocab_size=97, d_model=64, n_layer=2, n_head=4, d_inner=128, dropout=0.0)
    model = xk.XLNetLMHeadModel(config)
    for layer in model.transformer.layer:
        layer.rel_attn.reset_parameters(0.2)
    ids = torch.randint(97, (2, 75))
    mask, positions = permutation(2, 75, 12, mem_len=0)
    inputs = dict(input_ids=ids, token_type_ids=torch.randint(2, (2, 75)), mask=mask, target_positions=positions)

    def loss(model, inputs):
        for layer in model.transformer.layer:
            layer.rel_attn.backend = module_backend if inputs["input_ids"].is_cuda else "reference"
        return model(**inputs, labels=inputs["input_ids"].gather(1, inputs["target_positions"])).loss

    found, wanted = (gradients_on(device, model, loss, inputs) for device in ("cuda", "cpu"))
    assert "transformer.word_embedding.weight" in wanted and "transformer.layer.0.rel_attn.seg_embed" in wanted
    assert_near(found, wanted, 5e-4)
