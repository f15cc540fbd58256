"""XLNetModel and the language model against transformers: logits, hidden states, memory, attentions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import xlnet_kernels as xk
from tests.model.twins import (
    B,
    L,
    M,
    N,
    assert_same,
    assert_same_outputs,
    base_size_twins,
    make_inputs,
    make_mems,
    ours,
    twins,
)
from xlnet_kernels import attention

EVERYTHING = ("logits", "mems", "hidden_states", "attentions")
OPTIONS = [
    dict(),
    dict(clamp_len=3),
    dict(bi_data=True),
    dict(mem_len=8, reuse_len=4),
    dict(ff_activation="gelu_new", d_inner=40),
]
GIVEN = [
    (),
    ("token_type_ids",),
    ("attention_mask",),
    ("perm_mask",),
    ("attention_mask", "perm_mask", "token_type_ids"),
    ("target_mapping",),
    ("target_mapping", "attention_mask"),
    ("target_mapping", "perm_mask", "attention_mask", "token_type_ids"),
]


@pytest.mark.parametrize("memory", [0, M])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bidirectional_model_equals_transformers(options, memory):
    theirs, lm = twins("XLNetLMHeadModel", **options)
    mems = make_mems(lm, memory) if memory else None
    inputs = make_inputs()
    for given in GIVEN:
        arguments = {name: inputs[name] for name in ("input_ids", *given)}
        for output_attentions in (False, True):
            arguments |= dict(mems=mems, output_hidden_states=True, output_attentions=output_attentions)
            with torch.no_grad():
                assert_same_outputs(lm(**arguments), theirs(**arguments), EVERYTHING)


@pytest.mark.parametrize("memory", [0, M])
@pytest.mark.parametrize("options", [dict(), dict(clamp_len=3), dict(same_length=True)], ids=str)
def test_unidirectional_model_equals_transformers(options, memory):
    """transformers refuses uni with a mask in batches, so that it is asked one sequence at a time."""
    theirs, lm = twins("XLNetLMHeadModel", attn_type="uni", **options)
    mems = make_mems(lm, memory) if memory else None
    inputs = make_inputs()
    inputs["target_mapping"][:, :, 0] = 0  # position 0 may see nothing
    inputs["perm_mask"] = (torch.rand(B, L, L) > 0.5).float()
    inputs["perm_mask"][:, range(L), range(L)] = 0  # same_length without memory leaves a row itself alone
    for given in GIVEN:
        if "attention_mask" in given and "target_mapping" in given and not memory:
            continue  # rows at padding see nothing
        arguments = {name: inputs[name] for name in ("input_ids", *given)}
        with torch.no_grad():
            found = lm(**arguments, mems=mems, output_hidden_states=True, output_attentions=True)
            for b in range(B):
                one = {name: x[b : b + 1] for name, x in arguments.items()}
                one["mems"] = None if mems is None else [x[:, b : b + 1] for x in mems]
                wanted = theirs(**one, output_hidden_states=True, output_attentions=True)
                assert_same(found.logits[b : b + 1], wanted.logits)
                assert_same([x[:, b : b + 1] for x in found.mems], wanted.mems)
                assert_same([x[b : b + 1] for x in found.hidden_states], wanted.hidden_states)
                maps = [y for x in found.attentions for y in (x if isinstance(x, tuple) else (x,))]
                wanted = [y for x in wanted.attentions for y in (x if isinstance(x, tuple) else (x,))]
                assert_same([x[b : b + 1] for x in maps], wanted)


def test_base_size_model_equals_transformers():
    theirs, lm = base_size_twins()
    inputs, mems = make_inputs(length=24, vocab=200), make_mems(lm)
    with torch.no_grad():
        wanted = theirs(**inputs, mems=mems, output_hidden_states=True, output_attentions=True)
        found = lm(**inputs, mems=mems, output_hidden_states=True, output_attentions=True)
        fast = lm(**inputs, mems=mems, output_hidden_states=True)
    assert_same_outputs(found, wanted, EVERYTHING)
    assert_same_outputs(fast, wanted, EVERYTHING[:3])


def _mapping(kind: str) -> torch.Tensor:
    mapping = make_inputs()["target_mapping"]
    if kind == "zero rows":
        mapping[0, 1] = 0
        mapping[1] = 0
    elif kind == "soft":
        mapping = torch.rand(B, N, L)
    elif kind == "repeated":
        mapping[0, 1] = mapping[0, 0]
    elif kind == "scaled":
        mapping = mapping * 2
    return mapping


@pytest.mark.parametrize("kind", ["one-hot", "zero rows", "soft", "repeated", "scaled"])
@pytest.mark.parametrize("mask", ["none", "padding", "dense"])
def test_any_target_mapping_gives_the_numbers_of_transformers(kind, mask, backend):
    theirs, lm = twins("XLNetLMHeadModel", backend)
    inputs = make_inputs() | dict(target_mapping=_mapping(kind))
    names = {"none": (), "padding": ("attention_mask",), "dense": ("perm_mask",)}[mask]
    inputs = {name: inputs[name] for name in ("input_ids", "target_mapping", "token_type_ids", *names)}
    with torch.no_grad():
        assert_same_outputs(lm(**inputs), theirs(**inputs), ("logits", "mems"))


@pytest.mark.parametrize("kind, rows", [("one-hot", N), ("zero rows", N), ("soft", L), ("repeated", L)])
def test_one_hot_mappings_cost_their_rows(kind, rows, monkeypatch):
    calls = []

    def counted(query, key, value, rel_key, **options):
        calls.append((query.shape[2], key.shape[2]))
        return xk.rel_attention(query, key, value, rel_key, **options)

    monkeypatch.setattr(attention, "rel_attention", counted)
    model = ours()
    model(make_inputs()["input_ids"], target_mapping=_mapping(kind))
    last = rows if rows == N else L + rows  # the last layer's content stream is not read
    assert calls == [(L + rows, L), (last, L)]


@pytest.mark.parametrize("mask", ["RankMask", "perm_mask", "none"])
def test_last_layer_without_content_rows_changes_nothing(mask):
    lm, inputs = ours("XLNetLMHeadModel"), make_inputs()
    if mask != "perm_mask":
        del inputs["perm_mask"]
    if mask == "RankMask":
        inputs["mask"] = xk.RankMask.from_order(torch.stack([torch.randperm(L) for _ in range(B)]))
        del inputs["attention_mask"]
    mapping = inputs.pop("target_mapping")
    short = lm(**inputs, target_positions=mapping.argmax(-1))
    full = lm(**inputs, target_positions=mapping.argmax(-1), output_hidden_states=True)
    assert_same_outputs(short, full, ("logits", "mems"))


@pytest.mark.parametrize("targets", ["none", "target_positions", "one-hot", "soft"])
@pytest.mark.parametrize("mask", ["RankMask", "perm_mask", "none"])
@pytest.mark.parametrize("memory", ["", "memory"])
def test_output_rows_are_those_of_the_whole_output(targets, mask, memory):
    model, inputs = ours("XLNetModel"), make_inputs()
    inputs["mems"] = make_mems(model) if memory else None
    if mask != "perm_mask":
        del inputs["perm_mask"]
    if mask == "RankMask":
        inputs["mask"] = xk.RankMask.from_order(torch.stack([torch.randperm(L) for _ in range(B)]))
        del inputs["attention_mask"]
    mapping = inputs.pop("target_mapping")
    if targets == "target_positions":
        inputs["target_positions"] = mapping.argmax(-1)
    elif targets != "none":
        inputs["target_mapping"] = mapping if targets == "one-hot" else mapping.roll(1, 1) / 2 + mapping / 2
    whole = model(**inputs)
    rows = torch.tensor([[1, -1, 1], [0, 2, -3]])
    for given in (rows, rows[:1], rows[:, :0]):
        short, full = model(**inputs, output_rows=given), model(**inputs, output_rows=given, output_hidden_states=True)
        wanted = torch.stack([whole.last_hidden_state[b, row] for b, row in enumerate(given.expand(B, -1))])
        for found in (short, full):
            assert_same(found.last_hidden_state, wanted)
            assert_same(found.mems, whole.mems)
    leaves = tuple(model.parameters())
    mine, theirs = (
        torch.autograd.grad(x.square().sum(), leaves, allow_unused=True)
        for x in (
            model(**inputs, output_rows=rows).last_hidden_state,
            model(**inputs, output_rows=rows, output_hidden_states=True).last_hidden_state,
        )
    )
    for x, y in zip(mine, theirs, strict=True):
        assert x is y is None or (x - y).abs().max() <= 1e-4 * y.abs().max()


def test_the_last_layer_computes_the_output_rows_alone(monkeypatch):
    calls = []

    def counted(query, key, value, rel_key, **options):
        calls.append((query.shape[2], key.shape[2]))
        return xk.rel_attention(query, key, value, rel_key, **options)

    monkeypatch.setattr(attention, "rel_attention", counted)
    ids = make_inputs()["input_ids"]
    ours()(ids, output_rows=torch.tensor([[-1, 0]]))
    assert calls == [(L, L), (2, L)]
    for name in ("XLNetForSequenceClassification", "XLNetForMultipleChoice"):
        calls.clear()
        ours(name)(ids[:, None] if "Choice" in name else ids)
        assert calls == [(L, L), (1, L)]
    calls.clear()
    ours("XLNetForSequenceClassification", summary_type="mean")(ids)
    assert calls == [(L, L), (L, L)]


def test_target_positions_equal_target_mapping():
    lm, inputs = ours("XLNetLMHeadModel"), make_inputs()
    mapping = inputs.pop("target_mapping")
    wanted = lm(**inputs, target_mapping=mapping, output_attentions=True)
    found = lm(**inputs, target_positions=mapping.argmax(-1), output_attentions=True)
    assert_same_outputs(found, wanted, ("logits", "mems"))
    for (_, short), (_, full) in zip(found.attentions, wanted.attentions, strict=True):
        rows = mapping.argmax(-1)[:, None, :, None].expand(-1, short.shape[1], -1, short.shape[3])
        assert_same(short, full.gather(2, rows))  # transformers' map has a row for every position
    twice = torch.tensor([[2, 2], [4, 0]])
    found = lm(**inputs, target_positions=twice).logits
    assert_same(found[0, 0], found[0, 1])


@pytest.mark.parametrize("order", ["forward", "backward", "random", "padding"])
def test_rank_masks_equal_perm_masks(order):
    """Any order of a language model is a RankMask; what transformers is told is the dense matrix it stands for."""
    theirs, lm = twins("XLNetLMHeadModel")
    steps = torch.arange(L).expand(B, L)
    if order == "backward":
        steps = steps.flip(1)
    elif order == "random":
        steps = torch.stack([torch.randperm(L) for _ in range(B)])
    mask = xk.RankMask.from_order(steps)
    inputs = make_inputs()
    arguments = dict(input_ids=inputs["input_ids"])
    if order == "padding":
        arguments["attention_mask"] = inputs["attention_mask"]
    perm_mask = (~mask.to_bool("query")).float()
    late = (steps + (steps > 0).int()).argsort(1)[:, -N:]  # the last steps see something
    mapping = F.one_hot(late, L).float()
    for mems in (None, make_mems(lm)):
        with torch.no_grad():
            wanted = theirs(**arguments, mems=mems, perm_mask=perm_mask, target_mapping=mapping)
            found = lm(**arguments, mems=mems, mask=mask, target_positions=late)
        assert_same_outputs(found, wanted, ("logits", "mems"))


def test_first_in_the_order_sees_nothing_and_its_own_token_least_of_all():
    lm = ours("XLNetLMHeadModel")
    ids = make_inputs()["input_ids"]
    mask = xk.RankMask.from_order(torch.arange(L).expand(B, L))
    arguments = dict(mask=mask, target_positions=torch.zeros(B, 1, dtype=torch.long))
    found = lm(ids, **arguments).logits
    assert_same(lm((ids + 1) % 50, **arguments).logits, found, atol=0)  # transformers lets the token through here


def test_forward_order_is_the_unidirectional_model():
    bi = ours(n_layer=2)
    uni = ours(attn_type="uni")
    uni.load_state_dict(bi.state_dict())
    ids = make_inputs()["input_ids"]
    found = bi(ids, mask=xk.RankMask.causal(B, L)).last_hidden_state
    assert_same(found, uni(ids).last_hidden_state)


def test_unidirectional_model_never_looks_ahead():
    lm, ids = ours("XLNetLMHeadModel", attn_type="uni"), make_inputs()["input_ids"]
    changed = ids.clone()
    changed[:, 4:] += 1
    changed %= 50
    assert_same(lm(changed).logits[:, :4], lm(ids).logits[:, :4], atol=0)
    assert (lm(changed).logits[:, 4:] != lm(ids).logits[:, 4:]).any()


@pytest.mark.parametrize("batch", [1, 4])
def test_reversed_text_reads_like_forward_text_backwards(batch):
    """bi_data: the second half is reversed, its distances count down. A single sequence is forward text."""
    both = ours(bi_data=True)
    forward = ours()
    forward.load_state_dict(both.state_dict())
    ids = torch.randint(50, (max(batch // 2, 1), L))
    given = ids if batch == 1 else torch.cat([ids, ids.flip(1)])
    found = both(given).last_hidden_state
    wanted = forward(ids).last_hidden_state
    assert_same(found[: len(ids)], wanted)
    assert_same(found[len(ids) :].flip(1), wanted if batch > 1 else wanted[:0])


def test_padding_is_as_if_it_were_not_there():
    model, ids = ours(), torch.randint(50, (1, L))
    wanted = model(ids[:, 2:]).last_hidden_state
    for padding in (
        dict(attention_mask=torch.tensor([[0, 0] + [1] * (L - 2)])),
        dict(attention_mask=torch.tensor([[False, False] + [True] * (L - 2)])),
        dict(input_mask=torch.tensor([[1.0, 1.0] + [0.0] * (L - 2)])),
        dict(input_mask=torch.tensor([[True, True] + [False] * (L - 2)])),
    ):
        assert_same(model(ids, **padding).last_hidden_state[:, 2:], wanted)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_masks_of_any_dtype(dtype):
    model, inputs = ours(), make_inputs()
    wanted = model(**inputs).last_hidden_state
    changed = {name: inputs[name].to(dtype) for name in ("perm_mask", "attention_mask", "target_mapping")}
    assert_same(model(**inputs | changed).last_hidden_state, wanted, atol=0)


def test_padding_alone_keeps_memory_linear(monkeypatch):
    masks = []

    def seen(*tensors, **options):
        masks.append(options["mask"])
        return xk.rel_attention(*tensors, **options)

    monkeypatch.setattr(attention, "rel_attention", seen)
    inputs = make_inputs()
    for options in (dict(), dict(attn_type="uni", same_length=True)):
        model = ours(**options)
        model(inputs["input_ids"], inputs["attention_mask"], make_mems(model))
    assert len(masks) == 4 and all(isinstance(mask, xk.RankMask) for mask in masks)


def test_embeddings_instead_of_ids():
    model, inputs = ours(), make_inputs()
    embedded = model.word_embedding(inputs.pop("input_ids"))
    assert model(inputs_embeds=embedded, **inputs).last_hidden_state.shape == (B, N, 32)
