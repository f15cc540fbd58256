"""The benchmarks of whole models and of evaluation with memory, on tiny ones."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

pytest.importorskip("rich")

pytestmark = pytest.mark.usefixtures("scripts", "one_thread")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """A run sets a signal handler and hides warnings."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # with all of transformers in memory slower than tiny models
    with warnings.catch_warnings():
        yield


def rows_of(path):
    results = json.loads(path.read_text())
    assert results["complete"]
    return results["rows"]


def test_models_compute_the_same_and_are_timed(tmp_path, monkeypatch, capsys):
    import model
    from lib import measure

    monkeypatch.setattr(measure, "MOST_ERRORS", 1000)

    pytest.importorskip("transformers")
    output = tmp_path / "model.json"
    names = (model.OWN, model.OWN_PROJECTED, model.THEIRS)
    plot = ["--plot"] if has_matplotlib() else []
    assert model.main(["--device", "cpu", "--quick", "--implementations", *names, "--output", str(output), *plot]) == 0
    shown = capsys.readouterr().out
    assert "training step" in shown and "8 targets, 48 x 1 + 24" in shown and "✗" not in shown
    rows = {(row["case"], row["implementation"], row["direction"]): row for row in rows_of(output)}
    cases = [f"{targets}, 48 x 1{memory}" for targets in ("8 targets", "no targets") for memory in ("", " + 24")]
    for case in cases:
        for name in names:
            if name == model.OWN_PROJECTED and "+" not in case:
                assert (case, name, "forward") not in rows
                continue
            for direction in ("forward", "backward"):
                row = rows[case, name, direction]
                if name == model.OWN_PROJECTED and direction == "backward":
                    assert (row["status"], row["reason"]) == ("skipped", "for inference only")
                    continue
                assert row["status"] == "ok", row
                assert row["check"]["passed"] and row["samples"] >= 3
                base = rows[case, model.THEIRS, direction]["median_ms"]
                assert row["speedup"] == pytest.approx(base / row["median_ms"], rel=1e-2)
        gradients = rows[case, model.OWN, "backward"]["check"]["errors"]
        assert {"transformer.word_embedding.weight", "transformer.layer.1.ff.layer_2.bias"} <= gradients.keys()
    if plot:
        assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_several_lengths_of_a_named_size(tmp_path, monkeypatch, capsys):
    import model

    pytest.importorskip("transformers")
    options = model.parse(["--device", "cpu", "--size", "large", "--d-inner", "96"])
    assert (options.layers, options.d_model, options.heads, options.d_inner) == (24, 1024, 16, 96)
    options = model.parse(["--device", "cpu"])
    assert (options.layers, options.d_model, options.heads, options.d_inner) == (12, 768, 12, 3072)

    output = tmp_path / "model.json"
    one = 2 * 4 * 8 * model.MAPS  # bytes for each element of a map: layers, heads, float64
    monkeypatch.setattr(model, "free_memory", lambda device: 2 * one * 48 * 48)
    arguments = ["--device", "cpu", "--quick", "--tasks", "pre-training", "--mem-lens", "0", "--direction", "forward"]
    arguments += ["--implementations", model.OWN, "--lengths", "48", "64", "--output", str(output)]
    assert model.main(arguments) == 0
    short, long = rows_of(output)
    # the longer one's maps do not fit in float64: the shorter one's check stands for both
    assert short["length"] == 48 and short["check"]["passed"] and long["length"] == 64 and "check" not in long
    shown = capsys.readouterr().out
    assert shown.count("✓") == 2 and "8 targets, 48 x 1" in shown and "10 targets, 64 x 1" in shown
    assert "checked against float64 at L 48;" in shown


def test_a_wrong_model_is_found(tmp_path, monkeypatch, capsys):
    import model

    pytest.importorskip("transformers")

    def other_weights(case, models=model._models.__wrapped__):
        theirs, ours = models(case)
        with torch.no_grad():
            ours.transformer.layer[1].rel_attn.r_r_bias += 0.1
        return theirs, ours

    monkeypatch.setattr(model, "_models", other_weights)
    arguments = ["--device", "cpu", "--quick", "--tasks", "pre-training", "--mem-lens", "0", "--direction", "forward"]
    assert model.main([*arguments, "--implementations", model.OWN, "--output", str(tmp_path / "model.json")]) == 1
    shown = capsys.readouterr().out
    assert "WRONG xlnet_kernels, forward, 8 targets" in shown and "✗" in shown


def test_a_step_without_optimizer_is_gradients_alone(monkeypatch):
    import model

    pytest.importorskip("transformers")
    monkeypatch.setattr(model, "_optimizer", None)
    options = model.parse(["--device", "cpu", "--quick", "--optimizer", "none"])
    run = model.our_run(model.case_of(options, task="fine-tuning", length=48, batch=2, mem_len=0))
    assert len(run.step("backward")) == len(run.leaves)


def test_a_training_step_changes_no_weights(tmp_path):
    import model

    pytest.importorskip("transformers")
    options = model.parse(["--device", "cpu", "--quick"])
    case = model.case_of(options, task="pre-training", length=48, batch=2, mem_len=0)
    run = model.our_run(case)
    before = {name: x.detach().clone() for name, x in run.leaves.items()}
    first, second = run.step("backward"), run.step("backward")
    assert all(torch.equal(x, before[name]) for name, x in run.leaves.items())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(x.grad is None for x in run.leaves.values())


def test_half_precision_is_autocast(tmp_path):
    import model

    pytest.importorskip("transformers")
    output = tmp_path / "model.json"
    arguments = ["--device", "cpu", "--quick", "--tasks", "pre-training", "--mem-lens", "24", "--direction", "forward"]
    assert model.main([*arguments, "--dtype", "bfloat16", "--implementations", model.OWN, "--output", str(output)]) == 0
    for row in rows_of(output):
        # Rounded to 8 bits: further off than float32 can be.
        assert row["dtype"] == "bfloat16" and row["check"]["passed"] and row["check"]["errors"]["out"] > 1e-4


