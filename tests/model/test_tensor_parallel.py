"""Tensor parallelism over gloo: outputs and gradients of two processes are those of one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import xlnet_kernels as xk
from tests import ROOT
from tests.processes import run_in_processes

HEADS, SIZE = 4, 2
EXACT = dict(rtol=1e-10, atol=1e-12)  # float64; sums over processes are in another order


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def operator_problem() -> tuple[dict[str, torch.Tensor], dict]:
    """The operator's differentiable inputs by name, and what else it takes: two sequences."""
    torch.manual_seed(3)
    leaves = {name: random(2, HEADS, 5, 8) for name in ("query", "key", "value")}
    leaves |= {name: random(2, HEADS, 3, 8) for name in ("memory_key", "memory_value")}
    leaves |= {"rel_key": random(HEADS, 13, 8), "embed": random(2, HEADS, 8)}
    leaves |= {name: random(HEADS, 8) for name in ("content_bias", "position_bias", "bias")}
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 2]])
    targets = torch.tensor([[0, 1, 0, 1, 1], [1, 0, 0, 1, 1]]).bool()
    order = torch.tensor([[4, 2, 0, 1, 3], [1, 3, 0, 4, 2]])
    return leaves, dict(ids=ids, mask=xk.RankMask.from_order(order, targets, mem_len=3, sees_self=True))


def attend(leaves: dict[str, torch.Tensor], ids: torch.Tensor, mask, **options) -> tuple[torch.Tensor, torch.Tensor]:
    given = dict(leaves)
    torch.manual_seed(7)  # dropout
    segments = xk.Segments(ids, nn.functional.pad(ids, (3, 0)), given.pop("embed"), given.pop("bias"))
    memory = given.pop("memory_key"), given.pop("memory_value")
    return xk.rel_attention(**given, segments=segments, mask=mask, memory=memory, return_lse=True, **options)


def gradients(outputs, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, dtype=torch.float64, generator=generator) for x in outputs]
    sum((whole(x) * weight).sum() for x, weight in zip(outputs, weights, strict=True)).backward()
    return {name: whole(x.grad) for name, x in leaves.items() if x.grad is not None}


def compare_operator(mesh: DeviceMesh, dim: int, **changes) -> None:
    """Heads (dim 1) or sequences (dim 0) shared; rel_key and biases of sequences are shared by all of them."""
    leaves, other = operator_problem()
    other |= changes
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    wanted = attend(leaves, **other)
    expected = gradients(wanted, leaves)

    def placed(name: str, x: torch.Tensor) -> torch.Tensor:
        heads = {4: 1, 3: 1 if name == "embed" else 0, 2: 0}[x.dim()]
        split = dim if x.dim() == 4 else heads if dim else None
        if name == "key":  # brought to where query is
            split = None
        placements = [Replicate() if split is None else Shard(split)]
        return distribute_tensor(x.detach(), mesh, placements).requires_grad_()

    shared = {name: placed(name, x) for name, x in leaves.items()}
    found = attend(shared, **other)
    assert all(x.placements == (Shard(dim),) for x in found)
    for one, two in zip(wanted, found, strict=True):
        torch.testing.assert_close(whole(two), one, **EXACT)
    parts = gradients(found, shared)
    assert parts.keys() == expected.keys()
    for name, gradient in parts.items():
        torch.testing.assert_close(gradient, expected[name], msg=lambda text, name=name: f"{name}: {text}", **EXACT)


CONFIG = dict(vocab_size=50, d_model=16, n_layer=2, n_head=HEADS, d_inner=24, ff_activation="gelu_new", mem_len=4)


def make(kind: str) -> nn.Module:
    torch.manual_seed(11)
    if kind in ("post", "pre"):
        return xk.TwoStreamAttention(16, HEADS, dropout=0.0, norm=kind, dtype=torch.float64)
    dropped = 0.3 if kind == "dropout" else 0.0
    config = xk.XLNetConfig(**CONFIG, dropout=dropped, bi_data=kind == "bi_data", use_mems_train=True)
    model = xk.XLNetLMHeadModel(config).double()
    return model.eval() if kind == "attentions" else model


def inputs_of(kind: str) -> dict:
    torch.manual_seed(13)
    targets = torch.tensor([[1, 4], [0, 3]])
    if kind in ("post", "pre"):
        mask = torch.rand(2, HEADS, 5, 8) < 0.7 if kind == "pre" else None  # another one for each head
        h, g, mems = random(2, 5, 16).requires_grad_(), random(2, 2, 16).requires_grad_(), random(2, 3, 16)
        ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
        return dict(h=h, g=g, mask=mask, mems=mems, segment_ids=ids, target_positions=targets)
    inputs = dict(input_ids=torch.randint(50, (2, 5)), token_type_ids=torch.randint(2, (2, 5)))
    if kind == "mixed targets":
        inputs["target_mapping"] = random(2, 2, 5).softmax(-1)
    elif kind == "attentions":
        inputs["output_attentions"] = True
    else:
        inputs["target_positions"] = targets
    if kind != "no memory":
        inputs["mems"] = [random(3, 2, 16) for _ in range(2)]
    return inputs


