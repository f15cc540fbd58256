"""The host's code on tensors of a GPU that is not there: torch's fake tensors refuse to mix devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

import xlnet_kernels as xk
from tests.cases import MASKS, make
from xlnet_kernels import ops
from xlnet_kernels.backends import choose, cuda, triton
from xlnet_kernels.integrations.conformer import RelPositionAttention, conformer_positions

# Without CUDA torch makes few tensors there, not even fake ones: the meta device then is what results must be on.
GPU = torch.device("cuda:0" if torch.version.cuda else "meta")
BACKENDS = {"cuda": cuda, "triton": triton}
PROBLEMS = {
    **{mask or "no-mask": dict(length=45, keys=75, mem=37, mask=mask) for mask in MASKS},
    "no-memory": dict(length=70, mask="order"),
    "positions": dict(length=90, keys=75, mem=5, positions=True, mask="order", rel_batch=True),
    "conformer": dict(length=70, extra_distance=-1, biases=False, segments=False),
    "uni": dict(length=70, rel_rows="uni", mask="causal", width=24),
    "no-rows": dict(length=0, keys=5, mem=3, mask="order"),
    "no-keys": dict(length=0, keys=0, mask="order"),
    "no-batch": dict(batch=0, mask="order"),
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Both backends of GPUs are ready, and whatever is made is fake. No gradients: autograd asks the device."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    for backend in BACKENDS.values():
        monkeypatch.setattr(backend, "_unavailable", lambda device: None)
        monkeypatch.setattr(backend, "DEVICE", GPU.type)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "_max_head_dim", lambda dtype, device: 128)
    monkeypatch.setattr(triton, "DTYPES", cuda.DTYPES)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield


def assert_on_gpu(results) -> None:
    tensors = [leaf for leaf in _pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    assert tensors and {tensor.device for tensor in tensors} == {GPU}


def facts(tensor: torch.Tensor) -> tuple:
    """Facts that a compiler assumes; a dimension of size 1 has no stride."""
    strides = tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    return tensor.shape, strides if tensor.numel() else (), tensor.dtype, tensor.device


def test_the_best_backend_of_a_gpu_is_chosen():
    assert choose(None, GPU, torch.bfloat16, 128) is cuda
    assert choose(None, GPU, torch.bfloat16, 256) is triton


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_operator(backend, problem):
    assert_on_gpu(make(**PROBLEMS[problem]).run(backend, GPU, dropout_p=0.1))


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("deterministic", [True, False], ids=["", "atomic"])
def test_what_triton_launches_and_returns(monkeypatch, problem, deterministic):
    """As the operator's fake results are, and everything that a kernel is given on the GPU, in types that it takes."""
    pytest.importorskip("triton")
    from xlnet_kernels.backends.triton import launch, launch_cache

    launched = []

    def record(self, kernel, count, config, **arguments):
        launched.append(count)
        assert isinstance(count, int) and count > 0
        given = self.arguments | arguments
        assert set(kernel.arg_names) - set(given) == {"META"}
        for leaf in _pytree.tree_leaves(given):
            assert leaf is None or isinstance(leaf, (torch.Tensor, int, float)), leaf
        assert_on_gpu(given)

    def call(inputs):
        out, lse, row_max, row_sum, out_residual = results = launch.forward(*inputs, True)
        assert [*map(facts, results)] == [*map(facts, ops._fake_forward(True, *inputs, True))]
        there = [tensor is not None for tensor in inputs[: ops.DIFFERENTIABLE]]
        for needs, grad_lse in ((there, torch.ones_like(lse)), ([True] + [False] * (ops.DIFFERENTIABLE - 1), None)):
            given = (torch.ones_like(out), grad_lse, out, out_residual, row_max, row_sum, needs, *inputs)
            wanted = ops._fake_backward(*given)
            assert [*map(facts, launch.backward(*given))] == [*map(facts, wanted)]
        return out, lse

    monkeypatch.setattr(launch_cache, "INTERPRETED", False)
    monkeypatch.setattr(launch_cache, "plans", {})
    monkeypatch.setattr(launch.Call, "launch", record)
    monkeypatch.setattr(triton, "rel_attention", call)
    options = dict(dropout_p=0.1, deterministic=deterministic)
    out, _ = make(**PROBLEMS[problem]).run("triton", GPU, **options)
    assert len(launched) == (10 if out.numel() else 0)  # one forward pass of two kernels, two backward passes of four


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_attention_layers(backend):
    h, g, mems = (torch.randn(2, size, 64, device=GPU) for size in (75, 12, 37))
    places = torch.randint(75, (2, 12), device=GPU)
    ids = torch.randint(2, (2, 75), device=GPU)
    layer = xk.TwoStreamAttention(64, 4, dropout=0.1, backend=backend, device=GPU)
    for mask in (xk.RankMask.causal(2, 75, mem_len=37, device=GPU), torch.ones(75, 112, dtype=torch.bool, device=GPU)):
        assert_on_gpu(layer(h, g, mask=mask, mems=mems, segment_ids=ids, target_positions=places))
    assert_on_gpu(layer(h)[0])
    with GPU:
        layer = RelPositionAttention(4, 64, 0.1, backend=backend)
    assert_on_gpu(layer(h, conformer_positions(112, 64, device=GPU), cache=mems))


@pytest.mark.parametrize("attn_type, bi_data", [("bi", False), ("uni", False), ("bi", True)])
def test_language_model(attn_type, bi_data):
    config = xk.XLNetConfig(
        vocab_size=97, d_model=64, n_layer=2, n_head=4, d_inner=128, attn_type=attn_type, bi_data=bi_data, mem_len=20
    )
    with GPU:
        model = xk.XLNetLMHeadModel(config)
        ids, order, places = torch.randint(75, (2, 75)), torch.randint(75, (2, 75)), torch.randint(75, (2, 12))
        targets, padding = torch.zeros(2, 75, dtype=torch.bool), torch.ones(2, 75)
        mapping, hidden = torch.zeros(2, 12, 75), torch.zeros(2, 75, 75)
    given = dict(mask=xk.RankMask.from_order(order, targets), target_positions=places, labels=places)
    first = model(ids, **given, token_type_ids=ids, use_mems=True)
    assert_on_gpu(first)
    assert_on_gpu(model(ids, **given, attention_mask=padding, mems=first.mems, use_mems=True))
    maps = dict(output_attentions=True, output_hidden_states=True)
    assert_on_gpu(model(ids, perm_mask=hidden, target_mapping=mapping, **maps))
    transformer = model.eval().transformer
    memory = transformer(ids, mems=transformer.project_mems(batch=2)).mems
    step = transformer(ids[:, :3], mems=memory)
    assert step.mems.written.device.type == "cpu"  # asked before each step: a GPU's would be waited for
    assert_on_gpu([step.last_hidden_state, step.mems.keys, step.mems.values, step.mems.rel_keys])


def test_accelerated_transformers_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.XLNetConfig(vocab_size=97, d_model=64, n_layer=2, n_head=4, d_inner=128)
    model = xk.integrations.transformers.accelerate(transformers.XLNetLMHeadModel(config).eval())
    for module in model.modules():  # torch cannot move fake parameters
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(parameter.detach().to(GPU)))
    with GPU:
        ids, hidden, mapping = torch.randint(97, (2, 75)), torch.zeros(2, 75, 75), torch.zeros(2, 12, 75)
    assert_on_gpu(model(ids, perm_mask=hidden, target_mapping=mapping, token_type_ids=ids, use_mems=True).to_tuple())
