"""The other commands: a tokenizer is trained, a model is measured, writes, fills gaps and scores."""

from __future__ import annotations

import json
import math
import pydoc_data.topics
import re
import sys
from pathlib import Path

import pytest
import torch

import xlnet_kernels as xk
from xlnet_kernels.pretraining import PermutationLM, joint_log_prob

# The examples need the [examples] extra; the package itself does not.
pytest.importorskip("rich")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("scripts", "one_thread")

TINY = "--seq-len 32 --mem-len 16 --layers 2 --d-model 16 --heads 2 --eval-batches 2 --threads 1 --batch-size 4".split()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with a text and, made on demand by `trained`, a run of each objective."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").mkdir()
    for name in ("assignment", "strings"):
        (folder / "text" / name).write_bytes(pydoc_data.topics.topics[name].encode()[:3000])
    return folder


@pytest.fixture
def trained(runs):
    from pretrain import main

    def run(objective: str) -> Path:
        output = runs / objective
        if not output.exists():
            places = ["--text", str(runs / "text"), "--output", str(output), "--objective", objective]
            assert main([*TINY, *places, "--steps", "20", "--lr", "0.02"]) == 0
        return output

    return run


def test_help_fits_and_shows_defaults(capsys, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setenv("COLUMNS", "80")
    import evaluate
    import finetune
    import generate
    import pretrain
    import score
    import train_tokenizer

    for module in (train_tokenizer, pretrain, evaluate, finetune, generate, score):
        with pytest.raises(SystemExit, match="0"):
            module.main(["--help"])
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= 80
        assert not re.search(r"--[a-z-]+ [A-Z]+_[A-Z]+", shown)  # a number is N or X, not --held-out HELD_OUT
        assert "(default: " in shown and "None" not in shown
        # the same words, and commands that can be copied: a line that goes on ends with a backslash
        words = " ".join(shown.replace("\\\n", " ").split())
        assert words.count(" ".join(module.__doc__.split())) == 1


def test_a_tokenizer_is_trained(runs, tmp_path, capsys):
    from parts.tokenizer import load_tokenizer
    from train_tokenizer import main

    arguments = ["--text", str(runs / "text"), "--vocab-size", "300", "--output", str(tmp_path / "tokenizer")]
    assert main(arguments) == 0
    assert "300 ids; 2 documents of 6,000 bytes are" in capsys.readouterr().out
    made = load_tokenizer(tmp_path / "tokenizer")
    assert made.vocabulary.size == 300 and len(made.encode(b"Assignment statements")) < 21
    assert main(arguments) == 2 and "is there already: --overwrite replaces it" in capsys.readouterr().err
    assert main([*arguments, "--kind", "bytes", "--overwrite"]) == 0
    assert load_tokenizer(tmp_path / "tokenizer").is_bytes
    (tmp_path / "empty").write_text("")
    assert main(["--text", str(tmp_path / "empty"), "--output", str(tmp_path / "none")]) == 2
    assert "holds no text" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_a_run_leaves_curves_and_events(trained):
    pytest.importorskip("matplotlib")
    run = trained("permutation")
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG"
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 21))
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses)


@pytest.mark.parametrize("objective", ["permutation", "autoregressive", "masked"])
def test_evaluation(trained, runs, tmp_path, objective, capsys):
    """Orders fit the objective, and a text without any structure costs what its bytes' number says."""
    from evaluate import main

    run = trained(objective)
    common = ["--checkpoint", str(run), "--threads", "1", "--overwrite", "--output", str(tmp_path / "found")]
    assert main(common) == 0
    found = json.loads((tmp_path / "found" / "results.json").read_text())
    orders = {
        "permutation": ["causal", "permutation", "partial"],
        "autoregressive": ["causal"],
        "masked": ["partial"],
    }[objective]
    assert list(found) == orders
    for order, numbers in found.items():
        # a byte is a token; the held-out part has 600, the last of one document
        assert numbers["perplexity"] == pytest.approx(math.exp(numbers["nats per token"]))
        assert numbers["bits per byte"] == pytest.approx(numbers["nats per token"] / math.log(2))
        wanted = {"causal": 600 - (objective == "autoregressive"), "permutation": 600}.get(order)
        assert numbers["targets"] == wanted or order == "partial" and 90 <= numbers["targets"] <= 100
        assert numbers["nats per token"] < math.log(260) - 1
    if objective != "permutation":
        assert main([*common, "--order", "permutation"]) == 2
        assert f"the {objective} objective has" in capsys.readouterr().err


