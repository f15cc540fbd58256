"""`make gpu-counts`: what is counted again, and what a results file keeps."""

from __future__ import annotations

import contextlib
import json
import sys

import pytest

from tests import ROOT

pytest.importorskip("triton")
import triton  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets in this process", allow_module_level=True)

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_counts  # noqa: E402
import long_counts  # noqa: E402
from lib.machine.machine import Counts  # noqa: E402
from lib.machine.machine_code import Line, MachineCode  # noqa: E402
from lib.machine.triton_driver import Launch  # noqa: E402

KERNELS, WIDTHS = ("plain", "triton", "cuda"), (64, 128)


def row(kernel, head_dim, bound):
    return {
        "kernel": kernel, "direction": "forward", "dtype": "bfloat16", "head_dim": head_dim, "architecture": 80,
        "length": 2048, "case": "none", "bound_cycles": bound, "bound_by": "issue", "ratio": 2.0,
        "ratio_to_limit": 1.0, "spilled_bytes": 0,
    }  # fmt: skip


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """A results file with rows of three kernels, and how to run main on it: every count is 300 cycles."""
    file, ran = tmp_path / "counts.json", []
    monkeypatch.setattr(gpu_counts, "PRODUCTS", {"forward": 2})
    monkeypatch.setattr(gpu_counts, "REPORTED", (2048,))
    monkeypatch.setattr(gpu_counts, "ours", lambda *args: ran.append(args[:3]) or {"forward": []})
    monkeypatch.setattr(gpu_counts, "best_plain", lambda *args: ran.append(("plain", *args[1:3])) or {})

    monkeypatch.setattr(gpu_counts, "row", lambda kernel, _, head_dim, *rest: row(kernel, head_dim, 300.0))
    before = [row(kernel, width, 100.0) for width in WIDTHS for kernel in KERNELS]

    def run(*arguments):
        file.write_text(json.dumps({"rows": before}))
        some = ("--architectures", "80", "--cases", "none")
        monkeypatch.setattr(sys, "argv", ["gpu_counts.py", *map(str, arguments), *some])
        gpu_counts.main()
        return {(r["kernel"], r["head_dim"]): r for r in json.loads(file.read_text())["rows"]}, ran

    return file, run


def test_an_update_counts_some_kernels_and_keeps_the_rest(counted, capsys):
    file, run = counted
    rows, ran = run("--update", file, "--kernels", "triton")
    assert set(ran) == {("triton", 80, 64), ("triton", 80, 128)}
    assert list(rows) == [(kernel, width) for width in WIDTHS for kernel in KERNELS]
    for (kernel, _), found in rows.items():
        assert found["bound_cycles"] == (300 if kernel == "triton" else 100)
    assert rows["triton", 64]["ratio"] == 3  # to the plain kernel's of the file
    assert "cuda" not in capsys.readouterr().out  # what is printed was counted now


def test_without_an_update_plain_attention_is_counted_too(counted):
    file, run = counted
    rows, ran = run("--output", file, "--kernels", "triton")
    assert ("plain", 80, 64) in ran and {kernel for kernel, _ in rows} == {"plain", "triton"}
    assert rows["triton", 64]["ratio"] == 1


def test_a_backend_that_is_not_counted_is_named(counted, capsys, monkeypatch):
    file, run = counted
    monkeypatch.setattr(gpu_counts.cuda_driver, "unavailable", lambda: "no nvcc")
    rows, _ = run("--update", file, "--kernels", "triton", "cuda")
    assert rows["cuda", 64]["bound_cycles"] == 100 and capsys.readouterr().err == "cuda is left out: no nvcc\n"


@pytest.mark.parametrize("case", gpu_counts.CASES)
def test_a_case_is_what_it_says(monkeypatch, case):
    given = {}
    monkeypatch.setattr(gpu_counts, "serving", lambda *args, **options: contextlib.nullcontext(Record()))

    class Record:
        launches = ()

    def attention(query, key, value, rel_key, **options):
        given.update(options, rows=query.shape[2])
        return query

    monkeypatch.setattr(gpu_counts.xk, "rel_attention", attention)
    gpu_counts.ours("cuda", 80, 64, case, 12)
    assert given["rows"] == (14 if case == "two streams" else 12)
    assert ("mask" in given) == (case != "none") and ("dropout_p" in given) == (case == "dropout")
    assert given["deterministic"] == (case == "deterministic")
    if case == "two streams":
        assert given["query_positions"].tolist() == [[*range(12), 0, 6]]
        assert given["mask"].query_rank.shape == given["segments"].query_ids.shape == (1, 14)


