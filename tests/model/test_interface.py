"""The interface that Trainer, PEFT, pipelines and ported scripts use beside calls."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

import xlnet_kernels as xk
from tests.model.twins import SIZES, B, L, M, N, assert_same, make_inputs, ours, theirs, twins

NAMES = ("XLNetModel", "XLNetLMHeadModel", "XLNetForSequenceClassification", "XLNetForQuestionAnswering")


@pytest.mark.parametrize("name", NAMES)
def test_questions_have_the_answers_of_transformers(name):
    wanted, found = twins(name)
    assert found.device == torch.device("cpu") and found.dtype == torch.float32
    assert copy.deepcopy(found).to(torch.bfloat16).dtype == torch.bfloat16
    for options in ({}, dict(exclude_embeddings=True), dict(only_trainable=True)):
        assert found.num_parameters(**options) == wanted.num_parameters(**options)
    for model in (wanted, found):
        model.get_input_embeddings().weight.requires_grad_(False)
    assert found.num_parameters(only_trainable=True) == wanted.num_parameters(only_trainable=True)
    assert found.base_model_prefix == wanted.base_model_prefix
    assert found.base_model is (found if name == "XLNetModel" else found.transformer)
    assert found.can_generate() == type(found).can_generate() == wanted.can_generate()
    assert (found.get_output_embeddings() is None) == (wanted.get_output_embeddings() is None)
    assert found.name_or_path == wanted.name_or_path == "" and found.main_input_name == wanted.main_input_name
    for field in ("hidden_size", "num_attention_heads", "num_hidden_layers", "model_type", "id2label", "label2id"):
        assert getattr(found.config, field) == getattr(wanted.config, field)
    assert found.config.get_text_config() is found.config and not hasattr(found.config, "nothing")
    assert copy.deepcopy(found.config) == found.config


def test_embeddings_can_be_set():
    model = ours("XLNetLMHeadModel")
    table, head = nn.Embedding(50, 32), nn.Linear(32, 50)
    model.set_input_embeddings(table)
    model.set_output_embeddings(head)
    assert model.transformer.word_embedding is model.get_input_embeddings() is table
    assert model.lm_loss is model.get_output_embeddings() is head and head.weight is not table.weight
    model.tie_weights()
    assert head.weight is table.weight
    with pytest.raises(ValueError, match="XLNetModel scores no tokens"):
        model.transformer.set_output_embeddings(head)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("size", [57, 41])
def test_vocabularies_of_another_size(size, tie):
    model, new = twins("XLNetLMHeadModel", tie_word_embeddings=tie)
    ids = torch.randint(40, (B, L))
    before = new(ids, labels=ids)
    model.resize_token_embeddings(size)
    table = new.resize_token_embeddings(size)
    assert table is new.get_input_embeddings() and table.num_embeddings == new.config.vocab_size == size
    assert new.transformer.config.vocab_size == size and (new.lm_loss.weight is table.weight) == tie
    after = new(ids, labels=ids)
    kept = min(size, 50)
    assert_same(after.logits[..., :kept], before.logits[..., :kept])
    if size > 50:  # transformers adds a little noise to the mean
        assert_same(table.weight, model.get_input_embeddings().weight, 0.02)
        assert_same(new.lm_loss.weight, model.lm_loss.weight, 0.02)
        if not tie:  # of tied weights it leaves the new biases zero
            assert_same(new.lm_loss.bias, model.lm_loss.bias, 0.02)
    after.loss.backward()
    assert table.weight.grad.shape == (size, 32)
    assert new(torch.full((1, 2), size - 1)).logits.shape == (1, 2, size)
    with pytest.raises(ValueError, match="input_ids must lie in"):
        new(torch.full((1, 2), size))


def test_vocabularies_of_a_multiple():
    model = ours("XLNetForTokenClassification")
    model.get_input_embeddings().weight.requires_grad_(False)
    assert model.resize_token_embeddings(pad_to_multiple_of=16).weight.shape == (64, 32)
    assert model.resize_token_embeddings(65, 16, mean_resizing=False).weight.shape == (80, 32)
    new = model.get_input_embeddings().weight[64:]
    assert not new.requires_grad and 0.01 < new.std() < 0.03
    for wrong in (0, 2.5, True):
        with pytest.raises(ValueError, match="new_num_tokens must be an integer of at least 1"):
            model.resize_token_embeddings(wrong)
    with pytest.raises(ValueError, match="pad_to_multiple_of must be"):
        model.resize_token_embeddings(60, pad_to_multiple_of=1.3)


def test_checkpointing_of_frozen_models():
    """Adapters behind a frozen embedding get gradients although layers are computed again."""
    model = ours("XLNetLMHeadModel", tie_word_embeddings=False).train().requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.is_gradient_checkpointing and model.is_activation_checkpointing
    ids = torch.randint(50, (B, L))
    assert not model(ids).logits.requires_grad
    model.enable_input_require_grads()
    model.enable_input_require_grads()
    assert model(ids).logits.requires_grad
    model.disable_input_require_grads()
    model.disable_input_require_grads()
    assert not model(ids).logits.requires_grad
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("name", NAMES)
def test_configurations_of_transformers_are_converted(name):
    options = dict(SIZES, num_labels=3, mem_len=M, reuse_len=4, clamp_len=3, summary_type="mean", pad_token_id=7)
    model = getattr(xk, name)(transformers.XLNetConfig(**options))
    assert type(model.config) is xk.XLNetConfig
    for field, value in options.items():
        assert getattr(model.config, field) == value
    assert name == "XLNetModel" or model.transformer.config is model.config
    wanted = theirs(name, **dict(options, dropout=0.0))
    model.load_state_dict(wanted.state_dict())
    ids = torch.randint(50, (B, L))
    assert_same(model.eval()(ids, use_mems=True).mems, wanted(ids, use_mems=True).mems)
    with pytest.raises(ValueError, match="or transformers' of an XLNet, got transformers.*BertConfig"):
        getattr(xk, name)(transformers.BertConfig())


def test_loading_tells_what_was_in_the_file(tmp_path):
    theirs("XLNetLMHeadModel").save_pretrained(tmp_path)
    model, info = xk.XLNetLMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and model.name_or_path == str(tmp_path)
    assert not any(xk.XLNetModel.from_pretrained(tmp_path, output_loading_info=True)[1]["missing_keys"])
    model, info = xk.XLNetForSequenceClassification.from_pretrained(
        tmp_path, new_head=True, output_loading_info=True, dtype="bfloat16", num_labels=4
    )
    wanted = transformers.XLNetForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True, num_labels=4
    )[1]
    assert info["missing_keys"] == wanted["missing_keys"] and info["unexpected_keys"] == wanted["unexpected_keys"]
    assert not info["mismatched_keys"] and not info["error_msgs"]
    assert model.dtype == torch.bfloat16 and model.logits_proj.out_features == model.config.num_labels == 4
    assert xk.XLNetModel.from_pretrained(tmp_path, torch_dtype=torch.float64).dtype == torch.float64
    assert xk.XLNetModel.from_pretrained(tmp_path, dtype="auto").dtype == torch.float32
    assert xk.XLNetModel.from_pretrained(tmp_path, config=transformers.XLNetConfig(**SIZES)).config.n_layer == 2
    with pytest.raises(ValueError, match="dtype must be a torch.dtype, its name"):
        xk.XLNetModel.from_pretrained(tmp_path, dtype="float33")
    with pytest.raises(TypeError, match="nothing"):
        xk.XLNetModel.from_pretrained(tmp_path, nothing=3)


@pytest.mark.parametrize("past", [0, M])
@pytest.mark.parametrize("extra", [1, 3])
def test_mappings_wider_than_the_text_count_from_the_end(extra, past):
    """transformers computes a row for each column; its relative shift aligns the last one with the last token."""
    model, found = twins("XLNetModel")
    inputs = make_inputs()
    mapping = torch.cat([torch.zeros(B, N, extra), inputs["target_mapping"]], 2)
    given = dict(input_ids=inputs["input_ids"], mems=[torch.randn(past, B, 32) for _ in range(2)] if past else None)
    wanted = model(**given, target_mapping=mapping).last_hidden_state
    assert_same(found(**given, target_mapping=mapping).last_hidden_state, wanted)
    assert_same(found(**given, target_mapping=mapping, output_attentions=True).last_hidden_state, wanted)
    assert_same(found(**given, target_mapping=mapping[..., extra:]).last_hidden_state, wanted)
    mapping[0, 0, 0] = 1
    with pytest.raises(ValueError, match=f"target_mapping has {L + extra} columns for {L} tokens"):
        found(**given, target_mapping=mapping)