def run(kind: str, model: nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs, and gradients of inputs and parameters."""
    inputs = inputs_of(kind)
    torch.manual_seed(17)
    found = model(**inputs)
    outputs: list[torch.Tensor] = []
    for x in found.values() if isinstance(found, dict) else found:
        outputs += [x] if isinstance(x, torch.Tensor) else [] if x is None else list(x)
    leaves = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    leaves |= dict(model.named_parameters())
    return outputs, gradients([x for x in outputs if x.requires_grad], leaves)


def compare_model(mesh: DeviceMesh, kind: str) -> None:
    wanted, expected = run(kind, make(kind))
    model = make(kind)
    parallelize_module(model, mesh, xk.tensor_parallel_plan(model))
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    assert len(sharded) == (9 if kind in ("post", "pre") else 2 * 13)  # layer_2's bias is replicated
    assert all(p.to_local().numel() <= p.numel() // 2 or "layer_2.bias" in name
               for name, p in model.named_parameters() if isinstance(p, DTensor))  # fmt: skip
    found, parts = run(kind, model)
    assert len(found) == len(wanted) and not any(isinstance(x, DTensor) for x in found)
    for one, two in zip(wanted, found, strict=True):
        torch.testing.assert_close(two, one, **EXACT)
    assert parts.keys() == expected.keys()
    for name, gradient in parts.items():
        torch.testing.assert_close(gradient, expected[name], msg=lambda text, name=name: f"{name}: {text}", **EXACT)
    if kind == "model":  # at inference, where tables of one process would be kept
        one, two = (copy.eval().requires_grad_(False) for copy in (make(kind), model))
        for _ in range(2):
            torch.testing.assert_close(two(**inputs_of(kind)).logits, one(**inputs_of(kind)).logits, **EXACT)


def refuse(mesh: DeviceMesh) -> None:
    odd = xk.TwoStreamAttention(9, 3)
    with pytest.raises(ValueError, match="3 heads cannot be shared by 2 processes"):
        parallelize_module(odd, mesh, xk.tensor_parallel_plan(odd))
    q, r = torch.ones(1, 2, 4, 8), torch.ones(2, 8, 8)
    for dim, words in ((0, "query has 1 sequences, .* no multiple of the 2"), (2, r"sequences, Shard\(0\), or heads")):
        sharded = DTensor.from_local(q.chunk(2, dim)[0], mesh, [Shard(dim)], shape=q.shape, stride=q.stride())
        with pytest.raises(ValueError, match=words):
            xk.rel_attention(sharded, q, q, r)
    sharded = distribute_tensor(q, mesh, [Shard(1)])
    reverse = DeviceMesh("cpu", [1, 0])  # its shards lie in the other process
    elsewhere = distribute_tensor(q, reverse, [Shard(1)])
    for name, call in (("key", (elsewhere, q, r)), ("rel_key", (q, q, distribute_tensor(r, reverse, [Shard(0)])))):
        with pytest.raises(ValueError, match=f"^{name} is a DTensor on DeviceMesh.* and must be on"):
            xk.rel_attention(sharded, *call)
    ids = torch.zeros(3, 4, dtype=torch.int64)
    # three for two: the first process would have a part that fits, the second none; one for two fits both
    wrong: list[tuple[str, dict]] = [("key", dict(key=torch.ones(1, count, 4, 8))) for count in (3, 1)]
    wrong += [("rel_key", dict(rel_key=torch.ones(count, 8, 8))) for count in (3, 1)]
    wrong += [("content_bias", dict(content_bias=torch.ones(count, 8))) for count in (3, 1)]
    wrong += [(r"memory\[1\]", dict(memory=(torch.ones(1, 2, 1, 8), torch.ones(1, 3, 1, 8))))]
    wrong += [("segments.embed", dict(segments=xk.Segments(ids[:1], ids[:1], torch.ones(2, 3, 8))))]
    for name, changes in wrong:
        with pytest.raises(ValueError, match=f"^{name} must have 2 heads as query has, got shape"):
            xk.rel_attention(sharded, **dict(key=q, value=q, rel_key=r) | changes)
    q = q.expand(2, -1, -1, -1)
    sharded = distribute_tensor(q, mesh, [Shard(0)])
    wrong = [("segments.query_ids", dict(segments=xk.Segments(ids, ids, torch.ones(2, 2, 8))))]
    wrong += [("query_positions", dict(query_positions=ids))]
    wrong += [("query_positions", dict(query_positions=ids[:1])), ("rel_key", dict(rel_key=r[None]))]
    wrong += [("mask.query_rank", dict(mask=xk.RankMask.causal(3, 4)))]
    for name, changes in wrong:
        with pytest.raises(ValueError, match=f"^{name} must have 2 sequences as query has, got shape"):
            xk.rel_attention(sharded, **dict(key=q, value=q, rel_key=r) | changes)


def compare_masks(mesh: DeviceMesh) -> None:
    """The whole problem, two sequences and four heads, decides the shape of a dense mask."""
    leaves, other = operator_problem()
    draws = torch.Generator().manual_seed(2)
    for shape in ((HEADS, 5, 8), (1, 5, 8), (5, 8), (8,), ()):
        other["mask"] = torch.rand(shape, generator=draws) < 0.7 if shape else torch.tensor(True)
        wanted = attend(leaves, **other)[0]
        for dim in (0, 1):
            found = attend(leaves | {"query": distribute_tensor(leaves["query"], mesh, [Shard(dim)])}, **other)[0]
            torch.testing.assert_close(whole(found), wanted, **EXACT)
    query, r = torch.ones(2, 2, 5, 8), torch.ones(2, 10, 8)
    for dim in (0, 1):
        sharded = distribute_tensor(query, mesh, [Shard(dim)])
        with pytest.raises(ValueError, match="may be of 2 sequences or of 2 heads"):
            xk.rel_attention(sharded, query, query, r, mask=torch.ones(2, 5, 5, dtype=torch.bool))
        with pytest.raises(ValueError, match="may be padding of 2 sequences"):
            xk.rel_attention(sharded, query, query, r, mask=torch.ones(2, 5, dtype=torch.bool))


def drop_among_many_heads(mesh: DeviceMesh) -> None:
    """More than dropout has room for, which binds dropout alone."""
    x, r = torch.ones(1, 4096, 1, 1), torch.ones(4096, 2, 1)
    sharded = distribute_tensor(x, mesh, [Shard(1)])
    torch.testing.assert_close(whole(xk.rel_attention(sharded, x, x, r)), x)
    with pytest.raises(ValueError, match="dropout has room for"):
        xk.rel_attention(sharded, x, x, r, dropout_p=0.1)


class Sums(TorchDispatchMode):
    """Counts the sums over processes."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        self.count += "all_reduce" in str(function)
        return function(*args, **(kwargs or {}))


def count_sums(mesh: DeviceMesh) -> None:
    """Forward one; backward one of rows, one of what keys and values are of, and one of memory where it is normed."""
    for kind, sums in (("post", 2), ("pre", 3)):
        model, inputs = make(kind), inputs_of(kind)
        parallelize_module(model, mesh, xk.tensor_parallel_plan(model))
        with Sums() as forward:
            found = model(**inputs)
        with Sums() as backward:
            sum(x.sum() for x in found).backward()
        assert (forward.count, backward.count) == (1, sums)


def compare(size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    dense = torch.rand(2, 1, 5, 8, generator=torch.Generator().manual_seed(2)) < 0.6
    for dim in (0, 1):
        compare_operator(mesh, dim)
        compare_operator(mesh, dim, mask=dense)
        compare_operator(mesh, dim, mask=xk.RankMask.causal(1, 5, mem_len=3), dropout_p=0.4)
    for kind in ("post", "pre", "model", "no memory", "mixed targets", "bi_data", "attentions", "dropout"):
        compare_model(mesh, kind)
    compare_masks(mesh)
    drop_among_many_heads(mesh)
    count_sums(mesh)
    refuse(mesh)


def test_two_processes_are_one(tmp_path):
    run_in_processes("from tests.model import test_tensor_parallel as t; t.compare(size)", SIZE, tmp_path)


def test_models_without_the_attention_have_no_plan():
    with pytest.raises(ValueError, match="TwoStreamAttention in it, Linear has none"):
        xk.tensor_parallel_plan(nn.Linear(2, 2))
    plan = xk.tensor_parallel_plan(nn.Sequential(nn.Linear(4, 4), xk.TwoStreamAttention(4, 2)))
    assert list(plan) == ["1"] and isinstance(plan["1"], ParallelStyle)


WITHOUT = """
import sys
if sys.argv[1] == "without":
    sys.modules["torch.distributed.tensor"] = None
from xlnet_kernels import *
assert not sys.modules.get("torch.distributed.tensor")
try:
    print(type(tensor_parallel_plan(TwoStreamAttention(4, 2))).__name__)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "tensors, answer",
    [
        ("with", "HeadParallel"),
        ("without", "tensor_parallel_plan needs torch.distributed.tensor, which this torch lacks"),
    ],
)
def test_all_names_can_be_imported_without_distributed_tensors(tensors, answer):
    command = [sys.executable, "-c", WITHOUT, tensors]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.startswith(answer), done.stdout + done.stderr