def test_a_row_has_the_counts_of_each_launch(monkeypatch):
    """At the row's length, from those of shorter ones."""
    code = MachineCode(9, 16, [[(1, "FADD"), (1, "FADD"), (1, "LDL")]], {1: Line(1, "")})
    monkeypatch.setattr(gpu_counts, "assemble", lambda *args: code)

    def launch(name, issued, wavefronts):
        counts = Counts(
            instructions={"float": issued}, tensor={"mma": issued}, shared_wavefronts=wavefronts, lines={1: issued}
        )
        return Launch(name, (1, 1, 1), 32, 0, "ptx", counts)

    runs = {n: [launch("prepare", 3 * n, 0), launch("main", n * n + 5, 2 * n * n)] for n in (256, 512, 768)}
    row = gpu_counts.row("cuda", "forward", 64, 80, "none", runs, 2048)
    prepare, main = row["launches"]
    assert prepare["name"] == "prepare" and prepare["instructions"] == {"float": 3 * 2048}
    assert main["machine_instructions"] == {"float": 2 * (2048**2 + 5), "spills": 2048**2 + 5}
    assert row["spilled_bytes"] == 32 and row["machine_to_ptx"] == 3
    assert main["tensor"] == {"mma": 2048**2 + 5} and main["shared_wavefronts"] == 2 * 2048**2
    assert main["bound_by"] == "shared memory" and main["bound_cycles"] == 2048
    assert prepare["bound_cycles"] + main["bound_cycles"] == pytest.approx(row["bound_cycles"], abs=0.1)
    assert row["predicted_cycles"] is None and row["launches_at_bound"] == 2  # code without steps is not simulated


@pytest.mark.parametrize(
    ("cycles", "bound", "expected"),
    [(100, 400, (500, 500, False)), (100, 600, (600, 500, True)), (None, 600, (600, None, True))],
)
def test_a_launch_has_its_simulation_beside_its_prediction(monkeypatch, cycles, bound, expected):
    """Ten blocks, of which two run side by side."""
    found = None if cycles is None else gpu_counts.timing.Prediction(2, cycles)
    monkeypatch.setattr(gpu_counts, "assemble", lambda *_: None)
    monkeypatch.setattr(gpu_counts.timing, "predict", lambda *_: found)
    launch = Launch("main", (5, 2, 1), 128, 0, "ptx", Counts())
    made = gpu_counts.prediction([launch], 80, [1], bound)
    assert (made["predicted_cycles"], made["simulated_cycles"], made["at_bound"]) == expected
    assert made["blocks"] == 10 and made["resident"] == (found and 2)


def test_a_launch_that_is_simulated_at_some_lengths_is_not_predicted(monkeypatch):
    found = iter([gpu_counts.timing.Prediction(2, 100), None, gpu_counts.timing.Prediction(2, 300)])
    monkeypatch.setattr(gpu_counts, "assemble", lambda *_: None)
    monkeypatch.setattr(gpu_counts.timing, "predict", lambda *_: next(found))
    launch = Launch("main", (5, 2, 1), 128, 0, "ptx", Counts())
    assert gpu_counts.prediction([launch] * 3, 80, [1, 1, 1], 7)["simulated_cycles"] is None


@pytest.mark.parametrize("case", long_counts.CASES)
def test_a_window_costs_as_much_a_key_in_a_sequence_twice_as_long(case):
    """Forward; longer than the 4096 keys whose bounds one step of the search for a span reads."""
    issued = []
    for length in (4096, 8192):
        forward = long_counts.launches(80, case, length, 64, backward=False)["forward"]
        issued.append(sum(launch.counts.issued for launch in forward))
    assert 1.9 * issued[0] <= issued[1] <= 2.1 * issued[0]


def test_counts_of_windows_are_written(monkeypatch, tmp_path):
    monkeypatch.setattr(long_counts, "launches", lambda architecture, case, length, window: {"forward": [length]})
    monkeypatch.setattr(long_counts, "row", lambda lengths, *_: {"bound_cycles": lengths[0] ** 2, "issued": 1})
    file = tmp_path / "counts.json"
    monkeypatch.setattr(sys, "argv", ["long_counts.py", "--architectures", "80", "--output", str(file)])
    long_counts.main()
    found = json.loads(file.read_text())
    assert found["window"] == 512
    assert [row["growth"] for row in found["rows"]] == [None, 2.0] * len(long_counts.CASES)
