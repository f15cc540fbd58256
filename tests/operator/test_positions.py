"""Sinusoidal relative positions against transformers' relative_positional_encoding."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.parametrize import register_parametrization
from transformers import XLNetConfig, XLNetModel

from xlnet_kernels import position_cache, positions, relative_positions


@pytest.fixture(scope="module")
def model() -> XLNetModel:
    return XLNetModel(XLNetConfig(vocab_size=8, d_model=32, n_head=2, d_inner=8, n_layer=1))


@pytest.mark.parametrize("attn_type", ["bi", "uni"])
@pytest.mark.parametrize("clamp_len", [-1, 0, 3])
@pytest.mark.parametrize("bi_data", [False, True], ids=["", "bi_data"])
@pytest.mark.parametrize("key_len, query_len", [(5, 5), (12, 5), (1, 1)])
def test_equals_transformers(model, attn_type, clamp_len, bi_data, key_len, query_len):
    model.attn_type, model.clamp_len, model.bi_data = attn_type, clamp_len, bi_data
    wanted = model.relative_positional_encoding(query_len, key_len, bsz=4).transpose(0, 1)
    options = {"attn_type": attn_type, "clamp_len": clamp_len, "bi_data_batch": 4 if bi_data else None}
    found = relative_positions(key_len, query_len, 32, **options)
    assert found.shape == (wanted.shape if bi_data else wanted.shape[1:])
    # transformers' frequencies are float32: its angles are good to about 1e-6
    assert torch.allclose(found.expand_as(wanted), wanted, atol=5e-6)


def test_long_distances_keep_full_accuracy():
    # float32 angles would be off by 1e-3 at distance 16384
    exact = relative_positions(16384, 1, 8, dtype=torch.float64)
    assert torch.allclose(relative_positions(16384, 1, 8).double(), exact, atol=1e-7)
    assert exact[0, 0].item() == pytest.approx(torch.tensor(16384.0, dtype=torch.float64).sin().item(), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_is_the_one_asked_for(dtype):
    assert relative_positions(4, 4, 8, dtype=dtype).dtype == dtype


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"attn_type": "both"}, "attn_type must be"),
        ({"d_model": 7}, "d_model must be even .* got 7"),
        ({"bi_data_batch": 3}, "bi_data needs an even batch .* got 3"),
    ],
)
def test_bad_arguments_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        relative_positions(**({"key_len": 4, "query_len": 4, "d_model": 8} | arguments))


def test_a_kept_table_serves_what_it_may():
    weight, calls = torch.randn(4, 3), []
    kept = position_cache.PositionCache()

    def project(rows):
        calls.append(rows.shape[-2])
        return (rows @ weight.mT).unflatten(-1, (2, 2)).transpose(-3, -2)

    def served(rows, weight=weight):
        calls.clear()
        assert torch.allclose(kept(rows, [weight], project), (rows @ weight.mT).unflatten(-1, (2, 2)).transpose(-3, -2))
        return calls == [1]

    rows = torch.randn(7, 3)
    assert not served(rows) and calls == [7]  # gradients may be wanted
    with torch.no_grad():
        assert not served(rows) and served(rows) and served(rows.clone()) and served(rows[2:5])
        assert not served(rows[1:5])  # no middle: the sizes differ by an odd number
        assert served(rows[1:5]) and not served(rows[3:6])
        assert not served(rows[None]) and served(rows[None].clone())
        view = rows[1:5]
        assert not served(view) and served(view)
        rows.mul_(2)
        assert not served(view) and served(view)
        rows.data.add_(1)  # leaves no trace in rows._version
        assert not served(view) and served(view)
        rows.numpy()[2, 1] = 7
        assert not served(view)
        assert pickle.loads(pickle.dumps(kept))._kept is None
    assert not served(rows) and kept._kept is None  # training holds no table
    with torch.inference_mode():
        rows = torch.randn(5, 3)
        assert not served(rows) and served(rows)
        rows.mul_(2)  # leaves no trace in an inference tensor
        assert not served(rows) and served(rows)
    rows = rows.clone()
    with torch.no_grad():
        assert not served(rows)  # gradients could not go through a table of inference mode
        assert not kept(rows, [weight], project).is_inference() and served(rows)
    with torch.inference_mode():
        assert served(rows)


CHANGES = [
    lambda weight, other: None,
    lambda weight, other: weight.mul_(2),
    lambda weight, other: weight.data.mul_(2),
    lambda weight, other: weight.data[:, 0].mul_(2),
    lambda weight, other: weight.copy_(other),
]


def test_a_kept_table_is_of_its_weight():
    """Also where only the smallest of all positions looks at a column of it."""
    kept, rows = position_cache.PositionCache(), torch.randn(5, 3)
    rows[:4, 0] = 0
    rows[4] /= 10
    weights = [torch.randn(4, 3), torch.randn(4, 3)]

    def check(weight):
        assert torch.allclose(kept(rows, [weight], lambda rows: rows @ weight.mT), rows @ weight.mT)

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for change in CHANGES:
                check(weights[0])
                change(*weights)
                check(weights[0])
            check(weights[1])
            weights[1].add_(1)
            own = weights[1].clone()  # of inference_mode the second time
            check(own)
            own.mul_(2)
            check(own)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", ["one weight", "two weights", "one position"])
def test_a_kept_table_notices_the_smallest_change(dtype, change):
    """Through .data, of one number in a thousand, which one projected row in bfloat16 does not show."""
    kept, weight, rows = position_cache.PositionCache(), torch.randn(32, 33).to(dtype), torch.randn(9, 33).to(dtype)
    weight[3, 7], weight[3, 8] = 1, 1 + torch.finfo(dtype).eps

    def found():
        return kept(rows, [weight], lambda rows: rows @ weight.mT)

    with torch.no_grad():
        found()
        if change == "one position":
            rows.data[8, 32] += 0.5
        elif change == "one weight":
            weight.data[3, 7] += torch.finfo(dtype).eps
        else:
            weight.data[3, 7:9] = weight[3, 7:9].flip(0)
        table = kept._kept
        found()
        assert kept._kept is not table


def test_a_kept_table_refers_to_no_tensor():
    """torch.utils.swap_tensors refuses tensors with weak references, and a gone weight's memory is free."""
    kept, linear, rows = position_cache.PositionCache(), torch.nn.Linear(3, 4), torch.randn(5, 3)
    with torch.no_grad():
        kept.of_module(rows, linear, linear)
        for tensor in (rows, linear.weight):
            torch.utils.swap_tensors(tensor, torch.nn.Parameter(tensor * 2))
        assert torch.equal(kept.of_module(rows, linear, linear), linear(rows))


