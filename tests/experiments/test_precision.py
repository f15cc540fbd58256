"""The benchmark of 16-bit gradients and training, tiny: what it measures is there and has the right sign."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

import xlnet_kernels as xk

pytest.importorskip("rich")

pytestmark = [
    pytest.mark.usefixtures("scripts", "one_thread"),
    pytest.mark.skipif(not xk.backends()["cpu"].available, reason="the CPU backend is not built"),
]

# Three roundings for one where products take 16 bits: inputs, P and dS (tests/operator/test_trusted_gradients.py)
IN_BFLOAT16 = 3e-3 * 3**0.5


def run(tmp_path, *arguments: str) -> dict:
    import precision

    output = tmp_path / "precision.json"
    assert precision.main(["--quick", "--threads", "1", "--output", str(output), *arguments]) == 0
    results = json.loads(output.read_text())
    assert results["complete"]
    return results


def test_errors_and_cost_of_the_residual(tmp_path, capsys):
    from lib.precision import OWN, ROUNDED, SDPA

    rows = run(tmp_path, "--sections", "errors", "cost", "--lengths", "64")["rows"]
    errors = {(r["dtype"], r["case"], r["implementation"]): r["errors"] for r in rows if r["section"] == "errors"}
    assert len(errors) == 2 * 5 * 3
    for (dtype, case, name), found in errors.items():
        if name == OWN:
            allowed = IN_BFLOAT16 if dtype == "bfloat16" else 4e-4
            assert max(found.values()) <= allowed < errors[dtype, case, ROUNDED]["query"]
        elif name == SDPA:
            assert found.keys() == {"content_bias", "query", "key", "value"}
    cost = {(row["direction"], row["implementation"]): row for row in rows if row["section"] == "cost"}
    for direction in ("forward", "backward"):
        extra = cost[direction, OWN]["saved_bytes"] - cost[direction, ROUNDED]["saved_bytes"]
        assert extra == cost[direction, OWN]["out_bytes"] == 64 * 16 * 2
    assert "| bfloat16 | sharp, values 4 |" in capsys.readouterr().out


@pytest.mark.parametrize("objective", ["autoregressive", "permutation"])
def test_kinds_of_training(tmp_path, capsys, objective):
    import precision
    from lib.precision import OWN, ROUNDED

    plot = ["--plot"] if importlib.util.find_spec("matplotlib") else []
    results = run(tmp_path, "--sections", "training", "--objective", objective, *plot)
    rows = {row["implementation"]: row for row in results["rows"]}
    assert list(rows) == [kind.name for kind in precision.KINDS]
    first = rows["float32"]["held_out"]
    for kind in precision.KINDS:
        row = rows[kind.name]
        assert [step for step, _ in row["held_out"]] == [2, 4] and row["held_out"][1][1] < row["held_out"][0][1]
        assert row["held_out"][1][1] == pytest.approx(first[1][1], rel=1e-2)
        assert [probe["step"] for probe in row["errors"]] == ([1, 3] if kind.has_16_bits else [])
        for probe in row["errors"]:
            assert probe["attention"][OWN][0] < IN_BFLOAT16 and probe["attention"][OWN] != probe["attention"][ROUNDED]
            assert 1e-4 < probe["model"][OWN] < 0.05
    assert "| bfloat16 weights |" in capsys.readouterr().out
    if plot:
        assert (tmp_path / "precision.png").read_bytes().startswith(b"\x89PNG")


def test_a_16_bit_model_has_float32_gradients():
    import precision

    model = torch.nn.Linear(3, 2)
    low = precision.rounded_copy(model)
    low(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert all(parameter.grad is None for parameter in low.parameters())
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    with torch.no_grad():
        model.weight.fill_(1.001)
    precision.copy_weights(model, low)
    assert (low.weight == 1).all()
