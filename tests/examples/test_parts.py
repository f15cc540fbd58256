"""Parts of the examples: texts and tokenizers, learning rates, metrics."""

from __future__ import annotations

import math
import pydoc_data.topics
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import xlnet_kernels as xk
from tests import ROOT
from tests.processes import run_in_processes

# The examples need the [examples] extra; the package itself does not.
pytest.importorskip("rich")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("scripts", "one_thread")


@pytest.fixture
def text(tmp_path) -> Path:
    """A folder of two documents of 3000 bytes, and a hidden file."""
    (tmp_path / "text").mkdir()
    for name in ("assignment", "strings"):
        (tmp_path / "text" / name).write_bytes(pydoc_data.topics.topics[name].encode()[:3000])
    (tmp_path / "text" / ".hidden").write_text("not text")
    return tmp_path / "text"


def test_a_tokenizer_file(text, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = ["[UNK]", "[SEP]", "[CLS]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=200, special_tokens=names, show_progress=False)
    tokenizer.train([str(text / "assignment"), str(text / "strings")], trainer)
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))

    from parts.corpus import prepare
    from parts.tokenizer import load_tokenizer
    from pretrain import main

    found = load_tokenizer(str(file))
    vocabulary, size = found.vocabulary, tokenizer.get_vocab_size()
    assert (vocabulary.sep, vocabulary.cls) == (tokenizer.token_to_id("[SEP]"), tokenizer.token_to_id("[CLS]"))
    assert (vocabulary.pad, vocabulary.mask, vocabulary.size) == (size, size + 1, size + 2)  # it has none
    assert vocabulary.special[tokenizer.token_to_id("[UNK]")]
    pieces = tokenizer.get_vocab()
    assert all(vocabulary.word_starts[token] != name.startswith("##") for name, token in pieces.items())

    corpus = prepare(tmp_path / "tokens", str(text), found)
    first = (text / "assignment").read_text()
    assert corpus.bytes == 2 * 3000 and len(corpus.text.bounds) == 3
    assert corpus.text.read(0, 100).tolist() == tokenizer.encode(first, add_special_tokens=False).ids[:100]
    sizes = "--seq-len 32 --batch-size 4 --layers 1 --d-model 16 --heads 2 --steps 2 --threads 1".split()
    assert main([*sizes, "--text", str(text), "--tokenizer", str(file), "--output", str(tmp_path / "run")]) == 0

    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match="latin is not UTF-8"):
        prepare(tmp_path / "tokens", str(tmp_path / "latin"), found)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "bytes"])
