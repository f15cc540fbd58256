"""Folders in the public layout: both ways with transformers, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from transformers.models.xlnet import modeling_xlnet

import xlnet_kernels as xk
from tests.model.twins import SIZES, B, L, ours, theirs

HEADS = [
    "XLNetModel",
    "XLNetLMHeadModel",
    "XLNetForSequenceClassification",
    "XLNetForTokenClassification",
    "XLNetForMultipleChoice",
    "XLNetForQuestionAnsweringSimple",
    "XLNetForQuestionAnswering",
]


def _same_state(found, wanted) -> None:
    found, wanted = found.state_dict(), wanted.state_dict()
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert found[name].dtype == x.dtype and torch.equal(found[name], x), name


@pytest.mark.parametrize("name", HEADS)
def test_round_trip_with_transformers(name, tmp_path):
    options = dict(num_labels=2 if "Question" in name else 3, attn_type="uni", clamp_len=9, mem_len=None, reuse_len=4)
    model = theirs(name, **options)
    model.save_pretrained(tmp_path / "theirs")
    read = getattr(xk, name).from_pretrained(tmp_path / "theirs")
    _same_state(read, model)
    assert not read.training and all(p.requires_grad for p in read.parameters())
    read.save_pretrained(tmp_path / "ours")
    back = getattr(modeling_xlnet, name).from_pretrained(tmp_path / "ours")
    _same_state(back, model)
    for key, value in model.config.to_dict().items():
        if key not in ("_name_or_path", "transformers_version", "dtype"):
            assert getattr(back.config, key) == value, key
    _same_state(getattr(xk, name).from_pretrained(tmp_path / "ours"), read)
    assert sorted(os.listdir(tmp_path / "ours")) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "ours/config.json").read_text())["architectures"] == [name]


def test_old_layout_with_the_tied_weight_twice(tmp_path):
    """Public pytorch_model.bin files hold lm_loss.weight beside the embedding."""
    lm = ours("XLNetLMHeadModel")
    lm.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(lm.state_dict(), tmp_path / "pytorch_model.bin")
    read = xk.XLNetLMHeadModel.from_pretrained(tmp_path)
    _same_state(read, lm)
    assert read.lm_loss.weight is read.transformer.word_embedding.weight
    torch.save(lm.state_dict() | {"lm_loss.weight": torch.zeros(50, 32)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="lm_loss.weight is not transformer.word_embedding.weight"):
        xk.XLNetLMHeadModel.from_pretrained(tmp_path)


def test_untied_output_weight(tmp_path):
    model = theirs("XLNetLMHeadModel", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "theirs")
    read = xk.XLNetLMHeadModel.from_pretrained(tmp_path / "theirs")
    _same_state(read, model)
    assert not torch.equal(read.lm_loss.weight, read.transformer.word_embedding.weight)
    read.save_pretrained(tmp_path / "ours")
    _same_state(modeling_xlnet.XLNetLMHeadModel.from_pretrained(tmp_path / "ours"), model)


def test_shards(tmp_path):
    model = theirs("XLNetLMHeadModel")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    _same_state(xk.XLNetLMHeadModel.from_pretrained(tmp_path), model)
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match="model-0000"):
        xk.XLNetLMHeadModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_all_parameters(dtype, tmp_path):
    ours("XLNetLMHeadModel").save_pretrained(tmp_path)
    read = xk.XLNetLMHeadModel.from_pretrained(tmp_path, dtype=dtype)
    assert {p.dtype for p in read.parameters()} == {dtype}  # the bare ones of attention too
    read.save_pretrained(tmp_path)
    assert {p.dtype for p in xk.XLNetLMHeadModel.from_pretrained(tmp_path).parameters()} == {dtype}
    assert xk.XLNetLMHeadModel.from_pretrained(tmp_path, new_head=True).lm_loss.bias.dtype == dtype
    mixed = read.state_dict()
    mixed["transformer.mask_emb"] = mixed["transformer.mask_emb"].float()
    (tmp_path / "model.safetensors").unlink()
    torch.save(mixed, tmp_path / "pytorch_model.bin")
    assert {p.dtype for p in xk.XLNetLMHeadModel.from_pretrained(tmp_path).parameters()} == {torch.float32}


def test_backend_and_device(tmp_path):
    ours().save_pretrained(tmp_path)
    read = xk.XLNetModel.from_pretrained(str(tmp_path), backend="reference", device="meta")
    assert read.layer[1].rel_attn.backend == "reference" and read.mask_emb.device.type == "meta"


@pytest.mark.parametrize("name", HEADS[1:])
def test_encoder_of_any_model_and_new_heads_on_any(name, tmp_path):
    model, encoder = ours(name), ours()
    model.save_pretrained(tmp_path / "head")
    encoder.save_pretrained(tmp_path / "encoder")
    _same_state(xk.XLNetModel.from_pretrained(tmp_path / "head"), model.transformer)
    with pytest.raises(ValueError, match="missing: .*new_head=True starts with a new head"):
        getattr(xk, name).from_pretrained(tmp_path / "encoder")
    for folder, wanted in (("encoder", encoder), ("head", model.transformer)):
        read = getattr(xk, name).from_pretrained(tmp_path / folder, new_head=True)
        _same_state(read.transformer, wanted)
        for key, parameter in read.named_parameters():
            assert parameter.isfinite().all() and parameter.device.type == "cpu"
            if key.endswith("bias"):
                assert key.startswith("transformer") or (parameter == 0).all()
    ids = torch.randint(50, (B, 2, L) if "Multiple" in name else (B, L))
    assert read(ids).loss is None


def test_fine_tuning_of_a_language_model(tmp_path):
    lm = ours("XLNetLMHeadModel")
    lm.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="missing: logits_proj.bias.* unexpected: lm_loss.bias. new_head=True starts"):
        xk.XLNetForSequenceClassification.from_pretrained(tmp_path)
    config = xk.XLNetConfig.from_file(tmp_path)
    config.num_labels = 7
    read = xk.XLNetForSequenceClassification.from_pretrained(tmp_path, config=config, new_head=True)
    assert read(torch.zeros(B, L).long()).logits.shape == (B, 7)
    _same_state(read.transformer, lm.transformer)


@pytest.fixture
def folder(tmp_path) -> Path:
    ours("XLNetLMHeadModel").save_pretrained(tmp_path)
    return tmp_path


def _change(folder: Path, **config) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def test_mismatched_files_are_refused_by_name(folder):
    state = safetensors.torch.load_file(folder / "model.safetensors")
    other = dict(state)
    del other["transformer.layer.1.ff.layer_1.bias"]
    other["transformer.layer.0.extra"] = torch.zeros(1)
    other["transformer.mask_emb"] = torch.zeros(32)
    other["lm_loss.bias"] = torch.zeros(50, dtype=torch.int64)
    safetensors.torch.save_file(other, folder / "model.safetensors")
    with pytest.raises(ValueError) as error:
        xk.XLNetLMHeadModel.from_pretrained(folder)
    for text in (
        "missing: transformer.layer.1.ff.layer_1.bias;",
        "unexpected: transformer.layer.0.extra;",
        "wrong: lm_loss.bias of torch.int64 instead of float16, bfloat16, float32 or float64, "
        "transformer.mask_emb (32,) instead of (1, 1, 32)",
    ):
        assert text in str(error.value)
    safetensors.torch.save_file(state, folder / "model.safetensors")
    _change(folder, n_layer=40)
    with pytest.raises(ValueError, match="of this config: wrong: 2 layers instead of 40$"):
        xk.XLNetLMHeadModel.from_pretrained(folder)
    _change(folder, n_layer=2, d_model=64)
    with pytest.raises(ValueError, match=r"wrong: .*\(4|32.* instead of"):
        xk.XLNetModel.from_pretrained(folder)


def test_foreign_files_are_refused(folder):
    foreign = {"bert.embeddings.weight": torch.zeros(3), "classifier.weight": torch.zeros(2, 32)}
    safetensors.torch.save_file(foreign, folder / "model.safetensors")
    for name in ("XLNetModel", "XLNetLMHeadModel"):
        with pytest.raises(ValueError, match="missing: .*unexpected: bert.embeddings.weight"):
            getattr(xk, name).from_pretrained(folder)
    _change(folder, model_type="bert")
    with pytest.raises(ValueError, match="config.json: config must be .* model_type \"xlnet\", got 'bert'"):
        xk.XLNetModel.from_pretrained(folder)


@pytest.mark.parametrize("kept", [0, 5, 500, -1])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_truncated_files_are_refused(name, kept, folder):
    path = folder / name
    if name != "model.safetensors":
        torch.save(xk.XLNetLMHeadModel.from_pretrained(folder).state_dict(), path)
        (folder / "model.safetensors").unlink()
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"{name} is damaged or no checkpoint"):
        xk.XLNetLMHeadModel.from_pretrained(folder)


def test_code_in_a_file_does_not_run(folder):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(folder / "ran"),)

    (folder / "model.safetensors").unlink()
    torch.save({"transformer.mask_emb": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin is damaged or no checkpoint"):
        xk.XLNetLMHeadModel.from_pretrained(folder)
    assert not (folder / "ran").exists()
    for content in ([torch.zeros(2)], {"state": {"x": torch.zeros(2)}}):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match="pytorch_model.bin must hold tensors by name"):
            xk.XLNetLMHeadModel.from_pretrained(folder)


def test_missing_files(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors nor .* nor pytorch_model.bin"):
        xk.XLNetModel.from_pretrained(folder)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match="config.json"):
        xk.XLNetModel.from_pretrained(folder)


def test_a_failed_save_leaves_the_old_file(folder, monkeypatch):
    before = (folder / "model.safetensors").read_bytes()

    def fail(state, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        ours("XLNetLMHeadModel").save_pretrained(folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


# config.json

PUBLIC = {  # what the published base model's file holds
    "architectures": ["XLNetLMHeadModel"],
    "attn_type": "bi",
    "bi_data": False,
    "bos_token_id": 1,
    "clamp_len": -1,
    "d_head": 64,
    "d_inner": 3072,
    "d_model": 768,
    "dropout": 0.1,
    "end_n_top": 5,
    "eos_token_id": 2,
    "ff_activation": "gelu",
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "mem_len": None,
    "model_type": "xlnet",
    "n_head": 12,
    "n_layer": 12,
    "pad_token_id": 5,
    "reuse_len": None,
    "same_length": False,
    "start_n_top": 5,
    "summary_activation": "tanh",
    "summary_last_dropout": 0.1,
    "summary_type": "last",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 250}},
    "untie_r": True,
    "vocab_size": 32000,
}


def test_public_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC))
    config = xk.XLNetConfig.from_file(tmp_path)
    assert (config.d_model, config.n_layer, config.mem_len, config.d_head) == (768, 12, None, 64)
    written = config.to_dict()
    assert {name: written[name] for name in PUBLIC} == PUBLIC
    assert xk.XLNetConfig.from_dict(written) == config == xk.XLNetConfig.from_file(tmp_path / "config.json")


def test_config_defaults_are_those_of_transformers():
    wanted = transformers.XLNetConfig()
    for name, value in xk.XLNetConfig().to_dict().items():
        if name not in ("id2label", "label2id"):
            assert getattr(wanted, name, value) == value, name


def test_config_of_old_names_and_named_labels():
    labels = {"0": "good", "1": "bad", "2": "ugly"}
    config = xk.XLNetConfig.from_dict({"n_token": 9, "hidden_size": 8, "num_attention_heads": 2, "id2label": labels})
    assert (config.vocab_size, config.d_model, config.n_head, config.num_labels) == (9, 8, 2, 3)
    assert config.to_dict()["id2label"] == labels
    config = xk.XLNetConfig(**SIZES, num_labels=4)
    assert transformers.XLNetConfig.from_dict(config.to_dict()).num_labels == 4
    assert xk.XLNetConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(n_layer=0), "n_layer must be an integer of at least 1, got 0"),
        (dict(mem_len=-1), "mem_len must be None or an integer of at least 0, got -1"),
        (dict(d_model=33), r"d_head must be given where d_model \(33\) is no multiple of n_head \(4\)"),
        (dict(d_model=33, d_head=8), "d_model must be even for sinusoidal positions, got 33"),
        (dict(dropout=1.0), r"dropout must be in \[0, 1\), got 1.0"),
        (dict(attn_type="tri"), "attn_type must be one of 'bi', 'uni', got 'tri'"),
        (dict(ff_activation="softmax"), "ff_activation must be one of 'gelu', .* got 'softmax'"),
        (dict(summary_type="attn"), "summary_type must be one of 'last', 'first', 'mean', got 'attn'"),
        (dict(problem_type="hard"), "problem_type must be one of .* got 'hard'"),
        (dict(untie_r=False), "untie_r must be true"),
        (dict(vocab_size=2**31), "vocab_size must be an integer of at most 2147483647, got 2147483648"),
        (dict(d_inner=True), "d_inner must be an integer of at least 1, got True"),
        (dict(n_head=4.0), "n_head must be an integer of at least 1, got 4.0"),
        (dict(d_head="8"), "d_head must be an integer of at least 1, got '8'"),
        (dict(reuse_len=2**31), "reuse_len must be None or an integer of at most 2147483647"),
        (dict(clamp_len=None), "clamp_len must be an integer of at least -1, got None"),
        (dict(clamp_len=-2), "clamp_len must be an integer of at least -1, got -2"),
        (dict(pad_token_id="5"), "pad_token_id must be None or an integer of at least -1, got '5'"),
        (dict(bos_token_id=1.5), "bos_token_id must be None or an integer of at least -1, got 1.5"),
        (dict(eos_token_id={}), "eos_token_id must be None or an integer of at least -1, got {}"),
        (dict(eos_token_id=[1, "2"]), r"eos_token_id must be None or one or several integers .* got \[1, '2'\]"),
        (dict(layer_norm_eps="1e-12"), "layer_norm_eps must be a finite number above 0, got '1e-12'"),
        (dict(layer_norm_eps=0), "layer_norm_eps must be a finite number above 0, got 0"),
        (dict(layer_norm_eps=float("nan")), "layer_norm_eps must be a finite number above 0, got nan"),
        (dict(initializer_range=float("inf")), "initializer_range must be a finite number of at least 0, got inf"),
        (dict(initializer_range=10**400), "initializer_range must be a finite number .* got 1000"),
        (dict(initializer_range=None), "initializer_range must be a finite number of at least 0, got None"),
        (dict(dropout=False), r"dropout must be in \[0, 1\), got False"),
        (dict(summary_last_dropout="0"), r"summary_last_dropout must be in \[0, 1\), got '0'"),
        (dict(same_length="yes"), "same_length must be true or false, got 'yes'"),
        (dict(tie_word_embeddings=1), "tie_word_embeddings must be true or false, got 1"),
        (dict(output_attentions=None), "output_attentions must be true or false, got None"),
        (dict(summary_activation=["tanh"]), r"summary_activation must be one of .* got \['tanh'\]"),
        (dict(id2label=3), "id2label must be a dictionary of names by number, got 3"),
        (dict(id2label={"good": 0}), "id2label must be a dictionary of names by number, got {'good': 0}"),
        (dict(id2label={"0": [1]}), r"id2label must be a dictionary of names by number, got {'0': \[1\]}"),
        (dict(label2id=["a"]), r"label2id must be a dictionary of numbers by name, got \['a'\]"),
        (dict(hidden_size=64), "hidden_size and d_model must agree, got 64 and 32"),
        (dict(vocab_size=[0] * 10**6), r"vocab_size must be an integer .* got \[0, 0, 0, 0, 0, 0, \.\.\.\]$"),
    ],
)
def test_impossible_configs_are_refused(change, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        xk.XLNetConfig.from_dict(SIZES | change)
    (tmp_path / "config.json").write_text(json.dumps(SIZES | change))
    with pytest.raises(ValueError, match=f"config.json: {text}"):
        xk.XLNetConfig.from_file(tmp_path)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(xk.XLNetConfig)])
def test_every_field_of_a_config_is_checked(name):
    for value in ([None], {1: 2}, "?", -7, math.nan, 2**31, b"", object()):
        if name in ("layer_norm_eps", "initializer_range") and value == 2**31:
            continue  # a finite number
        with pytest.raises(ValueError, match=f"^{name} must be"):
            xk.XLNetConfig(**{name: value})


def test_numbers_of_numpy_are_taken(tmp_path):
    config = xk.XLNetConfig(np.int64(50), np.int32(32), dropout=np.float32(0.5), eos_token_id=[np.int64(3)])
    assert type(config.vocab_size) is type(config.d_model) is int and type(config.dropout) is float
    config.save(tmp_path)
    assert xk.XLNetConfig.from_file(tmp_path) == config


def test_config_files_that_are_none(tmp_path):
    path = tmp_path / "config.json"
    for text in ("", '{"d_model": 32', "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="config.json: "):
            xk.XLNetConfig.from_file(path)
    with pytest.raises(ValueError, match="config must be an XLNetConfig, or .* got builtins.dict"):
        xk.XLNetModel(PUBLIC)