def test_precisions_are_steps_of_the_same_model(tmp_path, monkeypatch):
    import model

    pytest.importorskip("transformers")
    output, told = tmp_path / "model.json", []
    step = model.ModelRun.step

    def recorded(run, direction):
        told.append(torch.get_float32_matmul_precision())
        return step(run, direction)

    monkeypatch.setattr(model.ModelRun, "step", recorded)
    arguments = ["--device", "cpu", "--quick", "--tasks", "pre-training", "--mem-lens", "0", "--direction", "forward"]
    arguments += ["--precisions", "--implementations", model.OWN, "--output", str(output)]
    assert model.main(arguments) == 0
    rows = {row["implementation"]: row for row in rows_of(output)}
    assert set(rows) == {model.OWN, model.OWN_MEDIUM, model.OWN_BFLOAT16}
    assert all(row["check"]["passed"] for row in rows.values())
    assert rows[model.OWN_BFLOAT16]["check"]["errors"]["out"] > 1e-4  # rounded to 8 bits
    assert set(told) == {"highest", "medium"}
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("options", [["--dtype", "bfloat16"], ["--device", "cuda"]], ids=["dtype", "device"])
def test_precisions_are_compared_in_float32_on_the_cpu(options, capsys, monkeypatch):
    import model

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(SystemExit):
        model.parse(["--device", "cpu", "--quick", "--precisions", *options])
    assert "--precisions compares float32 on the CPU" in capsys.readouterr().err


def test_memory_and_window_agree_and_are_timed(tmp_path, capsys):
    import recurrence

    output = tmp_path / "recurrence.json"
    plot = ["--plot"] if has_matplotlib() else []
    assert recurrence.main(["--device", "cpu", "--quick", "--output", str(output), *plot]) == 0
    assert "tokens/s" in capsys.readouterr().out
    rows = {(row["length"], row["implementation"]): row for row in rows_of(output)}
    assert len(rows) == 6
    for length in (16, 32):
        window = rows[length, recurrence.WINDOW]
        for name, tokens in ((recurrence.SEGMENTS, 8), (recurrence.SINGLE, 1)):
            row = rows[length, name]
            assert row["check"]["passed"] and row["tokens_per_call"] == tokens
            assert row["tokens_per_s"] == pytest.approx(1e3 * tokens / row["median_ms"], rel=1e-3)
            assert row["speedup"] == pytest.approx(row["tokens_per_s"] / window["tokens_per_s"], rel=1e-2, abs=0.01)
    if plot:
        assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("broken", ["memory is lost", "not a number"])
def test_it_stops_where_memory_and_window_differ(tmp_path, monkeypatch, capsys, broken):
    import recurrence

    def wrong(model, text, length, segments, right=recurrence.with_memory):
        for segment in segments:
            found = next(right(model, text, length, [segment]))  # always from the beginning
            yield found if broken == "memory is lost" else found * torch.nan

    monkeypatch.setattr(recurrence, "with_memory", wrong)
    output = tmp_path / "recurrence.json"
    assert recurrence.main(["--device", "cpu", "--quick", "--output", str(output)]) == 1
    assert "L 16: log-probabilities are not the sliding window's" in capsys.readouterr().err


def test_published_factors_stand_beside_ours():
    from rich.console import Console

    from lib.report import markdown, tables

    row = {"section": "recurrence", "direction": "forward", "dtype": "float32", "batch": 1, "status": "ok"}
    row |= {"length": 3800, "median_ms": 200.0, "q1_ms": 190.0, "q3_ms": 210.0, "samples": 2}
    rows = [
        row | {"implementation": "memory, segments", "tokens_per_call": 100, "tokens_per_s": 500.0, "speedup": 99.5}
    ]
    rows.append(row | {"implementation": "sliding window", "tokens_per_call": 1, "status": "failed", "reason": "none"})
    with (console := Console(width=150)).capture() as shown:
        console.print(*tables(rows))
    assert "2.00 │ 1.90 - 2.10" in shown.get() and "99.50x" in shown.get() and "1,874x" in shown.get()
    from lib.harness import environment

    page = markdown({"benchmark": "recurrence", "rows": rows, "environment": environment("cpu")})
    assert "| 3800 | memory, segments of 100 |" in page and page.count("|---") == page.count("|\n|--") * 9


@pytest.mark.parametrize(
    "script,arguments",
    [
        ("model", ["--mem-lens", "-1"]),
        ("model", ["--vocab", "100"]),
        ("model", ["--dropout", "1"]),
        ("model", ["--d-model", "100"]),
        ("model", ["--lengths", "0"]),
        ("model", ["--size", "huge"]),
        ("capacity", ["--step", "8"]),
        ("capacity", ["--memory", "0"]),
        ("capacity", ["--vocab", "100"]),
        ("model", ["--implementations", "nobody"]),
        ("speech", ["--audio", "0.01"]),
        ("speech", ["--heads", "0"]),
        ("speech", ["--layers", "0"]),
        ("speech", ["--d-model", "100"]),
        ("speech", ["--implementations", "nobody"]),
        ("recurrence", ["--lengths", "4"]),
        ("recurrence", ["--vocab", "100"]),
        ("recurrence", ["--segment", "0"]),
        ("recurrence", ["--d-model", "100"]),
    ],
)
def test_bad_options_are_named(script, arguments, capsys):
    import importlib

    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(script).main(arguments)
    assert stopped.value.code == 2 and arguments[0] in capsys.readouterr().err


def has_matplotlib() -> bool:
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None
