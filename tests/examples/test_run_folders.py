"""Run folders: one writer, nothing unpickled, Ctrl-C that saves first, more steps, and models trained further."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import xlnet_kernels as xk
from tests.examples.test_pretrain import FULL, TINY, lines, pretrain, text  # noqa: F401

pytest.importorskip("rich")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("scripts", "one_thread")


def test_a_folder_has_one_writer(pretrain, tmp_path, capsys):  # noqa: F811
    from parts.folder import LOCK, locked

    run = tmp_path / "run"
    arguments = (*TINY, "--steps", 2)
    (run / ".step-00000001.unfinished").mkdir(parents=True)
    with locked(run):
        assert pretrain("run", *arguments) == 2
        shown = capsys.readouterr().err
        assert f"{run}: another run writes there (process {os.getpid()} on " in shown
        assert (run / ".step-00000001.unfinished").is_dir()
    assert not (run / LOCK).exists() and pretrain("run", *arguments) == 0
    with locked(run):
        assert pretrain("run", "--resume", "--steps", 3) == 2
        assert pretrain("run", *arguments, "--overwrite") == 2
    assert (run / "step-00000002").is_dir()
    with locked(tmp_path / "empty"):
        pass
    assert not (tmp_path / "empty").exists()  # what is refused leaves no folder


def test_a_fine_tuning_has_one_writer(tmp_path, capsys):
    pytest.importorskip("sklearn")
    from finetune import main
    from parts.folder import locked

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "{"ab"[i % 2]}", "label": {i % 2}}}\n' for i in range(40)))
    with locked(tmp_path / "tuned"):
        assert main(["--data", str(rows), "--output", str(tmp_path / "tuned"), "--steps", "1"]) == 2
    assert "another run writes there" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="looks there for open files")
def test_the_lock_goes_where_open_files_cannot_be_removed(monkeypatch, tmp_path):
    """As on Windows, whose locks and rule are played here."""
    from parts import folder

    held, unlink = [], Path.unlink

    def lock(descriptor, mode, count):
        held.append(descriptor)

    def remove(path, **options):
        if any(os.path.exists(f"/proc/self/fd/{descriptor}") for descriptor in held):
            raise PermissionError(errno.EACCES, "it is open")
        unlink(path, **options)

    monkeypatch.setattr(folder, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=lock))
    monkeypatch.setattr(Path, "unlink", remove)
    with folder.locked(tmp_path / "run"):
        assert held and (tmp_path / "run" / folder.LOCK).exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_writer_lets_go(tmp_path):
    from parts.folder import locked

    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom parts.folder import locked\n"
        "with locked(Path(sys.argv[1])):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    place = os.path.dirname(sys.modules["parts"].__file__ or "")
    environment = os.environ | {"PYTHONPATH": os.path.dirname(place)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], env=environment)
    assert done.returncode == -signal.SIGKILL and (tmp_path / "run" / ".lock").exists()
    with locked(tmp_path / "run"):
        pass


def test_folders_that_cannot_be_written_or_locked(pretrain, tmp_path, monkeypatch, capsys):  # noqa: F811
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "file").write_text("")
    assert pretrain("file/run", *TINY) == 2
    assert capsys.readouterr().err.count("\n") == 1

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert pretrain("run", *TINY) == 2
    shown = capsys.readouterr().err
    assert "its file system has no locks" in shown and shown.count("\n") == 1


def test_a_full_disk_leaves_checkpoints_alone(pretrain, tmp_path, monkeypatch, capsys):  # noqa: F811
    from parts import checkpoint

    assert pretrain("run", *TINY, "--steps", 4, "--stop-at", 2) == 0

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "sync", full)
    assert pretrain("run", "--resume") == 1
    assert "No space left on device; the last checkpoint is as it was" in capsys.readouterr().err
    monkeypatch.undo()
    assert pretrain("run", "--resume") == 0


def test_resuming_unpickles_nothing(pretrain, tmp_path, monkeypatch):  # noqa: F811
    assert pretrain("run", *FULL, "--stop-at", 2) == 0
    training = tmp_path / "run" / "step-00000002" / "training"
    assert sorted(path.name for path in training.iterdir()) == ["__0_0.distcp", "index.json"]

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was read")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refused)
    loads, real = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: loads.append(kwargs) or real(*args, **kwargs))
    assert pretrain("run", "--resume") == 0
    assert loads and all(kwargs["weights_only"] for kwargs in loads)


@pytest.mark.parametrize("content", ["[]", "{", '{"a": 1}', '{"a": {}}', "null"])
def test_damaged_indexes_are_named(pretrain, tmp_path, content, capsys):  # noqa: F811
    assert pretrain("run", *FULL, "--stop-at", 1) == 0
    index = tmp_path / "run" / "step-00000001" / "training" / "index.json"
    outside = json.loads(index.read_text())
    next(iter(outside.values()))["shards"][0][2] = "../process-0.pt"
    for damaged in (content, json.dumps(outside)):
        index.write_text(damaged)
        assert pretrain("run", "--resume") == 2
        assert f"{index.parent} is missing or damaged" in capsys.readouterr().err
    (index.parents[1] / "settings.json").write_text(content)
    assert pretrain("run", "--resume") == 2 and "settings.json is missing or damaged" in capsys.readouterr().err


def stop_at(step: int, monkeypatch) -> None:
    import pretrain as module

    original = module.update

    def update(*args):
        if args[2].last_epoch == step - 1:
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(module, "update", update)


def test_ctrl_c_saves_before_anything_else(pretrain, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Between evaluations there is none; at a step that has one, it comes after the checkpoint."""
    from parts.run import Run

    seen: list[str] = []
    evaluate = Run.evaluate

    def evaluated(run: Run) -> float:
        seen.extend(path.name for path in (tmp_path / "run").glob("step-*"))
        return evaluate(run)

    assert pretrain("whole", *FULL, "--eval-every", 2) == 0
    monkeypatch.setattr(Run, "evaluate", evaluated)
    stop_at(3, monkeypatch)
    assert pretrain("run", *FULL, "--eval-every", 100) == 130
    assert seen == [] and (tmp_path / "run" / "step-00000003").is_dir()
    assert "stopping: writing a checkpoint" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(Run, "evaluate", evaluated)
    stop_at(4, monkeypatch)
    assert pretrain("run", "--resume", "--eval-every", 2, "--eval-batches", 2) == 130
    assert seen[:1] == ["step-00000003"] and "step-00000004" in seen
    monkeypatch.undo()
    assert pretrain("run", "--resume", "--eval-every", 2, "--eval-batches", 2) == 0
    whole = lines(tmp_path / "whole", "validation_loss")
    del whole[2]  # which the first part did not evaluate
    assert lines(tmp_path / "run", "validation_loss") == whole


