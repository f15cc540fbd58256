"""Folders that are damaged, hostile or changed after loading: one sentence that names the file, and no other harm."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

import xlnet_kernels as xk
from tests.model.twins import ours
from xlnet_kernels.model import weights

CONFIG, SAFE, INDEX, BIN = "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
NAME = "transformer.mask_emb"


@pytest.fixture
def folder(tmp_path) -> Path:
    ours("XLNetLMHeadModel").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def alarm():
    """Ends a test that hangs."""

    def ring(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def load(folder: Path):
    return xk.XLNetLMHeadModel.from_pretrained(folder)


def as_pickle(folder: Path, **change) -> None:
    torch.save(safetensors.torch.load_file(folder / SAFE) | change, folder / BIN)
    (folder / SAFE).unlink()


def as_shards(folder: Path) -> dict[str, str]:
    """Two shards; returns the weight map, which is still to be written."""
    state = safetensors.torch.load_file(folder / SAFE)
    (folder / SAFE).unlink()
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, its in shards.items():
        safetensors.torch.save_file({name: state[name] for name in its}, folder / shard)
    return {name: shard for shard, its in shards.items() for name in its}


@pytest.mark.parametrize("layout", ["whole", "shards", "pickle"])
def test_a_loaded_model_does_not_follow_its_files(layout, folder):
    if layout == "shards":
        (folder / INDEX).write_text(json.dumps({"weight_map": as_shards(folder)}))
    elif layout == "pickle":
        as_pickle(folder)
    model = load(folder)
    wanted = {name: x.clone() for name, x in model.state_dict().items()}
    for path in folder.iterdir():
        with open(path, "r+b") as file:  # in place: the same inode
            file.write(bytes(path.stat().st_size))
    assert all(torch.equal(x, wanted[name]) for name, x in model.state_dict().items())
    for path in folder.iterdir():
        os.truncate(path, 0)  # a mapped page is then SIGBUS
    assert all(torch.equal(x, wanted[name]) for name, x in model.state_dict().items())


# model.safetensors.index.json


@pytest.mark.parametrize("content", [[], [["weight_map"]], 3, "weight_map", None, True, {}, {"metadata": {}}])
def test_an_index_of_another_type_is_refused(content, folder):
    (folder / SAFE).unlink()
    (folder / INDEX).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r'index.json must hold {"weight_map": {tensor: file, ...}}, got '):
        load(folder)


@pytest.mark.parametrize("names", [[SAFE], SAFE, 1, None, {NAME: 1}, {NAME: None}, {NAME: [SAFE]}, {NAME: {}}])
def test_a_weight_map_of_another_type_is_refused(names, folder):
    (folder / SAFE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ValueError, match=r'index.json must hold {"weight_map": {tensor: file, ...}}, got '):
        load(folder)


@pytest.mark.parametrize("shard", ["", ".", "..", "../a", "/etc/passwd", "sub/a.safetensors", "a\0", "\ud800", "./a"])
def test_shards_elsewhere_are_refused(shard, folder):
    as_shards(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {NAME: shard}}))
    with pytest.raises(ValueError, match="index.json must name files of its own folder, got "):
        load(folder)


def test_an_index_that_its_shards_contradict_is_refused(folder):
    names = as_shards(folder)
    for change in ({NAME: "a.safetensors"}, {NAME: "b.safetensors"}, {"more": "a.safetensors"}):
        if change.items() <= names.items():
            continue
        (folder / INDEX).write_text(json.dumps({"weight_map": names | change}))
        with pytest.raises(ValueError, match=rf"disagree on where these tensors are: {next(iter(change))}"):
            load(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "missing.safetensors")}))
    with pytest.raises(FileNotFoundError, match="missing.safetensors"):
        load(folder)


# pytorch_model.bin


@pytest.mark.parametrize(
    "tensor, text",
    [
        (lambda x: x.to_sparse(), "must be a strided tensor with values, got one that is Tensor, torch.sparse_coo"),
        (lambda x: x.to("meta"), "must be a strided tensor with values, got one that is on the meta device"),
        (lambda x: torch.nested.nested_tensor([x, x]), "must be a strided tensor with values, got one that is nested"),
        (lambda x: x.to(torch.float8_e4m3fn), "mask_emb of torch.float8_e4m3fn instead of float16, bfloat16, float32"),
        (lambda x: x.to(torch.complex64), "mask_emb of torch.complex64 instead of float16"),
        (lambda x: x.to(torch.int8), "mask_emb of torch.int8 instead of float16"),
        (lambda x: x[:1, :1, :1].expand(1 << 40, 1, 32), r"mask_emb \(1099511627776, 1, 32\) instead of \(1, 1, 32\)"),
    ],
    ids=["sparse", "meta", "nested", "float8", "complex", "int8", "expanded"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:TypedStorage is deprecated")
def test_tensors_that_are_no_parameters_are_refused(tensor, text, folder):
    as_pickle(folder, **{NAME: tensor(torch.ones(1, 1, 32))})
    with pytest.raises(ValueError, match=rf"pytorch_model.bin.*{text}"):
        load(folder)


def test_a_tied_weight_of_another_dtype_is_refused(folder):
    as_pickle(folder)
    state = torch.load(folder / BIN)
    embedding = state["transformer.word_embedding.weight"]
    for output in (embedding.half(), embedding.to(torch.float8_e4m3fn)):
        torch.save(state | {"lm_loss.weight": output}, folder / BIN)
        with pytest.raises(ValueError, match="lm_loss.weight is not transformer.word_embedding.weight"):
            load(folder)
    both = embedding.to(torch.float8_e4m3fn)
    torch.save(state | {"lm_loss.weight": both, "transformer.word_embedding.weight": both}, folder / BIN)
    with pytest.raises(ValueError, match="word_embedding.weight of torch.float8_e4m3fn instead of float16"):
        load(folder)


def test_names_that_are_no_strings_are_refused(folder):
    as_pickle(folder)
    torch.save({1: torch.zeros(3), "x": torch.zeros(3)}, folder / BIN)
    with pytest.raises(ValueError, match=r"pytorch_model.bin must hold tensors by name, got \[1, 'x'\] as names"):
        load(folder)


def test_layers_that_share_storage_in_the_file_do_not_share_parameters(folder):
    state = safetensors.torch.load_file(folder / SAFE)
    first, second = (f"transformer.layer.{layer}.ff.layer_1.weight" for layer in (0, 1))
    both = torch.randn(2, *state[first].shape)
    turned = f"{first[:-14]}layer_2.weight"
    change = {
        first: both[0],
        second: both[0],
        NAME: torch.ones(1, 1, 1).expand(1, 1, 32),
        turned: state[turned].t().contiguous().t(),
        "transformer.layer.0.ff.layer_2.bias": torch.nn.Parameter(torch.zeros(32), requires_grad=False),
    }
    as_pickle(folder, **change)
    model = load(folder)
    for name, x in model.state_dict().items():
        assert torch.equal(x, change.get(name, state.get(name, x)))
    for x in {id(x): x for x in model.parameters()}.values():
        assert x.requires_grad and x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    layers = model.transformer.layer
    with torch.no_grad():
        layers[0].ff.layer_1.weight.zero_()
    assert torch.equal(layers[1].ff.layer_1.weight, both[0])


# any file


@pytest.mark.parametrize("name", [CONFIG, SAFE, INDEX, BIN])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_refused(kind, name, folder, alarm):
    path = folder / name
    for other in {path, folder / SAFE} if name != CONFIG else {path}:
        other.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(ValueError, match=rf"{name} must be a file, got a (named )?{kind}"):
        load(folder)


@pytest.mark.parametrize("name", [CONFIG, INDEX, SAFE])
@pytest.mark.parametrize("deep", [b"[" * 100_000, b'{"dtype":' * 100_000])
def test_deeply_nested_json_is_refused(name, deep, folder):
    if name == INDEX:
        (folder / SAFE).unlink()
    (folder / name).write_bytes(len(deep).to_bytes(8, "little") + deep if name == SAFE else deep)
    with pytest.raises(ValueError, match=rf"{name}: it must be JSON, got: maximum recursion"):
        load(folder)


def test_a_broken_link_is_named(folder):
    (folder / SAFE).unlink()
    (folder / SAFE).symlink_to("nothing")
    with pytest.raises(FileNotFoundError, match=SAFE):
        load(folder)


@pytest.mark.parametrize(
    "name", ["n_layer", "vocab_size", "d_head", "d_inner", "n_head", "d_model", "num_labels", "start_n_top"]
)
def test_sizes_beyond_the_file_are_refused_and_not_built(name, folder, alarm):
    size = 10**9
    entries = json.loads((folder / CONFIG).read_text()) | {name: size}
    (folder / CONFIG).write_text(json.dumps(entries))
    if name in ("num_labels", "start_n_top"):  # of other heads
        load(folder)
    else:
        with pytest.raises(ValueError, match=rf"wrong: .*instead of.*{size}"):
            load(folder)


@pytest.mark.parametrize("name", ["xlnet/xlnet-base-cased", "xlnet-base-cased"])
def test_the_name_of_a_model_on_the_hub_says_how_its_folder_is_fetched(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = rf'there is no folder {name!r} with a config.json. .*huggingface_hub.snapshot_download\("{name}"\)'
    for call in (xk.XLNetModel.from_pretrained, xk.XLNetConfig.from_file):
        with pytest.raises(FileNotFoundError, match=text):
            call(name)
    with pytest.raises(FileNotFoundError, match=text):
        xk.XLNetModel.from_pretrained(name, config=xk.XLNetConfig())
    with pytest.raises(FileNotFoundError, match="there is no folder '/no/such/folder' with a config.json$"):
        xk.XLNetModel.from_pretrained("/no/such/folder")
    (tmp_path / SAFE).touch()
    with pytest.raises(NotADirectoryError, match="folder must hold config.json and weights, got the file '.*safet"):
        xk.XLNetModel.from_pretrained(tmp_path / SAFE)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e5m2, torch.complex64, "int8"])
def test_dtypes_that_no_parameter_has_are_refused(dtype, folder):
    with pytest.raises(ValueError, match="dtype must be None or one of float16, bfloat16, float32 or float64, got "):
        xk.XLNetModel.from_pretrained(folder, dtype=dtype)


def _mutations(content: bytes, begin: int, end: int, count: int):
    """Cut and changed forms of a file, the same on every run."""
    rng = random.Random(len(content))
    for _ in range(count):
        changed = bytearray(content)
        if rng.random() < 0.2:
            yield bytes(changed[: rng.randrange(len(changed))])
            continue
        for _ in range(rng.choice((1, 1, 3, 20))):
            changed[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
        yield bytes(changed)


@pytest.mark.parametrize("name", [CONFIG, SAFE, BIN])
def test_damage_anywhere_is_a_sentence_that_names_the_file(name, folder):
    if name == BIN:
        as_pickle(folder)
    path = folder / name
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little") if name == SAFE else min(len(content), 4000)
    refused = 0
    for changed in _mutations(content, 0, end, 60):
        path.write_bytes(changed)
        try:
            load(folder)
        except (ValueError, OSError) as error:
            refused += 1
            assert str(folder) in str(error) and len(str(error)) < 2000
    assert refused >= 20


def test_damaged_headers_are_read_as_the_library_reads_them(folder):
    path = folder / SAFE
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for changed in [content, *_mutations(content, 8, end, 60)]:
        path.write_bytes(changed)
        wanted = found = None
        with contextlib.suppress(SafetensorError):
            wanted = safetensors.torch.load_file(path)
        with contextlib.suppress(ValueError):
            found = weights.read_weights(folder)[1]
        assert (found is None) == (wanted is None)
        if found is not None:
            assert found.keys() == wanted.keys() and all(torch.equal(x, wanted[name]) for name, x in found.items())