def test_trained_tokenizers_come_back_from_their_folder(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    from parts.tokenizer import load_tokenizer, train_tokenizer

    document = pydoc_data.topics.topics["execmodel"]
    made = train_tokenizer(kind, iter([document]), 400, show_progress=False)
    made.save(tmp_path)
    back, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert back.is_bytes == (kind == "bytes") and back.config() == made.config()
    assert back.vocabulary.size == made.vocabulary.size == len(theirs) <= 400
    text = "Names refer to objects: été, 名前.\n\tx = 1"
    ids = made.encode(text.encode())
    assert back.encode(text.encode()).tolist() == ids.tolist() == theirs(text, add_special_tokens=False).input_ids
    assert not made.vocabulary.special[ids].any() or kind == "unigram"  # which never saw some of these letters
    if kind != "unigram":
        assert back.decode(ids) == text
    # a pair as in pre-training, shorter ones padded on the left
    sep, cls, pad = theirs.sep_token_id, theirs.cls_token_id, theirs.pad_token_id
    a, b = made.encode(b"a b").tolist(), made.encode(b"c").tolist()
    pair, single = theirs([["a b", "c"], ["c", "c"]], padding=True)["input_ids"], theirs("a b")
    assert pair == [[*a, sep, *b, sep, cls], [pad] * (len(a) - len(b)) + [*b, sep, *b, sep, cls]]
    assert single["input_ids"] == [*a, sep, cls] and single["token_type_ids"] == [0] * (len(a) + 1) + [2]


def test_a_byte_tokenizer_is_the_packages(tmp_path):
    from parts.tokenizer import load_tokenizer
    from xlnet_kernels.pretraining import ByteTokenizer

    found, wanted = load_tokenizer(None), ByteTokenizer.vocabulary
    for name in ("size", "sep", "cls", "pad", "mask", "others"):
        assert getattr(found.vocabulary, name) == getattr(wanted, name)
    every = bytes(range(256))
    assert found.encode(every).tolist() == list(every)
    assert found.fast.backend_tokenizer.encode("aé\n\x00~").ids[:-2] == list("aé\n\x00~".encode())
    assert found.config()["eos_token_id"] is None  # no byte ends a text


def test_vocabularies_that_are_too_small_are_refused():
    from parts.tokenizer import train_tokenizer

    with pytest.raises(ValueError, match="--vocab-size must be at least 265 for bpe"):
        train_tokenizer("bpe", iter(["a"]), 264, show_progress=False)


def test_unigram_entropy_and_bits_per_byte(tmp_path):
    from parts.corpus import prepare, unigram_entropy
    from parts.tokenizer import load_tokenizer

    (tmp_path / "text").write_text("aabb" * 10)
    corpus = prepare(tmp_path / "tokens", str(tmp_path / "text"), load_tokenizer(None))
    assert unigram_entropy(corpus.text) == pytest.approx(math.log(2))
    assert unigram_entropy(corpus.text.part(0, 2)) == 0
    assert corpus.describe(math.log(2)) == "0.693 nats per token, 1.000 bits per byte"


def test_layer_decay_scales_the_update():
    from parts.training import make_optimizer, update

    config = xk.XLNetConfig(vocab_size=20, d_model=16, n_layer=3, n_head=2, d_inner=32)
    model = xk.XLNetLMHeadModel(config)
    options = Namespace(lr=1e-3, layer_decay=0.5, weight_decay=0.0, steps=100, warmup=0.0, decay="linear")
    optimizer, scheduler = make_optimizer(model, options)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    ids = torch.randint(20, (4, 12))
    rate = scheduler.get_last_lr()[-1]
    norm = update(model, optimizer, scheduler, model(ids, labels=ids).loss, clip=1e9)
    # Adam's first step is the learning rate in every element whose gradient is far from 0
    moved = {name: (x.detach() - before[name]).abs().max().item() for name, x in model.named_parameters()}
    for layer, factor in ((0, 0.25), (1, 0.5), (2, 1.0)):
        assert moved[f"transformer.layer.{layer}.ff.layer_1.weight"] == pytest.approx(rate * factor, rel=1e-2)
    assert moved["transformer.word_embedding.weight"] == pytest.approx(rate * 0.125, rel=1e-2)
    assert moved["lm_loss.bias"] == pytest.approx(rate, rel=1e-2)
    assert norm > 0 and model.lm_loss.bias.grad is None


def test_weight_decay_is_of_matrices():
    from parts.training import make_optimizer

    model = xk.XLNetLMHeadModel(xk.XLNetConfig(vocab_size=20, d_model=16, n_layer=1, n_head=2, d_inner=32))
    options = Namespace(lr=1e-3, layer_decay=1.0, weight_decay=0.1, steps=100, warmup=0.1, decay="cosine")
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = make_optimizer(model, options)[0].param_groups
    decays = {names[parameter]: group["weight_decay"] for group in groups for parameter in group["params"]}
    assert len(decays) == len(names)
    for name, decay in decays.items():
        assert decay == (0.0 if "bias" in name or "layer_norm" in name else 0.1)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_schedule(decay):
    from parts.training import learning_rate

    options = Namespace(steps=100, warmup=0.1, decay=decay)
    rates = [learning_rate(step, options) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert rates[10] == 1 and rates[55] == pytest.approx(0.5) and rates[100] == pytest.approx(0)
    assert all(late < early for early, late in zip(rates[10:], rates[11:], strict=False))


def test_metrics_lose_what_the_checkpoint_does_not_know(tmp_path):
    from parts.training import Metrics

    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    with Metrics(path, after=2) as metrics:
        metrics.write(step=3, loss=0.5)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "loss": 0.5}\n'


COMMANDS = ("train_tokenizer", "pretrain", "evaluate", "finetune", "generate", "score")


def test_only_folders_of_checkpoints_are_checkpoints(tmp_path):
    from parts import folder as checkpoint

    numbers = [200, 99_999_999, 100_000_000, 1_000_000_000]
    names = [f"step-{number:08d}" for number in numbers]
    others = ["step-00000200.bak", "step-200", "step-9999999999-mine", "my-step-00000300", "notes"]
    for name in (*names, *others, ".step-00000200.unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == names
    assert checkpoint.latest(tmp_path) == checkpoint.find(tmp_path) == tmp_path / names[-1]
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)] == numbers
    checkpoint.remove(tmp_path)  # a kill left the unfinished one
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_a_checkpoint_that_was_just_written_stays(tmp_path):
    """A run that begins again beside later checkpoints; those of 10^8 steps sort after the others."""
    from parts.checkpoint import Checkpoints
    from parts.folder import checkpoints
    from parts.parallel import Processes

    config = xk.XLNetConfig(vocab_size=8, d_model=8, n_layer=1, n_head=1, d_inner=8)
    model = xk.XLNetLMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())
    written = Checkpoints(tmp_path, 1, Processes(0, 1, torch.device("cpu")))

    def save(step: int) -> list[str]:
        written.save(step, model, lambda: xk.XLNetLMHeadModel(config), optimizer, {}, {}, lambda folder: None)
        return [path.name for path in checkpoints(tmp_path)]

    (tmp_path / "step-00000001.bak").mkdir()
    assert save(99_999_999) == ["step-99999999"]
    assert save(100_000_000) == ["step-100000000"]
    assert save(5) == ["step-00000005", "step-100000000"]
    assert (tmp_path / "step-00000001.bak").is_dir()


MEETING = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, "examples")
from parts import parallel

os.environ["RANK"] = str(rank)
new_group, connected = dist.new_group, Path(sys.argv[3]).with_name("connected")
def slow_new_group(**options):
    group = new_group(**options)
    if rank == 0:
        time.sleep(1)
        connected.touch()
    return group
dist.new_group = slow_new_group
with parallel.processes("cpu"):
    assert connected.exists()
"""


def test_no_process_goes_on_before_all_are_connected(tmp_path):
    run_in_processes(MEETING, 2, tmp_path)


@pytest.mark.parametrize("script", [f"{name}.py" for name in COMMANDS])
def test_without_extras_one_line_says_which(script):
    code = "import runpy, sys; sys.modules['rich'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, script], cwd=ROOT / "examples", capture_output=True, text=True)
    needs = "rich and scikit-learn" if script == "finetune.py" else "rich"
    assert done.returncode == 1 and done.stderr == f"{script} needs {needs}: pip install '.[examples]'\n"
