"""The examples: runs that learn, stop, are killed and go on exactly, in one process and in two; what they refuse."""

from __future__ import annotations

import json
import math
import os
import pydoc_data.topics
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xlnet_kernels as xk
from tests import ROOT

EXAMPLES = ROOT / "examples"
OBJECTIVES = ("permutation", "autoregressive", "masked")
TINY = "--seq-len 32 --mem-len 16 --layers 2 --d-model 16 --heads 2 --eval-batches 2 --threads 1 --batch-size 4".split()
# State that a run carries from step to step: memory, both directions, random numbers of dropout, a schedule.
FULL = [*TINY, "--bi-data", "--dropout", "0.1", "--steps", "10", "--lr", "0.01"]

# The examples need the [examples] extra; the package itself does not.
pytest.importorskip("rich")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("scripts", "one_thread")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A folder of documents of 3000 bytes each."""
    folder = tmp_path_factory.mktemp("text")
    for name in ("assignment", "comparisons", "execmodel", "strings"):
        (folder / name).write_bytes(pydoc_data.topics.topics[name].encode()[:3000])
    (folder / ".hidden").write_text("not text")
    return folder


@pytest.fixture
def pretrain(text, tmp_path):
    """Runs pretrain.py in a folder under tmp_path; returns its exit status."""
    from pretrain import main

    def run(name: str, *arguments: object) -> int:
        return main(["--text", str(text), "--output", str(tmp_path / name), *map(str, arguments)])

    return run


def lines(folder: Path, key: str = "loss") -> dict[int, float]:
    """The metric of each step, every step once."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    pairs = [(line["step"], line[key]) for line in found if key in line]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def environment() -> dict[str, str]:
    paths = [str(EXAMPLES), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, paths))
    # a crash leaves the stacks of its threads in what the process prints
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def run_script(script: str, *arguments: object, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [sys.executable, *launcher, script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_training_lowers_the_loss(pretrain, tmp_path, objective, capsys):
    arguments = ("--objective", objective, "--steps", 80, "--lr", 0.02, "--weight-decay", 0, "--eval-every", 40)
    assert pretrain("run", *TINY, *arguments) == 0
    losses, held_out = lines(tmp_path / "run"), lines(tmp_path / "run", "validation_loss")
    assert list(losses) == list(range(1, 81)) and list(held_out) == [40, 80]
    # It starts from all bytes being about equally likely, and learns at least that most of them never occur. Logits
    # begin with a variance of d_model x (0.02^2 x 1024 / d_model) = 0.41, which costs half of that.
    assert losses[1] == pytest.approx(math.log(260) + 0.2, abs=0.2)
    assert held_out[80] < held_out[40] < losses[1] - 1
    assert "unigram entropy" in capsys.readouterr().out
    model = xk.XLNetLMHeadModel.from_pretrained(tmp_path / "run" / "step-00000080")
    assert model.config.attn_type == ("uni" if objective == "autoregressive" else "bi")


@pytest.mark.parametrize("objective, tokenizer", [("permutation", "bpe"), ("autoregressive", "bytes")])
def test_a_checkpoint_is_complete(pretrain, tmp_path, objective, tokenizer):
    """The run's own folder: model, tokenizer, generation config and card, as transformers reads them."""
    transformers = pytest.importorskip("transformers")
    from parts.tokenizer import train_tokenizer

    made = train_tokenizer(tokenizer, iter([pydoc_data.topics.topics["strings"]]), 300, show_progress=False)
    made.save(tmp_path / "tokenizer")
    run = tmp_path / "run"
    arguments = (*TINY, "--objective", objective, "--tokenizer", tmp_path / "tokenizer", "--save-every", 2)
    assert pretrain("run", *arguments, "--steps", 6, "--stop-at", 3) == 0
    shutil.rmtree(tmp_path / "tokenizer")  # the checkpoint has one of its own
    assert pretrain("run", "--resume") == 0
    shutil.move(run, tmp_path / "moved")
    run = tmp_path / "moved"

    ours = xk.XLNetLMHeadModel.from_pretrained(run)
    last = xk.XLNetLMHeadModel.from_pretrained(run / "step-00000006").state_dict()
    assert all(torch.equal(x, last[name]) for name, x in ours.state_dict().items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run).eval()
    text = transformers.AutoTokenizer.from_pretrained(run)("Names refer to objects.", return_tensors="pt")
    options = {"input_ids": text.input_ids, "token_type_ids": text.token_type_ids}
    wanted, found = theirs(**options).logits, ours(**options).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    ends = (theirs.config.eos_token_id, theirs.generation_config.eos_token_id, ours.config.eos_token_id)
    assert ends == ((2,) * 3 if tokenizer == "bpe" else (None,) * 3)
    assert theirs.config.pad_token_id == theirs.generation_config.pad_token_id == made.vocabulary.pad
    card = (run / "README.md").read_text()
    for fact in ("step 6 of 6", objective, "4 documents", "loss in the held-out part", "xlnet_kernels"):
        assert fact in card, fact
    assert pretrain("moved", *arguments, "--tokenizer", run, "--steps", 1, "--overwrite") == 2  # it would lose this
    (run / "README.md").unlink()
    (run / "README.md").write_text("my own")
    assert pretrain("moved", *TINY, "--steps", 1, "--overwrite") == 0
    assert (run / "README.md").read_text() == "my own"
    assert xk.XLNetLMHeadModel.from_pretrained(run).config.vocab_size == 260


def test_generated_bytes_end_nowhere(pretrain, tmp_path):
    """2 is '#' where tokens are bytes; as XLNet's default end it cut texts short."""
    assert pretrain("run", *TINY, "--steps", 1) == 0
    lm = xk.XLNetLMHeadModel.from_pretrained(tmp_path / "run")
    with torch.no_grad():
        lm.lm_loss.bias[2] = 100.0
    assert [len(text) for text in lm.generate([[72, 101]], 5, seed=0)] == [7]


KILLED = """
import os, signal, sys, time
import pretrain
from parts import checkpoint, folder, training

def killed(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "writing":  # the second checkpoint, of which the model is there already, while training goes on
    synced = checkpoint.sync
    def sync(path):
        output = path.parents[0] if path.is_dir() else path.parents[1]
        if folder.latest(output):
            while '"step": 5' not in (output / "metrics.jsonl").read_text():
                time.sleep(0.01)
            killed()
        synced(path)
    checkpoint.sync = sync
else:  # in the middle of the seventh step
    update = training.update
    def step(*args):
        killed() if args[2].last_epoch == 6 else None
        return update(*args)
    pretrain.update = step
pretrain.main(sys.argv[2:])
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_run_goes_on_exactly(pretrain, tmp_path, text):
    arguments = (*FULL, "--save-every", 2)
    assert pretrain("whole", *FULL) == 0

    script, killed = tmp_path / "killed.py", tmp_path / "killed"
    script.write_text(KILLED)
    places = ("--text", text, "--output", killed)
    done = run_script(str(script), "writing", *arguments, *places, "--async-save")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in killed.glob("step-*")] == ["step-00000002"]
    assert (killed / ".step-00000004.unfinished" / "model.safetensors").exists()
    assert max(lines(killed)) in (5, 6)

    done = run_script(str(script), "training", *arguments, *places, "--resume")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert sorted(path.name for path in killed.glob("step-*")) == ["step-00000004", "step-00000006"]

    assert pretrain("killed", *arguments, "--resume") == 0
    assert lines(killed) == lines(tmp_path / "whole") and len(lines(killed)) == 10
    assert lines(killed, "gradient") == lines(tmp_path / "whole", "gradient")
    assert lines(killed, "validation_loss")[10] == lines(tmp_path / "whole", "validation_loss")[10]
    assert sorted(path.name for path in killed.glob("*step-*")) == ["step-00000008", "step-00000010"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_with_a_checkpoint(pretrain, tmp_path, monkeypatch, number):
    import pretrain as module

    def update(*args):
        if args[2].last_epoch == 2:
            signal.raise_signal(number)
            signal.raise_signal(number)  # as under torchrun, which passes on what the terminal sends to all
        return original(*args)

    original = module.update
    assert pretrain("whole", *FULL) == 0
    monkeypatch.setattr(module, "update", update)
    assert pretrain("stopped", *FULL) == 130
    assert max(lines(tmp_path / "stopped")) == 3 and (tmp_path / "stopped" / "step-00000003").is_dir()
    monkeypatch.undo()
    # the rest needs no options, and may be done with other workers
    assert pretrain("stopped", "--resume", "--workers", 1, "--threads", 1) == 0
    assert lines(tmp_path / "stopped") == lines(tmp_path / "whole")


def test_backends_follow_the_same_curve(pretrain, tmp_path):
    if not xk.backends()["cpu"].available:
        pytest.skip("the cpu backend is not compiled")
    for name in ("cpu", "reference"):
        assert pretrain(name, *TINY, "--steps", 30, "--lr", 0.01, "--backend", name) == 0
    cpu, reference = lines(tmp_path / "cpu"), lines(tmp_path / "reference")
    assert cpu == pytest.approx(reference, rel=1e-4)
    assert cpu[30] < cpu[1] - 0.5  # far enough to have drifted apart


def test_bfloat16_follows_float32(pretrain, tmp_path):
    for name in ("float32", "bfloat16"):
        assert pretrain(name, *TINY, "--steps", 10, "--lr", 0.01, "--dtype", name) == 0
    low, full = lines(tmp_path / "bfloat16"), lines(tmp_path / "float32")
    assert low == pytest.approx(full, rel=2e-2) and low != full


PROCESSES = """
import os
import sys
import torch.distributed as dist
import pretrain

dist.init_process_group("gloo")
output, *arguments = sys.argv[1:]
for kind in ("ddp", "fsdp2"):
    common = [*arguments, "--parallel", kind, "--output"]
    assert pretrain.main([*common, f"{output}/{kind}"]) == 0
    assert pretrain.main([*common, f"{output}/{kind}-dropout", "--dropout", "0.1"]) == 0
    saving = ["--save-every", "2", *(["--async-save"] if kind == "fsdp2" else [])]
    assert pretrain.main([*common, f"{output}/{kind}-stopped", "--dropout", "0.1", "--stop-at", "3", *saving]) == 0
    assert pretrain.main([*common, f"{output}/{kind}-stopped", "--resume", *saving]) == 0
assert pretrain.main([*arguments, "--batch-size", "3", "--output", f"{output}/odd"]) == 2
dist.destroy_process_group()
os._exit(0)  # see tests/processes.py
"""


def test_two_processes(pretrain, tmp_path, text):
    arguments = (*TINY, "--steps", 6, "--lr", 0.01)
    assert pretrain("one", *arguments) == 0
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_script(str(script), tmp_path, "--text", text, *arguments, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert "--batch-size 3 cannot be shared by 2 processes" in done.stderr
    one = lines(tmp_path / "one")
    final = xk.XLNetLMHeadModel.from_pretrained(tmp_path / "one" / "step-00000006").state_dict()
    for kind in ("ddp", "fsdp2"):
        assert lines(tmp_path / kind) == pytest.approx(one, rel=1e-5)
        found = xk.XLNetLMHeadModel.from_pretrained(tmp_path / kind / "step-00000006").state_dict()
        assert all(torch.allclose(found[name], final[name], atol=1e-4) for name in final)
        dropped = lines(tmp_path / f"{kind}-dropout")
        assert lines(tmp_path / f"{kind}-stopped") == dropped != lines(tmp_path / kind)
    # one process cannot go on with what belongs to two
    assert pretrain("ddp", "--resume") == 2


def test_a_loss_that_is_not_finite_leaves_checkpoints_alone(pretrain, tmp_path, capsys):
    assert pretrain("run", *FULL, "--save-every", 1, "--lr", "1e30", "--clip", "1e30", "--warmup", 0) == 1
    assert "the last checkpoint is as it was" in capsys.readouterr().err
    last = max((tmp_path / "run").glob("step-*"), default=None)
    failed = max(lines(tmp_path / "run"))
    assert failed < 10 and last.name == f"step-{failed:08d}"
    assert pretrain("run", "--resume") == 1  # readable, and fails where it failed


def test_heads_that_do_not_fit_leave_no_folder(pretrain, tmp_path):
    assert pretrain("run", *TINY, "--d-model", 30, "--heads", 4) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--text", "nowhere"], "--text: there is no file or folder nowhere"),
        (["--text", "{empty}"], "empty holds no text"),
        (["--text", "{short}"], "text is too short"),
        (["--tokenizer", "nowhere"], "--tokenizer: cannot read nowhere"),
        (["--tokenizer", "{short}"], "short is no tokenizer.json"),
        (["--held-out", "0"], "--held-out 0.0 leaves nothing on one side"),
        (["--d-model", "15", "--heads", "2"], "--d-model 15 is no multiple of --heads 2"),
        (["--batch-size", "3", "--bi-data"], "batch_size must be even with bi_data"),
        (["--resume"], "--resume: there is no checkpoint in"),
    ],
)
def test_options_that_do_not_fit(pretrain, tmp_path, arguments, message, capsys):
    places = {name: str(tmp_path / name) for name in ("empty", "short")}
    (tmp_path / "empty").write_text("")
    (tmp_path / "short").write_text("too short")
    assert pretrain("run", *TINY, *(argument.format(**places) for argument in arguments)) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("step-*"))


def test_values_that_make_no_sense(pretrain, capsys):
    for arguments in (["--steps", "0"], ["--lr", "-1"], ["--dropout", "1"], ["--seq-len", "x"], ["--backend", "y"]):
        with pytest.raises(SystemExit, match="2"):
            pretrain("run", *arguments)
        assert f"argument {arguments[0]}: " in capsys.readouterr().err


def test_checkpoints_that_do_not_fit(pretrain, tmp_path, text, capsys):
    def refused(*arguments) -> str:
        assert pretrain("run", *arguments) == 2
        return capsys.readouterr().err

    copy = tmp_path / "text"
    copy.write_bytes((text / "strings").read_bytes())
    arguments = ("--text", copy, *FULL, "--stop-at", 2)
    assert pretrain("run", *arguments) == 0
    assert "holds a checkpoint: --resume goes on from it, --overwrite removes it" in refused(*arguments)
    found = refused("--text", copy, "--resume", "--lr", 0.5, "--objective", "masked")
    assert "--objective is permutation, not masked" in found and "--lr is 0.01, not 0.5" in found
    assert "contradict" in refused("--resume", "--overwrite")

    # a text that changed only matters where its tokens must be made again
    copy.write_text("something else " * 300)
    assert pretrain("run", "--text", copy, "--resume", "--stop-at", 3) == 0
    tokens = (tmp_path / "run" / "tokens").read_bytes()
    (tmp_path / "run" / "tokens").unlink()
    assert "has changed since the checkpoint was written" in refused("--text", copy, "--resume")
    (tmp_path / "run" / "tokens").write_bytes(tokens)

    last = tmp_path / "run" / "step-00000003"
    files = ["process-0.pt", "model.safetensors", "config.json", "settings.json", "training/index.json"]
    files += [f"training/{path.name}" for path in (last / "training").glob("*.distcp")]
    assert len(files) == 6
    for name in files:
        whole = (last / name).read_bytes()
        (last / name).write_bytes(whole[: len(whole) // 2])
        assert name.split("/")[0] in refused("--text", copy, "--resume")
        (last / name).unlink()
        assert name.split("/")[0] in refused("--text", copy, "--resume")
        (last / name).write_bytes(whole)
    assert pretrain("run", "--text", copy, "--resume") == 0
    assert pretrain("run", *arguments, "--overwrite") == 0
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000002"]