def test_causal_loss_is_that_of_the_model(trained, tmp_path):
    """Two segments, the second with the first as memory, against the model's own calls."""
    from evaluate import main

    run, text = trained("permutation"), tmp_path / "text"
    text.write_bytes(pydoc_data.topics.topics["with"].encode()[:24])
    arguments = ["--checkpoint", run, "--text", text, "--seq-len", 16, "--mem-len", 16, "--order", "causal"]
    assert main([*map(str, arguments), "--output", str(tmp_path / "found"), "--threads", "1"]) == 0
    found = json.loads((tmp_path / "found" / "results.json").read_text())["causal"]

    lm = xk.XLNetLMHeadModel.from_pretrained(run)
    ids, total, mems = torch.tensor([list(text.read_bytes())]), 0.0, None
    for part in ids.split(16, 1):
        places = torch.arange(part.shape[1])[None]
        past = 0 if mems is None else mems[0].shape[0]
        mask = xk.RankMask.from_order(places, torch.ones_like(places, dtype=torch.bool), mem_len=past)
        with torch.no_grad():
            out = lm(part, mask=mask, target_positions=places, labels=part, mems=mems, use_mems=True, mem_len=16)
        total, mems = total + out.loss.item() * part.shape[1], out.mems
    assert found["nats per token"] == pytest.approx(total / 24, rel=1e-5)


def test_prompts_are_continued(trained, tmp_path, capsys):
    from generate import main

    def write(*arguments: str) -> list[str]:
        place = ["--checkpoint", str(trained("permutation")), "--output", str(tmp_path / "texts"), "--threads", "1"]
        assert main([*place, "--overwrite", *arguments]) == 0
        return [json.loads(line)["text"] for line in (tmp_path / "texts").read_text().splitlines()]

    prompt = ("--prompt", "The value", "--max-new-tokens", "12", "--seed", "3")
    first = write(*prompt)[0]
    assert first.startswith("The value") and first in capsys.readouterr().out
    assert write(*prompt, "--count", "2")[0] == first == write(*prompt)[0]
    assert write(*prompt, "--seed", "4")[0] == write(*prompt, "--count", "2")[1] != first
    word = first[len("The value") + 3]
    cut = write(*prompt, "--stop", word)[0]
    assert cut.endswith(word) and word not in cut[len("The value") : -1] and first.startswith(cut)
    lm = xk.XLNetLMHeadModel.from_pretrained(trained("permutation"))
    best = lm.generate([list(b"The value")], 12, temperature=0)[0]
    assert write(*prompt, "--temperature", "0")[0] == bytes(best.tolist()).decode("utf-8", "replace")


def test_gaps_are_filled(trained, tmp_path, capsys):
    from generate import main

    place = ["--checkpoint", str(trained("permutation")), "--output", str(tmp_path / "texts"), "--overwrite"]
    for order in ("left-to-right", "random", "confident"):
        assert main([*place, "--fill", "The [2] of an [3].", "--order", order, "--count", "2"]) == 0
        for line in (tmp_path / "texts").read_text().splitlines():
            filled = json.loads(line)["text"]
            assert filled.startswith("The ") and " of an " in filled and filled.endswith(".")
    capsys.readouterr()
    assert main([*place, "--fill", "no gap"]) == 2 and "--fill has no gap" in capsys.readouterr().err
    assert main([*place, "--fill", "[1]", "--prompt", "a"]) == 2 and "either" in capsys.readouterr().err
    place[1] = str(trained("autoregressive"))
    assert main([*place, "--fill", "[1]"]) == 2 and "needs a permutation LM" in capsys.readouterr().err


def test_marked_words_are_scored(trained, tmp_path, capsys):
    from score import main

    run = trained("permutation")
    arguments = ["--checkpoint", str(run), "--output", str(tmp_path / "scores"), "--overwrite", "--threads", "1"]
    assert main([*arguments, "The [[with]] statement", "--order", "right-to-left"]) == 0
    found = json.loads((tmp_path / "scores").read_text())
    lm = xk.XLNetLMHeadModel.from_pretrained(run)
    ids, targets = torch.tensor([list(b"The with statement")]), torch.tensor([[7, 6, 5, 4]])
    with torch.no_grad():
        each, total = joint_log_prob(lm, PermutationLM(), xk.pretraining.ByteTokenizer.vocabulary, ids, targets)
    assert found["log_prob"] == pytest.approx(total.item(), rel=1e-5)
    assert [token for token, _ in found["tokens"]] == list("htiw")
    assert [value for _, value in found["tokens"]] == pytest.approx(each[0].tolist(), rel=1e-5)
    (tmp_path / "lines").write_text("one\n\ntwo\n")
    arguments[1] = str(trained("autoregressive"))
    assert main([*arguments, "--file", str(tmp_path / "lines")]) == 0
    results = [json.loads(line) for line in (tmp_path / "scores").read_text().splitlines()]
    assert [len(result["tokens"]) for result in results] == [2, 2]  # the first token is given
    assert main([*arguments, "[[]]"]) == 2 and "nothing to score" in capsys.readouterr().err
    assert main([*arguments, "a b", "--order", "right-to-left"]) == 2


