"""The benchmark of speech encoders, on tiny ones."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.test_model import has_matplotlib, quiet, rows_of  # noqa: F401
from tests.integrations import conventions

pytest.importorskip("rich")

pytestmark = pytest.mark.usefixtures("scripts", "one_thread")


def test_speech_layers_compute_the_same_and_are_timed(tmp_path, capsys):
    import speech

    pytest.importorskip("transformers.models.parakeet")
    output = tmp_path / "speech.json"
    plot = ["--plot"] if has_matplotlib() else []
    assert speech.main(["--device", "cpu", "--quick", "--output", str(output), *plot]) == 0
    shown = capsys.readouterr().out
    assert "audio, L x B" in shown and "2 s: 25 x 1" in shown and "✗" not in shown
    rows = {(row["section"], row["length"], row["direction"], row["implementation"]): row for row in rows_of(output)}
    # Beyond 30 frames the attention's forward pass alone, and the outputs of some frames are checked.
    groups = [(section, 25, direction) for section in speech.PARTS.values() for direction in ("forward", "backward")]
    names = (speech.OWN, "transformers sdpa", "transformers eager")
    assert rows.keys() == {(*group, name) for group in [*groups, ("speech", 50, "forward")] for name in names}
    for (*group, name), row in rows.items():
        assert row["status"] == "ok" and row["check"]["passed"] and row["samples"] >= 3, row
        best = min(rows[(*group, other)]["median_ms"] for other in names[1:])
        assert row["speedup"] == pytest.approx(best / row["median_ms"], rel=1e-2), name
    gradients = rows["speech-layer", 25, "backward", speech.OWN]["check"]["errors"]
    assert {"input", "bias_u", "bias_v", "relative_k_proj.weight", "k_proj.weight"} <= gradients.keys()
    if plot:
        assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("seconds", [2, 4])
def test_a_wrong_speech_layer_is_found(tmp_path, monkeypatch, capsys, seconds):
    import speech

    pytest.importorskip("transformers.models.parakeet")

    right = speech.accelerate

    def other_weights(layer, **options):
        layer.bias_v.data += 0.1
        return right(layer, **options)

    monkeypatch.setattr(speech, "accelerate", other_weights)
    arguments = ["--device", "cpu", "--quick", "--audio", str(seconds), "--parts", "attention"]
    assert speech.main([*arguments, "--implementations", speech.OWN, "--output", str(tmp_path / "speech.json")]) == 1
    assert "WRONG xlnet_kernels, forward" in capsys.readouterr().out


def test_toolkits_that_are_not_there_are_skipped_and_others_are_checked(tmp_path, monkeypatch, capsys):
    """With an attention of ours in the place of NeMo's layer."""
    import speech
    from lib import toolkits

    def build(length, d_model, heads):
        table = torch.randn(1, 2 * length - 1, d_model)
        attention = conventions.RelPositionMultiHeadAttention()
        return toolkits.Layer(attention, lambda one, x: one(x, x, x, None, table.to(x)), {"NeMo": lambda one: None})

    monkeypatch.setitem(toolkits._BUILD, "nemo", build)
    output = tmp_path / "toolkits.json"
    arguments = ["--device", "cpu", "--quick", "--output", str(output), "--toolkit", "nemo", "espnet"]
    with conventions.installed():  # of ESPnet nothing but the attention
        assert speech.main(arguments) == 0
    rows = [row for row in rows_of(output) if row["section"] == speech.TOOLKIT]
    for row in rows:
        if row["case"].startswith("nemo"):
            assert row["status"] == "ok" and row["check"]["passed"] and "speedup" in row, row
        else:
            assert row["status"] == "skipped" and "espnet cannot be imported" in row["reason"]
    found = {(row["case"], row["implementation"], row["direction"]) for row in rows}
    assert {("nemo, 2 s: 25 x 1", name, "backward") for name in (speech.OWN, "NeMo")} <= found
    assert "vs toolkit" in capsys.readouterr().out


def test_whole_encoders_are_checked_against_their_own_code(tmp_path, monkeypatch, capsys):
    import speech
    from lib import measure

    monkeypatch.setattr(measure, "MOST_ERRORS", 1000)

    pytest.importorskip("transformers.models.parakeet")
    output = tmp_path / "encoders.json"
    assert speech.main(["--device", "cpu", "--quick", "--layers", "2", "--once", "--output", str(output)]) == 0
    rows = [row for row in rows_of(output) if row["case"].startswith("parakeet, 2 layers")]
    found = {(row["length"], row["direction"], row["implementation"]): row for row in rows}
    groups = [(25, "forward"), (25, "backward"), (50, "forward")]
    names = (speech.OWN, "transformers sdpa", "transformers eager")
    assert found.keys() == {(*group, name) for group in groups for name in names}
    for row in rows:
        assert row["section"] == speech.ENCODER and row["check"]["passed"] and row["samples"] == 1, row
    check = found[25, "backward", speech.OWN]["check"]
    assert check["missed_by_peer"].keys() == check["errors"].keys() > {"input", "layers.1.self_attn.bias_u"}
    assert "encoder, audio, L x B" in capsys.readouterr().out


