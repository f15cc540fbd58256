"""Segment recurrence: what is kept, stepping through a text, memory projected once."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, BrokenBarrierError

import pytest
import torch
from torch import Tensor

import xlnet_kernels as xk
from tests.model.twins import B, L, M, assert_same, assert_same_outputs, make_inputs, make_mems, ours, twins
from xlnet_kernels import TwoStreamAttention
from xlnet_kernels.model.memory import Extension

LENGTH = 12


def _text(batch: int = B, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(50, (batch, length))


def test_kept_memory_is_that_of_transformers():
    theirs, model = twins("XLNetModel")
    default = ours(mem_len=3, reuse_len=1)
    default.load_state_dict(model.state_dict())
    ids = make_inputs()["input_ids"]
    for mem_len, reuse_len, given in itertools.product((None, 0, 4, 8, 20), (None, 0, 3, 20), (0, 2, M)):
        mems = make_mems(model, given) if given else None
        theirs.mem_len, theirs.reuse_len = mem_len, reuse_len
        model.config.mem_len, model.config.reuse_len = mem_len, reuse_len
        with torch.no_grad():
            wanted = theirs(ids, mems=mems).mems
            assert_same(model(ids, mems=mems).mems, wanted)
            if mem_len is not None and reuse_len is not None:  # the same for one call
                assert_same(default(ids, mems=mems, mem_len=mem_len, reuse_len=reuse_len).mems, wanted)


def test_when_memory_is_returned_and_used():
    model, ids = ours(use_mems_eval=True, use_mems_train=False), _text()
    mems = model(ids).mems
    assert model.train()(ids).mems is None
    model.config.use_mems_train = True
    assert len(model(ids).mems) == 2
    model.config.use_mems_eval = False
    assert model.eval()(ids).mems is None
    assert len(model(ids, use_mems=True).mems) == 2
    found = model(ids, mems=mems, use_mems=False)  # memory that is given is used
    assert found.mems is None
    assert (found.last_hidden_state - model(ids).last_hidden_state).abs().max() > 0.02


def test_no_gradient_flows_through_memory():
    model = ours(use_mems_train=True).train()
    mems = model(_text()).mems
    assert not any(x.requires_grad for x in mems)
    model(_text(), mems=mems).last_hidden_state.sum().backward()
    assert model.layer[0].rel_attn.k.grad.abs().sum() > 0


@pytest.mark.parametrize("steps", [[1] * LENGTH, [5, 1, 1, 3, 2]], ids=["one by one", "several"])
@pytest.mark.parametrize("projected", [False, True], ids=["mems", "projected"])
@pytest.mark.parametrize("options", [dict(attn_type="uni"), dict(), dict(bi_data=True), dict(clamp_len=4)], ids=str)
def test_causal_stepping_equals_the_full_pass(options, projected, steps):
    lm = ours("XLNetLMHeadModel", mem_len=None, **options)
    ids, bi = _text(), options.get("attn_type") != "uni"
    with torch.no_grad():
        wanted = lm(ids, mask=xk.RankMask.causal(B, LENGTH) if bi else None).logits
        mems = lm.transformer.project_mems(batch=B) if projected else None
        logits, past = [], 0
        for piece in ids.split(steps, 1):
            mask = xk.RankMask.causal(B, piece.shape[1], past) if bi else None
            output = lm(piece, mems=mems, mask=mask)
            logits.append(output.logits)
            mems, past = output.mems, past + piece.shape[1]
    assert_same(torch.cat(logits, 1), wanted)


def test_a_mask_of_the_segment_leaves_memory_visible():
    model = ours()
    mems, ids = make_mems(model), make_inputs()["input_ids"]
    order = torch.stack([torch.randperm(L) for _ in range(B)])
    found = model(ids, mems=mems, mask=xk.RankMask.from_order(order))
    assert_same_outputs(found, model(ids, mems=mems, mask=xk.RankMask.from_order(order, mem_len=M)), found)
    with pytest.raises(
        ValueError, match="mask has a query_floor: with memory it must have M . L = 12 key ranks, got 7"
    ):
        model(ids, mems=mems, mask=xk.RankMask.causal(B, L, window=3))


def test_a_row_can_be_kept_from_its_memory():
    """A stream that starts a new context: nothing of the old one is seen."""
    model, ids = ours(), make_inputs()["input_ids"]
    mask = xk.RankMask.full(B, L, M)
    mask.key_rank[0, :M] = torch.iinfo(torch.int32).max
    found = model(ids, mems=make_mems(model), mask=mask).last_hidden_state
    wanted = model(ids).last_hidden_state
    assert_same(found[0], wanted[0])
    assert (found[1] - wanted[1]).abs().max() > 0.02


@pytest.mark.parametrize("mem_len", [3, 6, None])
@pytest.mark.parametrize("reuse_len", [None, 2])
def test_projected_memory_equals_layer_inputs(mem_len, reuse_len):
    model = ours(mem_len=mem_len, reuse_len=reuse_len, clamp_len=5)
    plain = make_mems(model)
    projected = model.project_mems(plain)
    assert projected.length == M
    for length in (3, 1, 6, 2):
        inputs = make_inputs(length=length, targets=1)
        with torch.no_grad():
            wanted, found = model(**inputs, mems=plain), model(**inputs, mems=projected)
        assert_same(found.last_hidden_state, wanted.last_hidden_state)
        plain, projected = wanted.mems, found.mems
        assert isinstance(projected, xk.ProjectedMemory) and projected.length == plain[0].shape[0]
        for layer, mems, key, value in zip(model.layer, plain, projected.keys, projected.values, strict=True):
            assert_same([key, value], layer.rel_attn.project(mems.transpose(0, 1)))


def test_projected_memory_projects_nothing_but_new_tokens(monkeypatch):
    model = ours(attn_type="uni", mem_len=None)
    memory, rows = model.project_mems(batch=B), []
    heads = TwoStreamAttention._heads

    def counted(self, x, weight):
        rows.append((x.shape[-2], weight is self.r))
        return heads(self, x, weight)

    monkeypatch.setattr(TwoStreamAttention, "_heads", counted)
    with torch.no_grad():
        for token in _text(length=65).split(1, 1):
            memory = model(token, mems=memory).mems
    assert memory.length == 65
    assert all(count == 1 for count, is_position in rows if not is_position)
    tables = [count for count, is_position in rows if is_position and count > 1]
    assert tables == [65] * len(model.layer) + [131] * len(model.layer)  # twice as long when it no longer reaches


def _places(memory) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in (*memory.keys, *memory.values)}


@pytest.mark.parametrize("inference", [False, True])
def test_steps_write_into_a_buffer_and_copy_it_once_in_mem_len_steps(inference):
    model, steps, buffers = ours(attn_type="uni", mem_len=16), 64, set()
    memory = model.project_mems(batch=B)
    with torch.inference_mode() if inference else torch.no_grad():
        for token in _text(length=steps).split(1, 1):
            memory = model(token, mems=memory).mems
            buffers |= {(tuple(sorted(_places(memory))), memory.length)}
    assert memory.length == 16
    full = {places for places, length in buffers if length == 16}
    assert len(full) <= 1 + (steps - 16) // 16
    assert memory.keys[0].untyped_storage().nbytes() == 2 * memory.keys[0].nbytes


def test_a_memory_that_is_used_twice_stays_as_it_is():
    model = ours(attn_type="uni", mem_len=6)
    ids = _text(length=12)
    with torch.no_grad():
        memory = model(ids[:, :5], mems=model.project_mems(batch=B)).mems
        saved = [x.clone() for x in (*memory.keys, *memory.values)]
        branches = []
        for step in (ids[:, 5:7], ids[:, 7:9]):  # both go on from the same memory, the second one after the first
            first = model(step, mems=memory).mems
            branches.append((first, model(ids[:, 9:10], mems=first).last_hidden_state.clone()))
        for step, (first, found) in zip((ids[:, 5:7], ids[:, 7:9]), branches, strict=True):
            assert_same(model(ids[:, 9:10], mems=first).last_hidden_state, found)
            plain = model(step, mems=model(ids[:, :5], mems=None, use_mems=True).mems).mems
            assert_same(model(ids[:, 9:10], mems=plain).last_hidden_state, found)
    assert_same([*memory.keys, *memory.values], saved)
    assert _places(branches[0][0]).isdisjoint(_places(branches[1][0]))


@pytest.mark.parametrize("what", ["batch expanded", "values cloned", "keys cloned", "one layer", "a storage shared"])
def test_memory_that_was_replaced_is_copied(what):
    """Only what lies in a buffer as a step left it is written behind."""
    model, batch = ours(attn_type="uni", mem_len=6), 1 if what == "batch expanded" else B
    ids = _text(batch, 8)
    with torch.no_grad():
        memory = model(ids[:, :5], mems=model.project_mems(batch=batch)).mems
        keys, values = memory.keys, memory.values
        if what == "batch expanded":
            keys, values, ids = (
                [x.expand(B, -1, -1, -1) for x in keys],
                [x.expand(B, -1, -1, -1) for x in values],
                ids.expand(B, -1),
            )
        elif what == "values cloned":
            values = [x.clone() for x in values]
        elif what == "keys cloned":
            keys = [x.clone() for x in keys]
        elif what == "one layer":
            keys, values = [keys[0], keys[1].clone()], [values[0], values[1].clone()]
        else:
            values = keys
        changed = replace(memory, keys=keys, values=values)
        fresh = replace(changed, keys=[x.clone() for x in keys], values=[x.clone() for x in values], written=None)
        claimed = int(memory.written)
        found = wanted = None
        for step in (ids[:, 5:7], ids[:, 7:]):
            found = model(step, mems=changed if found is None else found.mems)
            wanted = model(step, mems=fresh if wanted is None else wanted.mems)
            assert_same(found.last_hidden_state, wanted.last_hidden_state)
    assert int(memory.written) == claimed


def test_two_threads_that_go_on_from_one_memory():
    """The second asks while the first has seen that there is room, and has not taken it yet."""
    model = ours(attn_type="uni", mem_len=6)
    with torch.no_grad():
        memory = model(_text(length=5), mems=model.project_mems(batch=B)).mems
        both = Barrier(2)

        class Slow(Tensor):  # both threads have read its number before either goes on, if they may
            def __int__(self):
                number = int(self.as_subclass(Tensor))
                try:
                    both.wait(0.2)
                except BrokenBarrierError:
                    pass
                return number

        slow = replace(memory, written=memory.written.as_subclass(Slow))

        def claim(_):
            with torch.no_grad():
                return Extension(slow, 1, 6, None)._in_place

        with ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(claim, range(2))) == [False, True]


def test_memory_of_inference_mode_goes_on_outside_of_it():
    model, ids = ours(attn_type="uni", mem_len=6), _text(length=9)
    with torch.inference_mode():
        memory = model(ids[:, :5], mems=model.project_mems(batch=B)).mems
        wanted = model(ids[:, 5:], mems=memory).last_hidden_state.clone()
    with torch.no_grad():
        assert_same(model(ids[:, 5:], mems=memory).last_hidden_state, wanted)


def test_steps_do_not_write_over_what_gradients_need():
    model, ids = ours(attn_type="uni", mem_len=6), _text(length=9)
    with torch.no_grad():
        memory = model(ids[:, :5], mems=model.project_mems(batch=B)).mems
    found = model(ids[:, 5:7], mems=memory)
    with torch.no_grad():
        after = model(ids[:, 5:7], mems=memory).mems
    assert _places(after) == _places(memory)
    parameter = model.layer[0].rel_attn.q
    gradient = torch.autograd.grad(found.last_hidden_state.sum(), parameter)[0]
    again = model(ids[:, 5:7], mems=memory).last_hidden_state.sum()
    assert_same(gradient, torch.autograd.grad(again, parameter)[0])


def test_longer_memory_than_in_training():
    """Trained with 4 positions, read with 64: the model sees further back and says what the full pass says."""
    lm = ours("XLNetLMHeadModel", attn_type="uni", mem_len=4, use_mems_train=True).train()
    ids = _text(length=64)
    mems = None
    for segment in ids[:, :16].split(8, 1):
        output = lm(segment, mems=mems, labels=segment)
        output.loss.backward()
        mems = output.mems
        assert mems[0].shape[0] == 4
    lm.eval()
    with torch.no_grad():
        wanted = lm(ids).logits[:, -8:]
        memory = plain = None
        for segment in ids.split(8, 1):
            output, short = lm(segment, mems=memory, mem_len=64), lm(segment, mems=plain)
            memory, plain = output.mems, short.mems
    assert memory[0].shape[0] == 64 and plain[0].shape[0] == 4
    assert_same(output.logits, wanted)
    assert (short.logits - wanted).abs().max() > 0.02


def test_memory_of_another_configuration_is_refused():
    model, ids = ours(), make_inputs()["input_ids"]
    good = make_mems(model)
    projected = model.project_mems(good)
    for mems, text in (
        (good[:1], "mems must hold one memory for each of the 2 layers, got 1"),
        ([x[:, :1] for x in good], r"mems\[0\] must be a tensor of shape \(5, 2, 32\), got shape \(5, 1, 32\)"),
        ([x[..., :16] for x in good], r"mems\[0\] must be a tensor of shape \(5, 2, 32\), got shape \(5, 2, 16\)"),
        ([good[0], good[1][:3]], r"mems\[1\] must be a tensor of shape \(5, 2, 32\), got shape \(3, 2, 32\)"),
        ([x.double() for x in good], r"mems\[0\] must be torch.float32 like the parameters, got torch.float64"),
        ([x.to("meta") for x in good], r"mems\[0\] must be on the model's device cpu, got meta"),
        ([None, None], "mems must be a list of tensors"),
        (good[0], "mems must be a list of tensors"),
        ([], "mems must hold one memory for each of the 2 layers, got 0"),
        (ours(n_layer=1).project_mems(batch=B), "mems must hold one memory for each of the 2 layers, got 1"),
        (
            ours(n_head=2).project_mems(good),
            r"mems\[0\] must be a tensor of shape \(2, 4, 5, 8\), got .* \(2, 2, 5, 16\)",
        ),
        (model.project_mems(batch=3), r"mems\[0\] must be a tensor of shape \(2, 4, 0, 8\), got shape \(3, 4, 0, 8\)"),
    ):
        with pytest.raises(ValueError, match=text):
            model(ids, mems=mems)
    with pytest.raises(ValueError, match="ProjectedMemory is for inference"):
        model.train()(ids, mems=projected)