def test_what_is_no_checkpoint_is_refused(tmp_path, capsys):
    import evaluate
    import generate
    import score

    (tmp_path / "empty").mkdir()
    for module, arguments in ((evaluate, []), (generate, ["--prompt", "a"]), (score, ["a"])):
        assert module.main(["--checkpoint", str(tmp_path / "empty"), *arguments]) == 2
        assert "there is no checkpoint in" in capsys.readouterr().err


def test_finetuning_without_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "finetune", raising=False)
    with pytest.raises(SystemExit, match=r"^finetune.py needs rich and scikit-learn: pip install '.\[examples\]'$"):
        import finetune  # noqa: F401


def test_ctrl_c_stops_without_a_traceback(trained, tmp_path, monkeypatch, capsys):
    import score

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(score, "score", interrupted)
    (tmp_path / "scores").write_text("old")
    arguments = ["--checkpoint", str(trained("permutation")), "--output", str(tmp_path / "scores"), "--overwrite", "a"]
    assert score.main(arguments) == 130 and capsys.readouterr().err == "score.py: stopped\n"
    assert (tmp_path / "scores").read_text() == "old"


def files(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, with what it holds."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_is_read_is_not_overwritten(trained, runs, tmp_path, monkeypatch, capsys):
    """Neither an input nor a folder around it, by whatever name, nor the working directory."""
    pytest.importorskip("sklearn")
    import evaluate
    import finetune
    import generate
    import pretrain
    import score
    import train_tokenizer

    run, other = trained("permutation"), str(runs / "text" / "strings")
    step = next(run.glob("step-*"))
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "a", "label": {i % 2}}}\n' for i in range(8)))
    (tmp_path / "work" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work" / "here")
    reads = ["--checkpoint", str(run), "--threads", "1"]
    tune = [*reads, "--data", str(tmp_path / "rows.jsonl"), "--steps", "1"]
    cases = [(evaluate, reads, place, run) for place in (run, step, runs, tmp_path / "link", run / "latest")]
    cases += [
        (evaluate, [*reads, "--text", other], runs / "text", other),
        (evaluate, reads, tmp_path / "work", tmp_path / "work" / "here"),
        (generate, [*reads, "--prompt", "a"], step / "model.safetensors", run),
        (score, [*reads, "a"], run / "config.json", run),
        (score, [*reads, "--file", other], other, other),
        (finetune, tune, step, run),
        (finetune, tune, tmp_path, tmp_path / "rows.jsonl"),
        (train_tokenizer, ["--text", other], runs / "text", other),
        (pretrain, ["--text", str(run / "README.md")], run, run / "README.md"),
    ]
    before = files(runs), files(tmp_path)
    for module, arguments, place, named in cases:
        assert module.main([*arguments, "--output", str(place), "--overwrite"]) == 2
        shown = capsys.readouterr().err
        assert f"--output {place} would overwrite " in shown and f" {named}: " in shown, shown
    assert (files(runs), files(tmp_path)) == before


def test_only_own_files_are_replaced(trained, runs, tmp_path, capsys):
    """A folder is none where a file is wanted, nor the reverse; what others wrote stays; an error removes nothing."""
    pytest.importorskip("sklearn")
    import evaluate
    import finetune
    import generate
    import sample_data
    import score
    import train_tokenizer

    reads = ["--checkpoint", str(trained("permutation")), "--threads", "1"]
    place = tmp_path / "folder"
    (place / "tensorboard").mkdir(parents=True)
    others = [place / "mine", place / "tensorboard" / "mine"]
    for path in others:
        path.write_text("my own")
    file, old = tmp_path / "file", place / "results.json"
    for path in (file, old):
        path.write_text("old")
    for module, arguments in ((generate, ["--prompt", "a"]), (score, ["a"])):
        assert module.main([*reads, *arguments, "--output", str(place), "--overwrite"]) == 2
        assert f"--output {place} is a folder, and must be a file" in capsys.readouterr().err
    assert generate.main([*reads, "--prompt", "", "--output", str(file), "--overwrite"]) == 2  # nothing to continue
    assert evaluate.main([*reads, "--text", "nowhere", "--output", str(place), "--overwrite"]) == 2
    for module, arguments in ((evaluate, reads), (train_tokenizer, []), (sample_data, [])):
        assert module.main([*arguments, "--output", str(file), "--overwrite"]) == 2
        assert f"--output {file} is a file, and must be a folder" in capsys.readouterr().err
    assert file.read_text() == old.read_text() == "old"

    text = ["--text", str(runs / "text"), "--vocab-size", "300"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "{"ab"[i % 2]}", "label": {i % 2}}}\n' for i in range(40)))
    tune = [*reads, "--data", str(rows), "--steps", "1"]
    for module, arguments in ((evaluate, reads), (train_tokenizer, text), (sample_data, []), (finetune, tune)):
        assert module.main([*arguments, "--output", str(place), "--overwrite"]) in (0, 1)
        assert [path.read_text() for path in others] == ["my own"] * 2
    assert "this model" in old.read_text()