def test_encoders_under_a_window_are_checked_against_it(tmp_path, monkeypatch):
    """One that sees everything is wrong."""
    import speech

    pytest.importorskip("transformers.models.parakeet")
    output = tmp_path / "window.json"
    arguments = ["--device", "cpu", "--quick", "--layers", "1", "--once", "--audio", "2", "--toolkit", "parakeet"]
    arguments += ["--window", "3", "2", "--output", str(output)]
    assert speech.main(arguments) == 0
    assert {(row["case"], row["implementation"], row["direction"]) for row in rows_of(output)} == {
        ("parakeet, 1 layers, window 3, 2, 2 s: 25 x 1", speech.OWN, direction) for direction in speech.DIRECTIONS
    }
    right = speech.accelerate

    def forgets(module, *given, window, **options):
        dtype = next(module.parameters()).dtype
        return right(module, *given, **options, window=window if dtype == torch.float64 else None)

    monkeypatch.setattr(speech, "accelerate", forgets)
    assert speech.main(arguments) == 1


@pytest.mark.parametrize("broken", ["input", "layers.0.self_attn.bias_v"])
def test_a_wrong_encoder_is_found(tmp_path, monkeypatch, capsys, broken):
    """Outputs of wrong weights, or a gradient alone."""
    import speech

    pytest.importorskip("transformers.models.parakeet")
    right = speech.accelerate

    def other(module, *given, **options):
        parameter = dict(module.named_parameters()).get(broken)
        if parameter is None:
            module.layers[0].self_attn.bias_v.data += 0.1
        else:
            parameter.register_hook(lambda gradient: gradient * 1.1)
        return right(module, *given, **options)

    monkeypatch.setattr(speech, "accelerate", other)
    arguments = ["--device", "cpu", "--quick", "--layers", "1", "--once", "--audio", "2", "--toolkit", "parakeet"]
    assert speech.main([*arguments, "--output", str(tmp_path / "encoders.json")]) == 1
    wrong = capsys.readouterr().out
    assert "WRONG xlnet_kernels, fwd + bwd" in wrong and ("WRONG xlnet_kernels, forward" in wrong) == (
        broken == "input"
    )


def test_what_a_peer_misses_is_allowed_twice():
    """With a peer a tolerance is relative to the weight's largest value in any layer, without one to its own."""
    from lib.harness import Run
    from lib.measure import compare

    large, small, other = "layers.0.weight", "layers.1.weight", "layers.1.bias"
    exact = {large: torch.tensor([100.0]), small: torch.tensor([1.0]), other: torch.tensor([1.0])}
    run = Run(lambda: torch.zeros(()), exact, torch.zeros(()))

    def passed(missed: dict | None, **errors: float) -> bool:
        outputs = tuple(exact[name].double() + errors.get(name, 0.0) for name in exact)
        return compare(run, "backward", outputs, exact, torch.float32, missed)["passed"]

    assert passed(None, **{large: 4e-3, small: 4e-5, other: 4e-5})
    assert not passed(None, **{small: 4e-4}) and not passed({}, **{other: 4e-4}) and not passed({}, **{large: 2e-2})
    assert passed({}, **{small: 4e-3}) and not passed({}, **{small: 6e-3})
    assert passed({small: 4e-3}, **{small: 6e-3}) and not passed({small: 4e-3}, **{small: 9e-3})
    assert not passed({small: 1.0}, **{small: float("nan")})


def test_transformers_is_left_out_where_its_maps_do_not_fit(tmp_path, monkeypatch):
    import speech
    from lib import measure

    pytest.importorskip("transformers.models.parakeet")
    monkeypatch.setattr(measure, "free_memory", lambda device: 100_000)
    output = tmp_path / "speech.json"
    arguments = ["--device", "cpu", "--quick", "--audio", "4", "--implementations", speech.OWN, "sdpa"]
    assert speech.main([*arguments, "--output", str(output)]) == 0
    ours, theirs = rows_of(output)
    assert ours["status"] == "ok" and "speedup" not in ours
    assert (theirs["status"], theirs["reason"]) == ("skipped", "would need about 0.0 GB, 0.0 GB are free")


def test_an_encoder_under_a_window_is_checked_on_its_first_frames(tmp_path, monkeypatch):
    import speech

    pytest.importorskip("transformers.models.parakeet")
    output = tmp_path / "window.json"
    arguments = ["--device", "cpu", "--quick", "--toolkit", "parakeet", "--layers", "2", "--window", "8", "8", "--once"]
    arguments += ["--audio", "20", "--from-full", "--output", str(output)]
    assert speech.main(arguments) == 0
    (row,) = rows_of(output)
    assert row["status"] == "ok" and 0 < row["distance_from_full"] < 1
    monkeypatch.setattr(speech, "CONVOLUTION", -40)  # fewer frames than those that are checked depend on
    assert speech.main(arguments) == 1
    assert not rows_of(output)[0]["check"]["passed"]


def test_a_distance_from_full_attention_needs_a_window(capsys):
    import speech

    with pytest.raises(SystemExit):
        speech.main(["--toolkit", "parakeet", "--from-full"])
    assert "--from-full needs --window" in capsys.readouterr().err