def test_another_ctrl_c_while_a_checkpoint_is_written(pretrain, tmp_path, monkeypatch, capsys):  # noqa: F811
    """It ends the run; the checkpoint before is whole, and the one that was begun is whole or not there."""
    from parts import checkpoint, training

    assert pretrain("run", *FULL, "--stop-at", 2) == 0
    stop_at(4, monkeypatch)
    # Without an end, because the progress bar asks for the time too
    clock = itertools.count(0, 10)
    monkeypatch.setattr(training.time, "monotonic", lambda: next(clock))
    original, pressed = checkpoint.sync, []

    def sync(path):
        if not pressed:
            pressed.append(path)
            signal.raise_signal(signal.SIGINT)
        original(path)

    monkeypatch.setattr(checkpoint, "sync", sync)
    assert pretrain("run", "--resume") == 130
    assert pressed and "the last checkpoint is as it was" in capsys.readouterr().err
    assert (tmp_path / "run" / "step-00000002").is_dir()
    monkeypatch.undo()
    assert pretrain("whole", *FULL) == 0
    assert pretrain("run", "--resume") == 0
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def test_a_finished_run_makes_more_steps(pretrain, tmp_path, capsys):  # noqa: F811
    """Their learning rates are those of a run of that length, the first one too."""
    assert pretrain("long", *TINY, "--steps", 12) == 0
    assert pretrain("run", *TINY, "--steps", 6) == 0
    assert f"model, tokenizer and metrics are in {tmp_path / 'run'}" in "".join(capsys.readouterr().out.splitlines())
    assert pretrain("run", "--resume", "--steps", 5) == 2
    assert "--steps 5: " in capsys.readouterr().err
    assert pretrain("run", "--resume", "--steps", 12) == 0
    rates, wanted = lines(tmp_path / "run", "lr"), lines(tmp_path / "long", "lr")
    assert len(rates) == 12 and [rates[i] for i in range(7, 13)] == [wanted[i] for i in range(7, 13)]
    settings = json.loads((tmp_path / "run" / "step-00000012" / "settings.json").read_text())
    assert settings["options"]["steps"] == 12 and pretrain("run", "--resume") == 0  # without --steps: its own


