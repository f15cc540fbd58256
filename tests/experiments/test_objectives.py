"""A tiny run of objectives.py: its rows, and the identities that hold for any weights."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math

import numpy as np
import pytest
import torch

import xlnet_kernels as xk
from xlnet_kernels.pretraining import PermutationLM, TokenFile, Vocabulary, write_tokens

for name in ("rich", "sklearn", "tokenizers", "transformers"):
    pytest.importorskip(name)

pytestmark = [
    pytest.mark.usefixtures("scripts", "one_thread"),
    pytest.mark.skipif(not xk.backends()["cpu"].available, reason="the CPU backend is not built"),
]

# float32: 2 x 6 log-probabilities of about 6 nats, each off by a few roundings of its size
ROUNDING = 12 * 6 * 4 * 2.0**-24


def run(output, *arguments: str) -> dict:
    import objectives

    assert objectives.main(["--quick", "--output", str(output), *arguments]) == 0
    results = json.loads(output.read_text())
    assert results["complete"]
    return results


def rows_of(results: dict, section: str) -> list[dict]:
    return [row for row in results["rows"] if row["section"] == section]


def test_models_experiments(tmp_path, capsys):
    plot = ["--plot"] if importlib.util.find_spec("matplotlib") else []
    output, models = tmp_path / "objectives.json", tmp_path / "models"
    results = run(output, "--experiments", "pairs", "streams", "memory", "--models", str(models), *plot)
    assert len({row["parameters"] for row in results["rows"]}) == 1

    pairs = {row["implementation"]: row for row in rows_of(results, "pairs")}
    assert list(pairs) == ["permutation", "masked", "autoregressive"]
    assert len({row["tokens"] for row in pairs.values()}) == 1
    for one, masked in zip(pairs["permutation"]["bins"], pairs["masked"]["bins"], strict=True):
        assert one["pairs"] == masked["pairs"] > 0
        # a masked LM's joint probability is the product, in any order; the other one's is neither
        assert masked["largest_gain"] <= ROUNDING and masked["order_matters"] <= ROUNDING
        assert one["largest_gain"] > 10 * ROUNDING and one["order_matters"] > 10 * ROUNDING
    assert all("gain" not in one for one in pairs["autoregressive"]["bins"])

    two, single = rows_of(results, "streams")
    assert two["own_token"] == 0 < two["earlier_token"] and single["other_position"] == 0 < two["other_position"]
    assert two["tokens"] == single["tokens"] and two["held_out"] == pairs["permutation"]["held_out"]

    memory = rows_of(results, "memory")
    assert [row["segments"] for row in memory] == [0, 2] and memory[0]["tokens"] == memory[1]["tokens"]
    for row in memory:
        assert len(row["by_position"]) == 8 and row["by_context"].keys() == {"8", "16", "24", "32"}
        assert row["held_out"] == row["by_memory"][str(8 * row["segments"])]
        assert set(row["recl"].values()) <= {8, 16, 24, 32} and row["recl"].keys() == {"1.0", "0.5", "0.1"}

    printed = capsys.readouterr().out
    assert "| below 1 |" in printed and "| single stream |" in printed and "| memory of 2 |" in printed
    if plot:
        assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    again(output, results, models)


def again(output, before: dict, models) -> None:
    """One experiment more: the rows of the others stay, and what was trained is not trained again."""
    import objectives

    after = run(output, "--experiments", "streams", "--models", str(models))
    for section in ("pairs", "memory"):
        assert rows_of(after, section) == rows_of(before, section)
    (two, _), (old, _) = rows_of(after, "streams"), rows_of(before, "streams")
    assert two == old and after["cpu_seconds"].keys() == before["cpu_seconds"].keys()
    other = ["--quick", "--output", str(output), "--experiments", "streams", "--steps", "3"]
    assert objectives.main(other) == 2 and json.loads(output.read_text()) == after


def test_fine_tuning_and_trainer(tmp_path, capsys):
    pytest.importorskip("accelerate")
    from claims.trainer import HALF, SAME, THEIRS

    results = run(tmp_path / "objectives.json", "--experiments", "context", "trainer")
    context = {(row["task"], row["implementation"]): row for row in rows_of(results, "context")}
    objectives = ("permutation", "masked", "autoregressive")
    assert context.keys() == {
        *((task, name) for task in ("classification", "tagging") for name in ("majority", *objectives)),
        ("classification", "bag of words"),
    }
    assert all(0 <= row[metric] <= 1 for row in context.values() for metric in ("accuracy", "f1"))

    trainer = {row["implementation"]: row for row in rows_of(results, "trainer")}
    assert list(trainer) == [THEIRS, *objectives, HALF, SAME]
    assert len({row["parameters"] for row in trainer.values()}) == 1
    assert {trainer[name]["tokens"] for name in (THEIRS, *objectives)} == {4 * 4 * 32}
    for name, row in trainer.items():
        assert math.isfinite(row["own"]) and ("held_out" in row) == (name != "autoregressive")
        if "held_out" in row:
            assert row["course"][-1][::2] == [row["steps"], row["held_out"]]
            # every second step, and the last one, which may be odd because two runs stop after a given time
            *earlier, last = (step for step, _, _ in row["course"])
            assert earlier == list(range(2, last, 2))
    printed = capsys.readouterr().out
    assert "| tagging | masked |" in printed and f"| {HALF} |" in printed


def test_common_targets_are_predicted_from_the_context_alone(tmp_path):
    import objectives
    from claims import trainer
    from claims.workshop import Workshop

    options = objectives.parse(["--quick"])
    workshop = Workshop(options, tmp_path)
    made = workshop.new_run("permutation", 0)
    (first, *_) = held_out = trainer.draw_targets(made, workshop)
    theirs = first.theirs
    assert torch.equal(theirs["input_ids"] == made.corpus.vocabulary.mask, first.hidden)
    assert torch.equal(theirs["input_ids"].where(~first.hidden, 0), first.tokens.where(~first.hidden, 0))
    assert torch.equal(first.labels[first.labels >= 0], theirs["labels"][theirs["labels"] >= 0])
    assert (first.labels >= 0).sum() == first.hidden.sum()
    mask_id = made.corpus.vocabulary.mask
    others = [x._replace(tokens=x.tokens.where(~x.hidden, 7)) for x in held_out]
    for loss in (trainer.of_permutation, trainer.of_masked):
        assert trainer.mean(made.model, held_out, loss, mask_id) == trainer.mean(made.model, others, loss, mask_id)
    assert made.model.training


def test_single_stream_has_the_same_targets_in_the_same_order():
    from claims.streams import SingleStreamLM

    vocabulary = Vocabulary(size=100, sep=4, cls=3, pad=5, mask=6)
    ids = np.random.default_rng(0).integers(10, 100, 40)
    two, one = (
        kind(8).example(ids, vocabulary, (40,), np.random.default_rng(1)) for kind in (PermutationLM, SingleStreamLM)
    )
    targets = two.target_positions
    order = targets[np.argsort(two.query_rank[targets])]
    assert np.array_equal(one.labels, ids[order]) and np.array_equal(one.output_rows[1:], order[:-1])
    assert one.output_rows[0] not in targets and one.target_positions is None
    assert np.array_equal(one.query_rank, two.query_rank) and np.array_equal(one.key_rank, two.key_rank)


def test_relative_effective_context_length():
    from claims.memory import relative_context

    flat = np.array([3.0, 3.0])
    better, best = np.array([2.0, 3.0]), np.array([2.0, 2.0])
    losses = {
        0: {8: flat, 16: flat, 24: flat},
        1: {8: flat, 16: better, 24: better},
        2: {8: flat, 16: better, 24: best},
    }
    assert [relative_context(losses, model, 1.0) for model in losses] == [8, 16, 24]
    # a model that is bad with little context gains nothing until it is better than the best one with as little
    bad = {0: {8: flat, 16: flat}, 1: {8: flat + 2, 16: flat + 1}}
    assert relative_context(bad, 1, 1.0) == 8
    # half a percent of all tokens, but 63 % of the hardest
    easy = np.ones(200)
    hard, known = easy.copy(), easy.copy()
    hard[7], known[7] = 5, 4
    few = {0: {8: hard, 16: known}}
    assert [relative_context(few, 0, share) for share in (1.0, 0.005)] == [8, 16]


def test_pairs_of_words(tmp_path):
    from claims.pairs import find_pairs
    from parts.tokenizer import train_tokenizer

    text = " they go to New York or to Rome or to New York again, to go;" * 10
    tokenizer = train_tokenizer("bpe", iter([text]), 300, show_progress=False)
    write_tokens(tmp_path / "tokens", [tokenizer.encode(text.encode())], tokenizer.vocabulary.size)
    tokens = TokenFile(tmp_path / "tokens")
    options = argparse.Namespace(least=5, occurrences=1000)
    found = {pair.text: pair for pair in find_pairs(tokens, tokens, tokenizer, options)}
    words = 10 * len("they go to New York or to Rome or to New York to".split())  # not again, and go;
    assert found["New York"].information == pytest.approx(math.log(20 * words / (20 * 20)))
    assert found["to New"].information == pytest.approx(math.log(20 * words / (40 * 20)))
    assert "York to" not in found and "again to" not in found
    first, second = found["New York"].first, found["New York"].second
    assert tokenizer.decode(tokens.read(first.begin, second.end)) == " New York"
    options.least = 21
    assert not find_pairs(tokens, tokens, tokenizer, options)


def test_tagged_words():
    from claims.context import tagged

    assert tagged("As is. A, b") == [{"text": ["as", "is", "a", "b"], "label": ["none", "stop", "comma", "none"]}]
    assert [len(piece["text"]) for piece in tagged("word " * 45 + ":")] == [40, 5]


def test_time_to_reach_the_other_loss():
    from lib.claims.report import markdown, reached

    common = {"section": "trainer", "seed": 0, "steps": 4, "own": 3.0}
    theirs = common | {"implementation": "transformers, Trainer", "cpu_seconds": 10.0, "held_out": 3.0}
    theirs["course"] = [[2, 5.0, 4.0], [4, 10.0, 3.0]]
    ours = common | {"implementation": "permutation", "cpu_seconds": 5.0, "held_out": 2.5}
    ours["course"] = [[2, 2.5, 3.0], [4, 5.0, 2.5]]
    slow = ours | {"implementation": "masked", "course": [[4, 5.0, 3.5]], "held_out": 3.5}
    rows = [theirs, ours, slow]
    assert [reached(row, rows) for row in rows] == [1.0, 0.25, None]
    facts = {"environment": {"cpu": "a processor", "torch": "2"}, "text": {"bytes": 10}, "cpu_seconds": {}}
    settings = {"layers": 1, "d_model": 8, "vocab": 300, "seeds": [0]}
    page = markdown({"rows": rows, "settings": settings} | facts)
    assert "| permutation | 4 | 5.0 | 2.500 | 3.000 | 0.25 |" in page and "never with 1 of 1 seeds |" in page
