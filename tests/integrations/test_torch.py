"""Uses of a model in torch beyond calling it; docs/support.md is the table of these tests."""

from __future__ import annotations

import copy
import io
import pickle
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import xlnet_kernels as xk
from tests.cases import COMPILED
from tests.model.twins import B, L, M, N, assert_same, ours, theirs
from tests.processes import run_in_processes

WIDTH, HEADS = 16, 2
KINDS = ("operator", "module", "model", "accelerated")
backends = import_module("xlnet_kernels.backends")


class Operator(nn.Module):
    def forward(self, query, key, value, rel_key, query_rank, key_rank):
        return xk.rel_attention(query, key, value, rel_key, mask=xk.RankMask(query_rank, key_rank))


class Layer(nn.Module):
    """Both streams."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = xk.TwoStreamAttention(WIDTH, HEADS, dropout=0.2)
        self.attn.reset_parameters(0.3)

    def forward(self, h, g, order, targets, mems):
        mask = xk.RankMask.from_order(order, mem_len=mems.shape[1])
        return self.attn(h, g, mask=mask, mems=mems, target_positions=targets)


def make(kind: str, **options) -> nn.Module:
    if kind == "accelerated":
        return xk.integrations.transformers.accelerate(theirs("XLNetLMHeadModel", n_layer=1, **options))
    return {"operator": Operator, "module": Layer}[kind]().eval() if "model" not in kind else ours(n_layer=1, **options)


def inputs_of(kind: str, batch: int = B, length: int = L, mem: int = M, targets: int = N) -> dict:
    """One batch, floating inputs as leaves that want gradients."""

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, requires_grad=True)

    order = torch.stack([torch.randperm(length) for _ in range(batch)])
    if kind == "operator":
        rows = {name: leaf(batch, HEADS, length, 8) for name in ("query", "key", "value")}
        return rows | dict(rel_key=leaf(HEADS, 2 * length, 8), query_rank=order, key_rank=order)
    if kind == "module":
        rows = dict(h=leaf(batch, length, WIDTH), g=leaf(batch, targets, WIDTH), order=order)
        return rows | dict(targets=order[:, :targets], mems=torch.randn(batch, mem, WIDTH))
    inputs = dict(input_ids=torch.randint(50, (batch, length)), token_type_ids=torch.randint(2, (batch, length)))
    if kind == "model":
        inputs |= dict(mask=xk.RankMask.from_order(order), target_positions=order[:, :targets])
    return inputs


def outputs(result) -> list[torch.Tensor]:
    """The outputs that have gradients."""
    if isinstance(result, torch.Tensor):
        return [result]
    return list(result[:2]) if type(result) is tuple else [result[0]]


@pytest.mark.parametrize("kind", ["module", "accelerated"])
def test_compiles_once_for_all_lengths(kind):
    """Memory and targets change theirs too. Operator: operator/test_registration.py; model: model/test_modes.py."""
    torch._dynamo.reset()
    model = make(kind)
    # Symbolic sizes cost AOT autograd ten seconds a layer.
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for count, sizes in enumerate(((7, 5, 3), (11, 4, 6))):
        inputs = inputs_of(kind, B, *sizes)
        with torch._dynamo.config.patch(error_on_recompile=count > 0):
            found = outputs(compiled(**inputs))
        assert_same(found, outputs(model(**inputs)), 1e-5)
        sum(x.square().sum() for x in found).backward()


def test_marked_dimensions_are_dynamic():
    torch._dynamo.reset()
    compiled = torch.compile(Operator(), fullgraph=True, dynamic=False, backend="eager")
    for length in (7, 11):
        inputs = inputs_of("operator", length=length)
        for name, x in inputs.items():
            torch._dynamo.mark_dynamic(x, {"rel_key": 1, "query_rank": 1, "key_rank": 1}.get(name, 2))
        with torch._dynamo.config.patch(error_on_recompile=length > 7):
            assert_same(compiled(**inputs), Operator()(**inputs), 1e-5)


def test_inductor():
    torch._dynamo.reset()
    inputs = inputs_of("operator")
    with torch.no_grad():  # gradients: by AOT autograd in operator/test_registration.py, which costs less
        assert_same(torch.compile(Operator(), fullgraph=True)(**inputs), Operator()(**inputs), 1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_the_layer_draws_the_same_dropout(use_reentrant):
    """The operator: operator/test_registration.py; models: model/test_modes.py, test_transformers.py."""
    layer, gradients = Layer().train(), []
    inputs = list(inputs_of("module").values())
    for call in (lambda *x: layer(*x), lambda *x: checkpoint(layer, *x, use_reentrant=use_reentrant)):
        torch.manual_seed(1)
        layer.zero_grad()
        sum(x.square().sum() for x in call(*inputs)).backward()
        gradients.append([p.grad for p in layer.parameters() if p.grad is not None])
    assert_same(gradients[1], gradients[0], 1e-6)


PROCESSES = """
import warnings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
import torch
from tests.integrations import test_torch as tests

