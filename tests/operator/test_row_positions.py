"""RowPositions: query positions that are sorted once, and what else a model prepares once for all of its layers."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import xlnet_kernels as xk
from tests.cases import MODULES, READY, make
from xlnet_kernels import ops
from xlnet_kernels.two_streams import split_positions, stack_mask, stack_segments


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_same_as_positions_in_a_tensor(backend, dtype):
    problem = make(2, 2, 40, keys=30, mem=5, mask="order", positions=True).with_options(deterministic=True)
    positions = problem.options["query_positions"].to(dtype)
    wanted = problem.with_options(query_positions=positions).results(backend)
    found = problem.with_options(query_positions=xk.RowPositions(positions)).results(backend)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_rows_are_sorted_and_equal_positions_keep_their_order():
    rows = xk.RowPositions(torch.tensor([[2, 0, 2, 1], [3, 3, 0, 2**40]]))
    assert rows.row.tolist() == [[1, 3, 0, 2], [2, 0, 1, 3]]
    assert rows.ascending.tolist() == [[0, 1, 2, 2], [0, 3, 3, 2**31 - 1]]
    assert rows.row.dtype == rows.ascending.dtype == torch.int32


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ([0, 1], "must be a 2-dimensional tensor .*, got list"),
        (torch.arange(3), r"must be a 2-dimensional tensor .*, got shape \(3,\)"),
        (torch.zeros(1, 3), "must hold int32 or int64, got torch.float32"),
    ],
)
def test_what_is_no_position_is_refused(position, message):
    with pytest.raises(ValueError, match=f"RowPositions: position {message}"):
        xk.RowPositions(position)


def test_positions_outside_of_the_segment_are_refused():
    problem = make(1, 2, 4, keys=4)
    positions = xk.RowPositions(torch.tensor([[0, 1, 2, 4]]))
    with pytest.raises(ValueError, match=r"query_positions must lie in \[0, 4\), got values from 0 to 4"):
        problem.call("reference", query_positions=positions)
    for backend, wanted in (("reference", (1, 4)), (None, (1, 4))):
        with pytest.raises(ValueError, match=rf"query_positions must have shape \({wanted[0]}, {wanted[1]}\)"):
            problem.run(backend, "cpu", query_positions=xk.RowPositions(torch.zeros(2, 4, dtype=torch.int64)))


@pytest.mark.skipif("cpu" not in READY, reason="the CPU backend is not there")
def test_an_order_beyond_the_rows_is_refused():
    x, rel_key = torch.randn(1, 1, 3, 16), torch.randn(1, 6, 16)
    numbers = (3, 0.0, 1.0, False, 0, False)
    position = torch.tensor([[0, 1, 2]])
    for order, message in (([[0, 1, 3]], r"query_order must lie in \[0, 3\)"), ([[0, 1]], "query_order must be a")):
        with pytest.raises(ValueError, match=message):
            ops.ops.rel_attention(x, x, x, rel_key, *[None] * 13, position, torch.tensor(order), None, *numbers)
    with pytest.raises(ValueError, match="query_order must come with query_positions"):
        ops.ops.rel_attention(x, x, x, rel_key, *[None] * 13, None, position, None, *numbers)


def _flip(rows: torch.Tensor) -> None:
    rows.copy_(rows.flip(0))


UNSORTED = {
    "descending": (lambda rows: _flip(rows.ascending[0]), "query_positions must ascend .* sequence 0"),
    "swapped": (lambda rows: _flip(rows.ascending[1, -2:]), "query_positions must ascend .* sequence 1"),
    "twice": (lambda rows: rows.row[1].fill_(2), "query_order .* each row once, got row 2 of sequence 1 again"),
    "beyond": (lambda rows: rows.row[1, 3].fill_(2**30), r"query_order must lie in \[0, "),
    "before": (lambda rows: rows.ascending[0, 0].fill_(-(2**31)), r"query_positions must lie in \[0, "),
}


@pytest.mark.skipif("cpu" not in READY, reason="the CPU backend is not there")
@pytest.mark.parametrize("rows", [5, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", UNSORTED)
def test_what_is_no_order_is_refused(what, dtype, rows):
    """By a plain call and by backward: kernels would read and write outside of their tensors."""
    edit, message = UNSORTED[what]
    leaves = make(2, 2, rows, keys=2 * rows, dtype=dtype, biases=False, segments=False).leaves
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    positions = torch.stack([torch.randperm(2 * rows)[:rows] for _ in range(2)])
    good, bad = xk.RowPositions(positions), xk.RowPositions(positions)
    edit(bad)
    for dropout_p in (0.0, 0.1):
        with pytest.raises(ValueError, match=message):
            xk.rel_attention(**leaves, query_positions=bad, dropout_p=dropout_p, backend="cpu")
    out = xk.rel_attention(**leaves, query_positions=good, backend="cpu")
    for name in ("ascending", "row"):
        getattr(good, name).data.copy_(getattr(bad, name))  # which autograd does not see
    with pytest.raises(ValueError, match=message):
        out.sum().backward()


def _count_operators(function) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        function()
    return {event.key: event.count for event in found.key_averages()}


@pytest.mark.skipif("cpu" not in READY, reason="the CPU backend is not there")
def test_a_model_sorts_positions_once_for_its_layers_and_their_backward_passes():
    h, targets, kinds = torch.randn(2, 9, 32), torch.tensor([[7, 1], [0, 5]]), torch.zeros(2, 9, dtype=torch.int64)
    mask = xk.RankMask.causal(1, 9)
    counts = []
    for layers in (1, 3):
        config = xk.XLNetConfig(vocab_size=50, d_model=32, n_layer=layers, n_head=4, d_inner=64, dropout=0.0)
        model = xk.XLNetModel(config, backend="cpu").train()
        inputs = dict(inputs_embeds=h, mask=mask, target_positions=targets, token_type_ids=kinds, use_mems=False)
        counts.append(_count_operators(lambda m=model, i=inputs: m(**i).last_hidden_state.sum().backward()))
    # The last layer has rows of its own: of the content stream nothing is wanted.
    assert counts[0]["aten::sort"] == counts[1]["aten::sort"] == 2


def test_what_a_model_prepares_is_as_kernels_read_it():
    h, positions = torch.zeros(2, 5, 4), torch.tensor([[0, 1, 2, 3, 4, 2]]).expand(2, -1)
    for mask in (xk.RankMask.causal(1, 7), xk.RankMask.causal(2, 7)):
        mask = mask.rows_from(2)
        for rows in (None, positions):
            found = stack_mask(mask, rows, h, 2, 2)
            vectors = (found.query_rank, found.key_rank, found.sees_self)
            assert all(vector.is_contiguous() and vector.shape[0] == 2 for vector in vectors)
    for ids in stack_segments(torch.zeros(2, 5, dtype=torch.int64), positions, 2):
        assert ids.dtype == torch.int32 and ids.is_contiguous()
    with pytest.raises(ValueError, match="segment_ids must lie in"):
        stack_segments(torch.tensor([[2**40]]), None, 0)


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*arguments, **(options or {}))


@pytest.mark.skipif("triton" not in READY, reason="the Triton backend is not there")
@pytest.mark.parametrize("lengths", [(70, 60, 5), (128, 123, 5)], ids=["odd", "whole tiles"])
def test_torch_only_allocates_around_triton_kernels(monkeypatch, lengths):
    from xlnet_kernels.backends.triton import launch, launch_cache

    length, keys, mem = lengths
    problem = make(2, 2, length, keys=keys, mem=mem, mask="window", positions=True, dtype=torch.float16)
    mask, leaves, device = problem.options["mask"], problem.leaves, MODULES["triton"].DEVICE
    sees_self = torch.ones(2, length, dtype=torch.bool)
    vectors = (mask.query_rank, mask.key_rank, mask.query_floor, sees_self, None)
    ids = (problem.query_ids.int(), problem.key_ids.int())
    positions = split_positions(xk.RowPositions(problem.options["query_positions"]))
    tensors = [*(leaves.get(name) for name in ops.INPUT_NAMES[: ops.DIFFERENTIABLE]), *ids, *vectors, *positions, None]
    tensors = [tensor if tensor is None else tensor.detach().to(device).contiguous() for tensor in tensors]
    numbers = (problem.options.get("max_distance", mem + keys), 0.0, 1.0, False)
    monkeypatch.setattr(launch_cache, "run", lambda *_: None)
    with Recorder() as recorder:
        out, _, row_max, row_sum, residual = launch.forward(*tensors, *numbers, True)
        launch.backward(out, None, out, residual, row_max, row_sum, [True] * ops.DIFFERENTIABLE, *tensors, *numbers)
    same_memory = {"view", "detach", "split_with_sizes"}
    room = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
    assert recorder.names <= same_memory | room | {"new_zeros"}  # which is for sums that rel_key's gradient is made of