def test_a_model_is_trained_further_on_other_text(pretrain, text, tmp_path, capsys):  # noqa: F811
    assert pretrain("run", *TINY, "--objective", "masked", "--steps", 3) == 0
    begin = xk.XLNetLMHeadModel.from_pretrained(tmp_path / "run").state_dict()
    other = ("--text", text / "strings", "--seq-len", 16, "--reuse-len", 4, "--mem-len", 0, "--batch-size", 2)
    rest = (*other, "--threads", 1, "--checkpoint", tmp_path / "run", "--lr", 0, "--steps", 4)
    assert pretrain("further", *rest, "--stop-at", 2) == 0
    found = xk.XLNetLMHeadModel.from_pretrained(tmp_path / "further")
    assert all(torch.equal(x, begin[name]) for name, x in found.state_dict().items())
    assert (found.config.mem_len, found.config.extra["objective"]) == (0, "masked")
    assert "from `run`" in (tmp_path / "further" / "README.md").read_text()
    assert pretrain("further", "--text", text / "strings", "--resume") == 0

    assert pretrain("left", *rest, "--objective", "autoregressive", "--steps", 1) == 0
    assert xk.XLNetLMHeadModel.from_pretrained(tmp_path / "left").config.attn_type == "uni"
    capsys.readouterr()
    for more, message in (
        (["--layers", 7], "--layers 7: the model in "),
        (["--tokenizer", tmp_path / "run"], "a checkpoint has its own"),
        (["--checkpoint", tmp_path / "nowhere"], "there is no checkpoint in"),
    ):
        assert pretrain("none", *rest, *more) == 2 and message in capsys.readouterr().err
        assert not (tmp_path / "none").exists()
    assert pretrain("run", *rest, "--overwrite") == 2 and "would overwrite --checkpoint" in capsys.readouterr().err


def test_a_classifier_is_no_language_model(pretrain, text, tmp_path, capsys):  # noqa: F811
    import evaluate
    import generate
    import score
    from parts.tokenizer import load_tokenizer

    config = xk.XLNetConfig(vocab_size=260, d_model=8, n_layer=1, n_head=1, d_inner=8)
    xk.XLNetForSequenceClassification(config).save_pretrained(tmp_path / "tuned")
    load_tokenizer(None).save(tmp_path / "tuned")
    reads = ["--checkpoint", str(tmp_path / "tuned"), "--threads", "1"]
    for module, more in ((evaluate, []), (generate, ["--prompt", "a"]), (score, ["a"])):
        assert module.main([*reads, *more]) == 2
        shown = capsys.readouterr().err
        assert "holds an XLNetForSequenceClassification, and a language model is needed" in shown
        assert "new_head" not in shown
    assert pretrain("run", *reads, "--steps", 1) == 2
    assert "and a language model is needed" in capsys.readouterr().err