warnings.simplefilter("ignore")
mesh = init_device_mesh("cpu", (2,))

def step(kind, model, rows=slice(None)):
    torch.manual_seed(1)
    inputs = {name: x if name == "rel_key" else x[rows] for name, x in tests.inputs_of(kind).items()}
    found = tests.outputs(model(**inputs))
    sum(x.float().square().mean() for x in found).backward()
    return found

for kind in ("module", "model without targets", "accelerated"):
    torch.manual_seed(0)
    model = tests.make(kind)
    step(kind, model)
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    mine = slice(rank, rank + 1)
    for how in ("ddp", "fsdp2", "fsdp2 in bfloat16"):
        model.zero_grad()
        if how == "ddp":
            replica = DistributedDataParallel(model)
            for _ in range(2):  # the second finds out whether the first left a parameter without a gradient
                model.zero_grad()
                step(kind, replica, mine)
            found = {name: p.grad for name, p in model.named_parameters()}
        else:
            low = "bfloat16" in how
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if low else MixedPrecisionPolicy()
            other = tests.make(kind)
            other.load_state_dict(model.state_dict())
            parts = [other.attn] if kind == "module" else getattr(other, "transformer", other).layer
            for part in parts:
                fully_shard(part, mesh=mesh, mp_policy=policy)
            step(kind, fully_shard(other, mesh=mesh, mp_policy=policy), mine)
            found = {name: p.grad.full_tensor() for name, p in other.named_parameters() if p.grad is not None}
        for name, gradient in wanted.items():
            error = (found[name] - gradient).norm() / gradient.norm()
            assert error < (0.1 if "in" in how else 1e-4) or gradient.norm() < 1e-5, f"{kind} {how} {name}: {error}"
