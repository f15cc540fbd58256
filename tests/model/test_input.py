"""Errors name the model's wrong arguments."""

from __future__ import annotations

import pytest
import torch

import xlnet_kernels as xk
from tests.model.twins import B, L, N, make_inputs, make_mems, ours


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(input_ids=None), "give either input_ids or inputs_embeds, got neither"),
        (dict(inputs_embeds=torch.zeros(B, L, 32)), "give either input_ids or inputs_embeds, got both"),
        (
            dict(input_ids=torch.zeros(L).long()),
            r"input_ids must be a .* \(batch, length\), got shape \(7,\)",
        ),
        (dict(input_ids=[[1, 2]]), r"input_ids must be a tensor of shape \(batch, length\), got list"),
        (dict(input_ids=torch.zeros(B, L)), "input_ids must hold integers, got torch.float32"),
        (dict(input_ids=torch.full((B, L), 50)), r"input_ids must lie in \[0, 50\), got values from 50 to 50"),
        (dict(input_ids=torch.full((B, L), -1)), r"input_ids must lie in \[0, 50\), got values from -1 to -1"),
        (
            dict(input_ids=torch.zeros(B, L, device="meta").long()),
            "input_ids must be on the model's device cpu, got meta",
        ),
        (
            dict(input_ids=None, inputs_embeds=torch.zeros(B, L)),
            r"inputs_embeds must be a tensor of shape \(batch, length, 32\), got shape \(2, 7\)",
        ),
        (
            dict(input_ids=None, inputs_embeds=torch.zeros(B, L, 8)),
            r"inputs_embeds must be .* \(batch, length, 32\), got .* 8\)",
        ),
        (
            dict(input_ids=None, inputs_embeds=torch.zeros(B, L, 32).double()),
            "inputs_embeds must be torch.float32 like the parameters, got torch.float64",
        ),
        (
            dict(attention_mask=torch.ones(B, L + 1)),
            r"attention_mask must be a tensor of shape \(2, 7\), got .* \(2, 8\)",
        ),
        (dict(input_mask=torch.ones(B, L)), "attention_mask .* and input_mask .* are one thing: give one of them"),
        (dict(token_type_ids=torch.zeros(B, 3).long()), r"token_type_ids must be a tensor of shape \(2, 7\), got"),
        (dict(token_type_ids=torch.zeros(B, L)), "token_type_ids must hold integers"),
        (dict(perm_mask=torch.zeros(B, L)), r"perm_mask must be a tensor of shape \(2, 7, 7\), got shape \(2, 7\)"),
        (dict(mask=xk.RankMask.full(B, L)), "mask and perm_mask are one thing: give one of them"),
        (dict(perm_mask=None, mask=torch.ones(B, L, L).bool()), "mask must be a RankMask .* got Tensor"),
        (
            dict(perm_mask=None, mask=xk.RankMask.full(B, 3)),
            r"mask must have query_rank \(2, 7\) and key_rank \(2, 7\)",
        ),
        (dict(target_mapping=torch.zeros(B, N, 3)), r"target_mapping must be a tensor of shape \(2, targets, 7\), got"),
        (
            dict(target_mapping=torch.zeros(N)),
            r"target_mapping must be a tensor of shape \(2, targets, 7\), got shape \(3,\)",
        ),
        (dict(target_positions=torch.zeros(B, N).long()), "target_mapping and target_positions are one thing"),
        (
            dict(target_mapping=None, target_positions=torch.full((B, N), L)),
            r"target_positions must lie in \[0, 7\), got",
        ),
        (dict(target_mapping=None, target_positions=torch.zeros(B, N)), "target_positions must hold integers"),
        (dict(target_mapping=None, target_positions=torch.zeros(3, N).long()), "target_positions must be a tensor of"),
        (dict(output_rows=torch.zeros(3, 1).long()), r"output_rows must be .* \(2, rows\), got .* \(3, 1\)"),
        (dict(output_rows=torch.zeros(B, 1)), "output_rows must hold integers, got torch.float32"),
        (dict(output_rows=-1), r"output_rows must be a tensor of shape \(2, rows\), got int"),
        (dict(output_rows=torch.tensor([[N]])), r"output_rows must lie in \[-3, 3\), got values from 3 to 3"),
        (dict(output_rows=torch.tensor([[-N - 1]])), r"output_rows must lie in \[-3, 3\), got values from -4 to -4"),
        (dict(mem_len=-1), "mem_len must be an integer of at least 0, or None for the configuration's, got -1"),
        (dict(reuse_len=2.0), "reuse_len must be an integer of at least 0, or None for the configuration's, got 2.0"),
    ],
)
def test_bad_input_is_named(change, text):
    for model in (ours(), ours(attn_type="uni", same_length=True)):
        with pytest.raises(ValueError, match=text):
            model(**make_inputs() | change)


def test_unknown_arguments_are_errors():
    ids = make_inputs()["input_ids"]
    for name in ("XLNetModel", "XLNetLMHeadModel", "XLNetForQuestionAnswering"):
        with pytest.raises(TypeError, match="unexpected keyword argument 'use_cache'"):
            ours(name)(ids, use_cache=True)


def test_odd_batches_of_both_directions():
    with pytest.raises(ValueError, match="bi_data needs an even batch .* got 3"):
        ours(bi_data=True)(torch.zeros(3, L).long())


def test_a_refused_call_changes_nothing():
    model, inputs = ours(), make_inputs()
    mems = make_mems(model)
    wanted = model(**inputs, mems=mems).last_hidden_state
    with pytest.raises(ValueError, match="target_mapping"):
        model(**inputs | dict(target_mapping=torch.zeros(1)), mems=mems)
    assert torch.equal(model(**inputs, mems=mems).last_hidden_state, wanted)


@pytest.mark.parametrize("options", [{}, dict(attn_type="uni"), dict(attn_type="uni", same_length=True)], ids=str)
def test_without_mask_no_target_is_seen_by_its_query_row(options):
    model, targets = ours(**options), torch.tensor([[1, 4, 6], [2, 3, 5]])
    ids, mems = make_inputs()["input_ids"], make_mems(model)
    embedded = model.word_embedding(ids).detach().requires_grad_()
    given = dict(inputs_embeds=embedded, attention_mask=torch.ones(B, L), mems=mems)
    out = model(**given, target_positions=targets).last_hidden_state
    for b in range(B):
        for n in range(N):
            (gradient,) = torch.autograd.grad(out[b, n].square().sum(), embedded, retain_graph=True)
            assert (gradient[b, targets[b, n]] == 0).all() and gradient[b].abs().sum() > 0


@pytest.mark.parametrize(("mems", "got"), [
    (torch.zeros(B, 3, 32), r"Tensor of shape \(\d, 3, 32\)"),
    ([torch.zeros(3, 32)], r"a list with Tensor of shape \(3, 32\)"),
    ("memory", "'memory'"),
])  # fmt: skip
def test_memory_of_another_kind_is_named(mems, got):
    with pytest.raises(ValueError, match=f"mems must be a list of tensors .*, got ({got})"):
        ours()(make_inputs()["input_ids"], mems=mems)


@pytest.mark.parametrize("added", [-1e9, -torch.inf, torch.nan, 2])
def test_attention_masks_of_another_sense_are_named(added):
    """Such as those that other models add to scores, where 0 shows."""
    for name in ("attention_mask", "input_mask"):
        mask = torch.zeros(B, L)
        mask[0, 0] = added
        with pytest.raises(ValueError, match=f"{name} must hold 1 for .* and 0 for .*: a mask that is added to scores"):
            ours()(make_inputs()["input_ids"], **{name: mask})