def test_threads_share_a_kept_table():
    """One writes the table between the two looks of another at it."""
    kept, weight, other = position_cache.PositionCache(), torch.randn(4, 3), torch.randn(9, 3)
    rows = torch.randn(5, 3)

    def project(rows):
        return rows @ weight.mT

    def interrupted(rows):
        kept(other, [weight], project)
        return project(rows)

    with torch.no_grad():
        kept(rows, [weight], project)
        assert torch.allclose(kept(rows, [weight], interrupted), project(rows))
        kept(rows, [weight], project)
        find = position_cache._find

        def find_interrupted(*given):
            first = find(*given)
            kept(other, [weight], project) if first is not None else None
            return first

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(position_cache, "_find", find_interrupted)
            assert torch.allclose(kept(rows, [weight], project), project(rows))


@pytest.mark.parametrize("part", [0, 1])
def test_hooks_of_a_projection_see_all_positions(part):
    kept, linear, seen = position_cache.PositionCache(), torch.nn.Linear(3, 4), []
    rows, projection = torch.randn(5, 3), torch.nn.Sequential(linear)
    projection.weight = linear.weight
    (projection, linear)[part].register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    with torch.no_grad():
        for _ in range(2):
            kept.of_module(rows, projection, projection)
    assert seen == [5, 5]


def test_a_parametrized_weight_is_computed_once():
    class Counted(torch.nn.Module):
        count = 0

        def forward(self, weight):
            Counted.count += 1
            return 2 * weight

    kept, linear, rows = position_cache.PositionCache(), torch.nn.Linear(3, 4), torch.randn(5, 3)
    register_parametrization(linear, "weight", Counted())
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            Counted.count = 0
            kept.of_module(rows, linear, linear)
            assert Counted.count == 1


def test_modes_that_compute_nothing_find_no_table():
    """Tensors of a fake mode or a tracer are not cached, and do not take cached ones."""
    kept, linear, rows = position_cache.PositionCache(), torch.nn.Linear(3, 4), torch.randn(5, 3)
    with torch.no_grad():
        table = kept.of_module(rows, linear, linear)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert type(kept.of_module(rows, linear, linear)) is FakeTensor
        graph = make_fx(lambda rows: kept.of_module(rows, linear, linear))(rows)
        torch.func.vmap(lambda row: kept.of_module(row[None], linear, linear))(rows)
        assert kept._kept.table is table and graph.code.count("aten.addmm") == 1


def test_a_large_table_is_not_kept(monkeypatch):
    monkeypatch.setattr(position_cache, "_LARGEST", 20)
    kept, weight = position_cache.PositionCache(), torch.randn(4, 3)
    with torch.no_grad():
        kept(torch.randn(6, 3), [weight], lambda rows: rows @ weight.mT)
        assert kept._kept is None
        kept(torch.randn(5, 3), [weight], lambda rows: rows @ weight.mT)
        assert kept._kept is not None


def test_what_is_written_into_positions_is_not_kept():
    """Hooks get the model's."""
    h = torch.zeros(1)
    wanted = relative_positions(6, 6, 8)
    for _ in range(2):
        found = positions.kept_positions(h, 6, 6, 8)
        assert torch.equal(found, wanted)
        found.data.zero_()