"""


def test_ddp_and_fsdp2_in_two_processes(tmp_path):
    """Our model: examples/test_pretrain.py. Gradients are those of one process with the whole batch."""
    run_in_processes(PROCESSES, 2, tmp_path)


EXPORTED = {
    "operator": [{0: "b", 2: "n"}] * 3 + [{1: "2*n"}] + [{0: "b", 1: "n"}] * 2,
    "module": [{0: "b", 1: "n"}, {0: "b", 1: "t"}, {0: "b", 1: "n"}, {0: "b", 1: "t"}, {0: "b", 1: "m"}],
    "model": [{0: "b", 1: "n"}] * 2 + [[{0: "b", 1: "n"}] * 2 + [None]] + [{0: "b", 1: "t"}],
    "accelerated": [{0: "b", 1: "n"}] * 2,
}


def dynamic(shapes):
    """The dimensions of EXPORTED as torch wants them."""
    if isinstance(shapes, list):
        return [dynamic(shape) for shape in shapes]
    return shapes and {index: Dim.DYNAMIC for index in shapes}


@pytest.mark.parametrize("kind", KINDS)
def test_exported_programs_run_on_other_lengths(kind):
    model = make(kind, **{} if kind in ("operator", "module") else dict(use_mems_eval=False))
    inputs = inputs_of(kind)
    shapes = dict(zip(inputs, dynamic(EXPORTED[kind]), strict=True))
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for found in (program, torch.export.load(file)):
        other = inputs_of(kind, 3, 13, 6, 4)
        assert_same(outputs(found.module()(**other)), outputs(model(**other)), 1e-5)


def test_exported_strictly():
    model, inputs = make("module"), inputs_of("module")
    program = torch.export.export(model, (), inputs, strict=True)
    assert_same(outputs(program.module()(**inputs)), outputs(model(**inputs)), 1e-5)


@pytest.mark.parametrize("kind", ["module", "model", "accelerated"])
def test_scripting_is_refused(kind):
    with pytest.raises(RuntimeError, match="cannot be scripted: use torch.compile or torch.export"):
        torch.jit.script(make(kind))


class Conformer(Operator):
    """It computes max_distance from a size, which is a tensor in a trace."""

    def forward(self, query, key, value, rel_key, *ranks):
        return xk.rel_attention(query, key, value, rel_key[:, 1:], max_distance=key.shape[2] - 1)


@pytest.mark.parametrize("module", [Operator(), Conformer()], ids=["default", "max_distance"])
def test_traces_hold_for_one_length(module):
    inputs, other = (tuple(inputs_of("operator", length=length).values()) for length in (7, 11))
    with pytest.warns(torch.jit.TracerWarning):
        traced = torch.jit.trace(module, inputs, check_trace=False)
    assert_same(traced(*inputs), module(*inputs), 1e-6)
    with pytest.raises(RuntimeError):
        traced(*other)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traces_of_accelerated_models():
    """They follow masks, on the length they were made for."""
    model = make("accelerated", use_mems_eval=False).requires_grad_(False)

    def logits(ids, visible):
        return model(ids, attention_mask=visible).logits

    def inputs(short):
        return torch.randint(50, (B, L)), (torch.arange(L) < torch.tensor([[L], [short]])).float()

    traced = torch.jit.trace(logits, inputs(3), check_trace=False)
    for short in (3, 5, L):
        given = inputs(short)
        assert_same(traced(*given), logits(*given), 1e-5)


@pytest.mark.parametrize("name", COMPILED)
def test_batches_of_gradients_are_refused(name):
    query, key, value, rel_key = list(inputs_of("operator").values())[:4]
    out = xk.rel_attention(query, key, value, rel_key, backend=name)
    with pytest.raises(RuntimeError, match='take no batch of gradients .* backend="reference" does'):
        torch.autograd.grad(out, query, torch.randn(3, *out.shape), is_grads_batched=True)


def test_compiled_transforms_take_the_reference():
    """Without a compiler: operator/test_registration.py."""
    torch._dynamo.reset()
    query, *rest = (x.detach() for x in list(inputs_of("operator").values())[:4])
    gradient = torch.func.grad(lambda x: xk.rel_attention(x, *rest).square().sum())
    assert_same(torch.compile(gradient, fullgraph=True, backend="eager")(query), gradient(query), 1e-5)


def test_transforms_leave_nothing_behind():
    """Positions are kept from call to call; those made inside a transform are none that others could use."""
    attn, h = xk.TwoStreamAttention(WIDTH, HEADS), torch.randn(B, 19, WIDTH)
    torch.func.grad(lambda x: attn(x)[0].sum())(h)
    torch.func.jvp(lambda x: attn(x)[0], (h,), (h,))
    assert_same(torch.func.vmap(lambda x: attn(x[None])[0][0])(h), attn(h)[0], 1e-5)
    attn(h)[0].sum().backward()
    assert attn.r.grad.isfinite().all()
    assert not torch._C._functorch.is_functorch_wrapped_tensor(xk.positions.kept_positions(h, 19, 19, WIDTH))


@pytest.mark.parametrize("kind", ["model", "accelerated"])
def test_gradients_of_each_sample_and_ensembles(kind):
    model, ids = make(kind), torch.randint(50, (3, L))
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def result(weights, ids):
        return torch.func.functional_call(model, weights, (ids,))[0]

    gradient = torch.func.grad(lambda weights, ids: result(weights, ids[None]).square().sum())
    found = torch.func.vmap(gradient, in_dims=(None, 0))(weights, ids)
    for index in range(3):
        model.zero_grad()
        model(ids[index : index + 1])[0].square().sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                size = parameter.grad.abs().max().item()
                assert_same(found[name][index], parameter.grad, 1e-4 * size + 1e-6, name)
    with torch.no_grad():
        both = torch.func.vmap(result, in_dims=(0, None))({n: torch.stack([w, w]) for n, w in weights.items()}, ids)
        assert_same(both[1], result(weights, ids), 1e-5)


@pytest.mark.parametrize("kind", ["module", "model"])
def test_copies_and_pickles(kind):
    model, inputs = make(kind), inputs_of(kind)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(outputs(other(**inputs)), outputs(model(**inputs)), 0.0)


def test_masks_and_memory_are_loaded_as_plain_data():
    lm = ours(attn_type="uni")
    file = io.BytesIO()
    torch.save({"mask": xk.RankMask.causal(2, 3, window=2), "memory": lm.project_mems(batch=2)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["mask"].to_bool(), xk.RankMask.causal(2, 3, window=2).to_bool())
    assert loaded["memory"].length == 0


def test_module_on_the_meta_device():
    inputs = {name: x.detach().to("meta") for name, x in inputs_of("module").items()}
    assert [x.shape[1] for x in make("module").to("meta")(**inputs)] == [L, N]


@pytest.mark.parametrize("kind", ["model", "accelerated"])
def test_meta_device(kind):
    """Shapes without data, one-hot mappings included, whose values cannot be read."""
    ids = torch.zeros(B, L, dtype=torch.long, device="meta")
    mapping, perm_mask = (torch.zeros(B, rows, L, device="meta") for rows in (N, L))
    output = make(kind).to("meta")(ids, perm_mask=perm_mask, target_mapping=mapping)
    assert output[0].shape[:2] == (B, N)


@pytest.mark.parametrize("device, level", [("cpu", "INFO"), ("cuda", "WARNING")])
def test_falling_back_to_the_reference_is_logged_once(device, level, monkeypatch, caplog):
    for name, backend in backends._BACKENDS.items():
        if name != "reference":
            monkeypatch.setattr(backend, "unavailable", lambda device=None: "it is not built")
            monkeypatch.setattr(backend, "DEVICE", device)  # of some it is the CPU only in these tests
    backends._log_once.cache_clear()
    with caplog.at_level("INFO", logger="xlnet_kernels"):
        for _ in range(2):
            assert backends.choose(None, torch.device(device), torch.float32, 64) is backends.reference
    (record,) = caplog.records
    assert record.levelname == level
    assert record.getMessage().startswith(f"the reference backend serves tensors on {device}, since no fused one can (")
    assert "it is not built" in record.getMessage()


def test_transforms_log_that_they_take_the_reference(caplog):
    backends._log_once.cache_clear()
    tensors = [torch.randn(2, 1, 3, 8) for _ in range(3)] + [torch.randn(1, 6, 8)]
    with caplog.at_level("INFO", logger="xlnet_kernels"):
        torch.func.vmap(lambda q: xk.rel_attention(q[None], *(x[:1] for x in tensors[1:3]), tensors[3]))(tensors[0])
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "torch.func transforms and forward-mode gradients need the reference" in record.getMessage()
