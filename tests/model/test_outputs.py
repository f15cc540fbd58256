"""Outputs are used as transformers' are: by name, by number, as a dictionary, in trees."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
import transformers
from torch.utils import _pytree

import xlnet_kernels as xk
from tests.model.twins import B, L, assert_same, make_inputs, make_mems, ours, twins
from xlnet_kernels.model import HeadOutput, XLNetOutput

LABELS = {
    "XLNetModel": {},
    "XLNetLMHeadModel": dict(labels=torch.arange(B * L).view(B, L)),
    "XLNetForSequenceClassification": dict(labels=torch.arange(B)),
    "XLNetForTokenClassification": dict(labels=torch.arange(B * L).view(B, L) % 2),
    "XLNetForMultipleChoice": dict(labels=torch.zeros(B, dtype=torch.long)),
    "XLNetForQuestionAnsweringSimple": dict(start_positions=torch.arange(B), end_positions=torch.arange(B) + 2),
    "XLNetForQuestionAnswering": dict(start_positions=torch.arange(B), end_positions=torch.arange(B) + 2),
}


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("name", LABELS)
def test_names_and_numbers_are_those_of_transformers(name, labelled):
    """Keys and their order, len, numbers, slices, tuples, with everything asked for and with as little as possible."""
    theirs, model = twins(name)
    ids = torch.randint(50, (B, 1, L) if "Choice" in name else (B, L))
    labels = LABELS[name] if labelled else {}
    for options in ({}, dict(use_mems=False), dict(output_hidden_states=True, output_attentions=True)):
        wanted, found = theirs(ids, **labels, **options), model(ids, **labels, **options)
        assert list(found) == list(found.keys()) == list(wanted.keys())
        assert len(found) == len(wanted) and isinstance(found, dict)
        for index, key in enumerate(wanted):
            assert found[index] is found[key] is getattr(found, key) is found.get(key) is found.to_tuple()[index]
            assert key in found and found[key] is dict(found)[key] is {**found}[key]
            if "log_probs" not in key:  # logarithms here, as the names say
                assert_same(found[key], wanted[key], where=key)
        assert found[-1] is found.to_tuple()[-1] and found[:2] == found.to_tuple()[:2]
        assert found.get("nothing", 3) == 3
        plain = model(ids, **labels, **options, return_dict=False)
        assert type(plain) is tuple and len(plain) == len(found)
        assert_same(plain[0], found[0])
    assert model(ids, use_mems=False).mems is None
    with pytest.raises(KeyError):
        model(ids, use_mems=False)["mems"]
    with pytest.raises(IndexError):
        model(ids, use_mems=False)[9]
    with pytest.raises(AttributeError, match="Output has no attribute 'nothing'"):
        _ = found.nothing


def test_return_dict_of_a_configuration_is_the_default():
    model = ours("XLNetForTokenClassification", extra={"return_dict": False}, use_mems_eval=False)
    (logits,) = model(torch.randint(50, (B, L)))
    assert logits.shape == (B, L, 2)
    assert model(torch.randint(50, (B, L)), return_dict=True).logits.shape == (B, L, 2)


def test_entries_can_be_set():
    out = HeadOutput(loss=None, logits=torch.ones(2))
    assert list(out) == ["logits"]
    out.loss = torch.zeros(())
    assert out["loss"] is out.loss
    out["logits"] = torch.zeros(3)
    assert out.logits.shape == (3,)
    out.loss = None
    assert len(out) == 1 and out.loss is None
    assert HeadOutput({"logits": 1}) == HeadOutput([("logits", 1)]) == HeadOutput(logits=1)


def test_copies_and_files():
    out = HeadOutput(logits=torch.ones(2, 3), mems=[torch.zeros(4, 2, 8)])
    file = io.BytesIO()
    torch.save(out, file)
    file.seek(0)
    for same in (copy.copy(out), copy.deepcopy(out), pickle.loads(pickle.dumps(out)), torch.load(file)):
        assert type(same) is HeadOutput and list(same) == ["logits", "mems"]
        assert_same(same.logits, out.logits)


def test_trees():
    out = XLNetOutput(last_hidden_state=torch.ones(2), mems=[torch.ones(3), torch.ones(4)])
    leaves, spec = _pytree.tree_flatten(out)
    assert [len(x) for x in leaves] == [2, 3, 4]
    back = _pytree.tree_unflatten([x * 2 for x in leaves], spec)
    assert type(back) is XLNetOutput and back.mems[1].sum() == 8
    assert _pytree.tree_map(lambda x: None, out)["last_hidden_state"] is None
    paths = [_pytree.keystr(path) for path, _ in _pytree.tree_flatten_with_path(out)[0]]
    assert paths == ["['last_hidden_state']", "['mems'][0]", "['mems'][1]"]

    class Own(HeadOutput):
        extra: torch.Tensor | None

    own = _pytree.tree_map(lambda x: x + 1, Own(logits=1, extra=2))
    assert type(own) is Own and own.extra == 3 and own.loss is None


def test_exported_programs_return_them(tmp_path):
    model = ours("XLNetForTokenClassification")
    ids = torch.randint(50, (B, L))
    program = torch.export.export(model, (), {"input_ids": ids, "use_mems": False})
    torch.export.save(program, tmp_path / "program.pt2")
    found = torch.export.load(tmp_path / "program.pt2").module()(input_ids=ids, use_mems=False)
    assert type(found) is HeadOutput and list(found) == ["logits"]
    assert_same(found.logits, model(ids).logits)


@pytest.mark.parametrize("name", LABELS)
def test_signatures_name_every_argument(name):
    """Arguments of transformers (output_rows serves for logits_to_keep), in its order, and our own."""
    found = inspect.signature(getattr(xk, name).forward).parameters
    wanted = inspect.signature(getattr(transformers, name).forward).parameters
    assert set(wanted) - {"kwargs", "logits_to_keep"} <= set(found) and "target_positions" in found
    assert not any(x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD) for x in found.values())
    if name != "XLNetForMultipleChoice":
        positional = [x for x, y in found.items() if y.kind is y.POSITIONAL_OR_KEYWORD]
        assert positional == list(wanted)[: len(positional)]
    inputs = make_inputs()
    if name in ("XLNetModel", "XLNetLMHeadModel", "XLNetForTokenClassification"):
        model = ours(name)
        mems = make_mems(model)
        order = [inputs["input_ids"], inputs["attention_mask"], mems, inputs["perm_mask"], inputs["target_mapping"]]
        assert_same(model(*order)[0], model(mems=mems, **inputs | {"token_type_ids": None})[0])
        with pytest.raises(TypeError, match="nothing"):
            model(nothing=1, **inputs)
