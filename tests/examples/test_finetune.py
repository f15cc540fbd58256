"""Fine-tuning on tables: every task learns, is measured, comes back from its folder, and refuses what does not fit."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import pytest
import torch

import xlnet_kernels as xk

# The examples need the [examples] extra; the package itself does not.
for name in ("rich", "sklearn"):
    pytest.importorskip(name)
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("scripts", "one_thread")

COLOURS, SIZES = ("red", "sky", "lime"), ("big", "tin", "fat")
SMALL = "--seq-len 24 --batch-size 8 --threads 1 --eval-every 30 --lr 0.003 --layer-decay 1 --seed 1".split()


@pytest.fixture
def small(monkeypatch):
    """Models from scratch are tiny."""
    from parts import tuning

    monkeypatch.setattr(tuning, "SMALL", dict(d_model=32, n_layer=1, n_head=2, d_inner=64, initializer_range=0.11))


@pytest.fixture
def finetune(tmp_path, small):
    from finetune import main

    def run(*arguments: object) -> int:
        return main([*SMALL, "--output", str(tmp_path / "tuned"), *map(str, arguments)])

    return run


def rows_of(task: str, count: int = 96) -> list[dict]:
    """Rows whose labels a tiny model finds: which colour, how many letters a, which choice or word is a colour."""
    generator = torch.Generator().manual_seed(0)

    def draw(size: int) -> int:
        return int(torch.randint(size, (), generator=generator))

    rows = []
    for _ in range(count):
        colour, size, turn = COLOURS[draw(3)], SIZES[draw(3)], draw(2)
        words = [size, colour] if turn else [colour, size]
        if task == "classification":
            rows.append({"text": " ".join(words), "label": colour})
        elif task == "regression":
            rows.append({"text": "a" * draw(9) + "b", "label": 0})
            rows[-1]["label"] = 10 + 3 * rows[-1]["text"].count("a")
        elif task == "choice":
            rows.append({"text": "?", "choices": words, "label": words.index(colour)})
        elif task == "tagging":
            rows.append({"text": words, "label": ["B-c" if word in COLOURS else "O" for word in words]})
        else:
            rows.append({"text": " ".join(words), "question": "which colour", "label": colour})
    return rows


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


MODELS = {
    "classification": "XLNetForSequenceClassification",
    "regression": "XLNetForSequenceClassification",
    "choice": "XLNetForMultipleChoice",
    "tagging": "XLNetForTokenClassification",
    "answer": "XLNetForQuestionAnsweringSimple",
}


@pytest.mark.parametrize("task", MODELS)
def test_each_task_learns_and_comes_back(finetune, tmp_path, task):
    data = write(tmp_path / "rows.jsonl", rows_of(task))
    assert finetune("--task", task, "--data", data, "--steps", 120) == 0
    folder = tmp_path / "tuned"
    reached = json.loads((folder / "results.json").read_text())["this model"]
    metric = next(iter(reached))
    assert reached[metric] > 0.9, reached
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get(f"validation_{metric}", -1) for line in lines) == pytest.approx(reached[metric])
    assert f"{metric} {reached[metric]:.3f}" in (folder / "README.md").read_text()

    # ours and transformers' from the same folder, with its tokenizer
    ours, theirs = (getattr(place, MODELS[task]).from_pretrained(folder).eval() for place in (xk, transformers))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(["red big", "tin sky"], padding=True, return_tensors="pt")
    if task == "choice":
        inputs = {name: x[:, None].expand(-1, 2, -1).contiguous() for name, x in inputs.items()}
    with torch.no_grad():
        found, wanted = ours(**inputs), theirs(**inputs)
    name = "start_logits" if task == "answer" else "logits"
    torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-4, atol=1e-4)
    if task == "classification":
        assert ours.config.extra["id2label"] == {str(i): x for i, x in enumerate(sorted(COLOURS))}
        assert theirs.config.id2label[int(wanted.logits[1].argmax())] == "sky"
        assert ours.config.eos_token_id is None


def test_a_checkpoint_is_tuned_on_csv(finetune, tmp_path, capsys):
    """Separate files, pairs in columns of other names; the encoder and the tokenizer are the checkpoint's."""
    from parts.tokenizer import train_tokenizer
    from pretrain import main

    train_tokenizer("bpe", iter(["red sky lime big tin fat"]), 280, show_progress=False).save(tmp_path / "tokenizer")
    sizes = "--seq-len 32 --batch-size 2 --layers 1 --d-model 16 --heads 2 --steps 1 --threads 1 --bi-data".split()
    places = ["--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "run")]
    assert main([*sizes, *places]) == 0
    for name, count in (("train", 96), ("test", 16)):
        with open(tmp_path / f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["one", "two", "class"])
            writer.writerows([*row["text"].split(), row["label"]] for row in rows_of("classification", count))
    columns = ("--text-column", "one", "--pair-column", "two", "--label-column", "class")
    data = ("--data", tmp_path / "train.csv", "--validation", tmp_path / "test.csv", *columns)
    assert finetune("--checkpoint", tmp_path / "run", *data, "--steps", 90) == 0
    model = xk.XLNetForSequenceClassification.from_pretrained(tmp_path / "tuned")
    assert (model.config.d_model, model.config.vocab_size, model.config.bi_data) == (16, 280, False)
    shown = capsys.readouterr().out
    assert "96 rows for training, 16 for testing" in shown
    # words alone say it: a bag of them is never wrong
    assert "bag of words: accuracy 1.000" in shown and "majority: accuracy 0." in shown
    assert "objective" not in json.loads((tmp_path / "tuned" / "config.json").read_text())


def test_the_best_model_is_kept_and_patience_ends(finetune, tmp_path, monkeypatch):
    from parts import tuning as module

    scores, states = iter([0.5, 0.7, 0.6, 0.65, 0.9]), []

    def evaluate(tuning):
        states.append({name: x.clone() for name, x in tuning.model.state_dict().items()})
        return {"accuracy": next(scores)}

    monkeypatch.setattr(module.Tuning, "evaluate", evaluate)
    data = write(tmp_path / "rows.jsonl", rows_of("classification"))
    finetune("--data", data, "--steps", 50, "--eval-every", 1, "--patience", 2)
    assert len(states) == 4  # two without a better one after 0.7
    kept = xk.XLNetForSequenceClassification.from_pretrained(tmp_path / "tuned").state_dict()
    assert all(torch.equal(x, states[1][name]) for name, x in kept.items())
    assert json.loads((tmp_path / "tuned" / "results.json").read_text())["this model"] == {"accuracy": 0.7}


def test_an_interrupted_run_goes_on_exactly(finetune, tmp_path, monkeypatch, capsys):
    """By a signal at step 7, between evaluations, and by a crash at step 14, after the checkpoint of step 12."""
    import finetune as command
    from parts import tuning as module

    data = write(tmp_path / "rows.jsonl", rows_of("classification"))
    arguments = ("--data", data, "--steps", 20, "--eval-every", 5, "--save-every", 4, "--dropout", 0.1, "--patience", 4)
    tuned, original = tmp_path / "tuned", module.update

    def run(*more: object) -> int:
        return finetune(*arguments, *more)

    def result() -> tuple[dict, dict, dict]:
        lines = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
        losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
        weights = xk.XLNetForSequenceClassification.from_pretrained(tuned).state_dict()
        return losses, json.loads((tuned / "results.json").read_text()), weights

    assert run() in (0, 1)
    losses, reached, weights = result()
    assert list(losses) == list(range(1, 21)) and not (tuned / "checkpoints").exists()

    def update(*args):
        if args[2].last_epoch == 6:
            signal.raise_signal(signal.SIGINT)
        if args[2].last_epoch == 13:
            raise RuntimeError("a crash")
        return original(*args)

    monkeypatch.setattr(module, "update", update)
    assert run("--overwrite") == 130
    assert xk.XLNetForSequenceClassification.from_pretrained(tuned).config.num_labels == 3  # of use already
    assert run() == 2 and "--resume goes on from it, --overwrite removes it" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="a crash"):
        run("--resume")
    monkeypatch.undo()
    monkeypatch.setattr(module, "SMALL", None)  # the checkpoint knows
    assert [path.name for path in (tuned / "checkpoints").glob("step-*")] == ["step-00000012"]
    assert run("--resume", "--lr", 1) == 2 and "--lr is 0.003, not 1.0" in capsys.readouterr().err
    rows = data.read_text()
    data.write_text(rows + rows.splitlines()[0] + "\n")
    assert run("--resume") == 2 and "has changed since" in capsys.readouterr().err
    data.write_text(rows)
    assert command.main(["--output", str(tuned), "--resume", "--async-save"]) in (0, 1)  # needs no other option
    found = result()
    assert found[:2] == (losses, reached)
    assert all(torch.equal(x, weights[name]) for name, x in found[2].items())
    assert run("--resume") == 2 and "there is no checkpoint in" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_leaves_checkpoints_alone(finetune, tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", rows_of("classification"))
    arguments = ("--data", data, "--steps", 10, "--save-every", 1, "--eval-every", 100, "--async-save")
    assert finetune(*arguments, "--lr", "1e30", "--clip", "1e30", "--warmup", 0) == 1
    assert "the last checkpoint is as it was" in capsys.readouterr().err
    done = [json.loads(line)["step"] for line in (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()]
    last = [path.name for path in (tmp_path / "tuned" / "checkpoints").glob("step-*")]
    assert max(done) < 10 and last == [f"step-{max(done):08d}"]
    assert not (tmp_path / "tuned" / "model.safetensors").exists()
    from finetune import main

    assert main(["--output", str(tmp_path / "tuned"), "--resume"]) == 1  # readable, and fails where it failed


def test_a_folder_of_datasets(finetune, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows_of("classification")).save_to_disk(tmp_path / "rows")
    assert finetune("--data", tmp_path / "rows", "--steps", 1) in (0, 1)
    assert "77 rows, tested on 19 others" in (tmp_path / "tuned" / "README.md").read_text()


def test_what_does_not_fit_is_refused(finetune, tmp_path, capsys):
    def refused(*arguments: object) -> str:
        assert finetune(*arguments) == 2
        return capsys.readouterr().err

    data = write(tmp_path / "rows.jsonl", rows_of("classification"))
    assert "there is no checkpoint in" in refused("--checkpoint", tmp_path / "nowhere")
    assert "there is no file or folder" in refused("--data", tmp_path / "nowhere.csv")
    assert "has no column 'words', it has text, label" in refused("--data", data, "--text-column", "words")
    assert "must be .csv, .tsv, .jsonl" in refused("--data", write(tmp_path / "rows.txt", rows_of("classification")))
    assert "are for classification alone" in refused("--task", "answer")
    assert "must hold numbers" in refused("--data", data, "--task", "regression")
    one = write(tmp_path / "one.jsonl", [{"text": "a", "label": 1}] * 8)
    assert "column 'label' has 1 class" in refused("--data", one)
    lost = write(tmp_path / "lost.jsonl", [{"text": "red", "question": "?", "label": "blue"}] * 8)
    assert "the answer 'blue' is not in its context" in refused("--data", lost, "--task", "answer")
    assert "is none of the training rows': x, y" in refused(
        "--data", write(tmp_path / "two.jsonl", [{"text": "a", "label": x} for x in "xy" * 4]), "--validation", data
    )
    assert finetune("--data", data, "--steps", 1) in (0, 1)
    before = (tmp_path / "tuned" / "model.safetensors").read_bytes()
    assert "tuned is there already: --overwrite replaces it" in refused("--data", data, "--steps", 1)
    assert (tmp_path / "tuned" / "model.safetensors").read_bytes() == before
    assert finetune("--data", data, "--steps", 1, "--overwrite", "--seed", 5) in (0, 1)
    assert (tmp_path / "tuned" / "model.safetensors").read_bytes() != before


def test_spans_and_overlaps():
    """By hand: of two spans one is found; of three words two; articles and punctuation do not count."""
    from parts.scores import bio_spans, of_answers, of_tags

    assert bio_spans(["B-a", "I-a", "B-a", "O", "I-b"]) == [(0, 2, "a"), (2, 3, "a"), (4, 5, "b")]
    tags = of_tags([["B-a", "O", "O"]], [["B-a", "O", "B-b"]])
    assert tags["f1"] == pytest.approx(2 / 3) and tags["accuracy"] == pytest.approx(2 / 3)
    answers = of_answers(["The big cat.", "red"], ["big cat", "blue red"])
    assert answers == {"f1": pytest.approx((1 + 2 / 3) / 2), "exact": 0.5}


@pytest.mark.parametrize("objective", ["permutation", "autoregressive", "masked"])
def test_every_objective_can_be_tuned(tmp_path, objective, capsys):
    """The first on the passages that come with Python, which need no --data."""
    from finetune import main as tune
    from pretrain import main

    sizes = "--seq-len 32 --mem-len 16 --layers 1 --d-model 16 --heads 2 --eval-batches 2 --steps 1 --threads 1".split()
    assert main([*sizes, "--objective", objective, "--output", str(tmp_path / "run")]) == 0
    places = ["--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "tuned")]
    if objective != "permutation":
        places += ["--data", str(write(tmp_path / "rows.jsonl", rows_of("classification")))]
    assert tune([*SMALL, *places, "--steps", "2", "--eval-every", "2"]) in (0, 1)  # two steps may not be enough
    assert "testing" in capsys.readouterr().out
    tuned = xk.XLNetForSequenceClassification.from_pretrained(tmp_path / "tuned")
    assert (tuned.config.num_labels, tuned.config.d_model) == (8 if objective == "permutation" else 3, 16)
    assert tuned.config.attn_type == ("uni" if objective == "autoregressive" else "bi")
