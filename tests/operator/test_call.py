"""The table of the operator's arguments: the layers that are made of it, and a field that one of them does not know."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import xlnet_kernels as xk
from tests import ROOT
from xlnet_kernels import call_checks
from xlnet_kernels.call import DIFFERENTIABLE, INPUT_NAMES, NUMBERS, ROWS, TENSORS, Argument, Call, collect
from xlnet_kernels.distributed import ring_attention

x = torch.randn(2, 3, 5, 8)
R = torch.randn(3, 10, 8)


def test_fields_are_the_arguments_of_the_operator():
    """Every argument of `rel_attention` is a field, or is taken apart by `collect`, or says how to compute."""
    public = set(inspect.signature(xk.rel_attention).parameters) - {"return_lse", "backend"}
    taken_apart = set(inspect.signature(collect).parameters) - {"others"}
    assert public - taken_apart <= set(Call._fields)
    assert Call._fields == INPUT_NAMES + NUMBERS
    assert [argument.has_gradient for argument in TENSORS.values()] == sorted(
        (argument.has_gradient for argument in TENSORS.values()), reverse=True
    )
    assert ROWS == ("query", "key", "value", "memory_key", "memory_value")


@pytest.mark.parametrize("name", ["rel_attention", "rel_attention_torch"])
def test_schemas_have_the_fields_in_order(name):
    for end, before, after in (("", 0, ("needs_backward",)), ("_backward", 7, ())):
        schema = getattr(torch.ops.xlnet_kernels, name + end).default._schema
        found = [argument.name for argument in schema.arguments]
        assert tuple(found[before:]) == Call._fields + after
        optional = {argument.name for argument in schema.arguments[before:] if "Optional" in str(argument.type)}
        assert optional == set(INPUT_NAMES) & set(Call._field_defaults)


def test_the_list_in_cpp_is_the_same():
    text = (ROOT / "csrc/inputs.h").read_text()
    gradients, others = (
        re.findall(r"_\((\w*Tensor), (\w+)\)", text.partition(f"#define {name}_INPUTS")[2].partition("\n#define")[0])
        for name in ("DIFFERENTIABLE", "OTHER")
    )
    assert tuple(name for _, name in gradients) == INPUT_NAMES[:DIFFERENTIABLE]
    assert tuple(name for _, name in gradients + others) == INPUT_NAMES
    assert {name for kind, name in gradients + others if kind == "OptionalTensor"} == set(Call._field_defaults) & {
        *INPUT_NAMES
    }
    numbers = text.partition("#define NUMBERS")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"_\(\w+, (\w+)\)", numbers)) == NUMBERS


def test_collect_takes_classes_apart():
    ids = torch.zeros(2, 5, dtype=torch.int32)
    embed, bias = torch.randn(2, 3, 8), torch.randn(3, 8)
    mask = xk.RankMask(ids, ids, sees_self=True)
    rows = xk.RowPositions(torch.tensor([[1, 0, 2, 4, 3]] * 2))
    segments = xk.Segments(ids, ids, embed, bias)
    call = collect(x, x, x, R, segments=segments, mask=mask, query_positions=rows, memory=(x, -x), scale=2.0)
    assert call.key_ids is segments.key_ids and call.segment_embed is embed and call.segment_bias is bias
    assert call.query_rank is mask.query_rank and call.sees_self.all() and call.mask is None
    assert call.query_positions is rows.ascending and call.query_order is rows.row
    assert torch.equal(call.memory_value, -x) and call.scale == 2.0


def test_an_unknown_field_is_no_call():
    with pytest.raises(TypeError, match="the operator has no argument 'key_bias'"):
        collect(x, x, x, R, key_bias=None)


def test_checks_expand_masks_of_one_sequence():
    call = call_checks.check(collect(x, x, x, R, mask=xk.RankMask.causal(1, 5)))
    assert call.query_rank.shape == call.key_rank.shape == call.sees_self.shape == (2, 5)
    assert call.max_distance == 5 and call.scale == 8**-0.5
    assert call.deterministic is torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    "axes, gradient, is_served",
    [("HD", True, True), ("BL", False, True), ("HT", False, True), ("HT", True, False), ("bhlt", False, False)],
)
def test_the_ring_knows_axes_or_refuses(axes, gradient, is_served, monkeypatch):
    """An argument with axes that chunks of keys do not have is an error, never lost."""
    monkeypatch.setattr(ring_attention, "_OF_KEYS", ("key_bias",) if axes.endswith("T") else ())
    assert ring_attention._is_served("key_bias", Argument(axes, has_gradient=gradient)) is is_served


def test_the_ring_refuses_what_it_does_not_serve():
    call = collect(x, x, x, R, memory=(x, x))
    with pytest.raises(ValueError, match=r"ring_attention does not serve memory\[0\]"):
        ring_attention._gathered(call, ring_attention.Ring(None))
