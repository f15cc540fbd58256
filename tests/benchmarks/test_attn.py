"""The main job: a tiny run from the command line, batches by XLNet's rules, and what the table says of the broken."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests import ROOT

BENCHMARKS = ROOT / "benchmarks"

# The job needs the [bench] extra; the package itself does not.
pytest.importorskip("rich")

pytestmark = pytest.mark.usefixtures("scripts", "one_thread")


@pytest.fixture
def small_case():
    from lib.problem import Case

    return Case(length=48, batch=2, heads=2, head_dim=16)


@pytest.fixture
def bench():
    from lib.measure import DIRECTIONS, Bench

    return Bench("cpu", DIRECTIONS, seconds=0.01, rounds=(3, 3), budget=math.inf)


def run_job(*arguments, **options):
    command = [sys.executable, str(BENCHMARKS / "attn.py"), *map(str, arguments)]
    paths = [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, **options)


def test_precisions_of_the_cpu_are_medium_too(bench, small_case, monkeypatch):
    from lib import sections

    told = []

    def recorded(problem):
        run = plain(problem)
        forward = run.forward
        run.forward = lambda: (told.append(torch.get_float32_matmul_precision()), forward())[1]
        return run

    plain = sections.plain_sdpa
    monkeypatch.setattr(sections, "plain_sdpa", recorded)
    sections.precision(bench, "reference", [small_case])
    assert set(told) == {"highest", "high", "medium"}
    names = [row["implementation"] for row in bench.rows if row["direction"] == "forward"]
    own = [name for name in names if name.startswith("xlnet_kernels")]
    assert own == [f"xlnet_kernels {name}" for name in ("float32", "high float32", "medium float32", "bfloat16")]
    assert len(names) == 2 * len(own)  # plain SDPA, too
    assert all(row["check"]["passed"] for row in bench.rows if row["implementation"] in own)
    assert torch.get_float32_matmul_precision() == "highest"


def test_tiny_run(tmp_path):
    output = tmp_path / "new" / "results.json"
    names = ("--implementations", "reference", "plain", "--sections", "core", "streams")
    sizes = ("--lengths", "64", "--heads", "2", "--head-dim", "16", "--batch", "1", "--mem-len", "5")
    done = run_job("--device", "cpu", *sizes, *names, "--seconds", "0.01", "--output", output)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "xlnet_kernels reference" in done.stdout and "✓" in done.stdout and "median ms" in done.stdout
    assert "of GEMM: share of the rate" in done.stdout

    results = json.loads(output.read_text())
    assert results["complete"] and results["settings"]["lengths"] == [64]
    facts = results["environment"]
    assert {"cpu", "cpu_capability", "cores", "threads", "torch", "xlnet_kernels", "commit", "backends"} <= facts.keys()
    rows = {(row["section"], row["implementation"], row["direction"]): row for row in results["rows"]}
    for direction in ("forward", "backward"):
        row = rows["core", "xlnet_kernels reference", direction]
        assert row["check"]["passed"] and row["mem_len"] == 5 and row["dtype"] == "float32"
        assert row["min_ms"] <= row["q1_ms"] <= row["median_ms"] <= row["q3_ms"] <= row["max_ms"]
        assert row["samples"] >= 3
        assert row["peak_bytes"] is None or row["peak_bytes"] >= 0
        baseline = rows["core", "plain SDPA, no positions", direction]
        assert "check" not in baseline and baseline["ratio_to_baseline"] == 1
        units = {"forward": (3, 2), "backward": (11, 7)}[direction]  # docs/math.md, "Costs"
        for one, count in zip((row, baseline), units, strict=True):
            product, flops = one["product"], count * 2 * 2 * 64 * (5 + 64) * 16
            assert product["gflops"] > 0 and product["name"] in ("torch.mm", "oneDNN")
            reached = flops / (one["median_ms"] * 1e6) / product["gflops"]
            assert product["share"] == pytest.approx(reached, rel=1e-2, abs=1e-3)
        assert row["ratio_to_baseline"] == pytest.approx(row["median_ms"] / baseline["median_ms"], rel=1e-2)
        assert rows["streams", "both streams, N = L/6", direction]["rows"] == 64 + 64 // 6
        assert rows["streams", "both streams, N = L/6", direction]["check"]["passed"]
    assert str(tmp_path) not in output.read_text() and not list(output.parent.glob(".*"))


@pytest.mark.parametrize(
    "arguments",
    [["--lengths", "8"], ["--implementations", "nobody"], ["--lengths", "0"], ["--mem-len", "-1"], ["--dtype", "int8"]],
)
def test_bad_options_are_named(arguments, capsys):
    from attn import main

    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("length,mem_len", [(16, 0), (97, 0), (512, 30)])
def test_batches_obey_xlnet(length, mem_len):
    from lib.text import CLS, SEP, build_batch

    batch = build_batch(3, length, mem_len, seed=1)
    assert batch.tokens.shape == (3, length) and batch.memory_tokens.shape == (3, mem_len)
    assert batch.target_positions.shape == (3, length // 6) and (batch.target_positions.diff() > 0).all()
    assert (batch.tokens.gather(1, batch.target_positions) < SEP).all()
    query, content = batch.mask.to_bool("query"), batch.mask.to_bool("content")
    assert query[:, :, :mem_len].all() and content.diagonal(mem_len, 1, 2).all()
    assert not query.diagonal(mem_len, 1, 2).gather(1, batch.target_positions).any()  # a target does not see itself
    for tokens, ids in zip(batch.tokens, batch.segment_ids, strict=True):
        first, second = (tokens == SEP).nonzero().flatten().tolist()
        assert tokens[-1] == CLS and second == length - 2
        assert ids.tolist() == [0] * (first + 1) + [1] * (second - first) + [2]
    assert torch.equal(batch.tokens, build_batch(3, length, mem_len, seed=1).tokens)
    assert not torch.equal(batch.tokens, build_batch(3, length, mem_len, seed=2).tokens)


def test_shares_are_of_the_fastest_product(small_case):
    from lib.products import Products, add_shares

    products = Products(small_case, size=32)
    products.sample()
    assert "torch.mm" in products.times and all(len(times) == 4 for times in products.times.values())
    products.times = {"slow": [1.0, 1.0], "fast": [0.5, 0.5]}
    assert products.best() == ("fast", 2 * 32**3 / 0.5)
    row = {"direction": "backward", "median_ms": 1.0}
    rows = [row | {"implementation": name} for name in ("xlnet_kernels cpu", "plain SDPA, no positions", "peer")]
    rows.append({"implementation": "xlnet_kernels cuda", "direction": "forward", "status": "skipped"})
    add_shares(rows, small_case, products)
    unit = 2 * 2 * 2 * 48 * 48 * 16 / 1e-3 / (2 * 32**3 / 0.5)
    assert [row["product"]["share"] for row in rows[:2]] == [round(11 * unit, 3), round(7 * unit, 3)]
    assert not any("product" in row for row in rows[2:])


def test_peers_compute_the_same(bench, small_case):
    from lib.implementations import registry
    from lib.sections import core

    pytest.importorskip("transformers")
    eager = ("transformers eager", "SDPA + bias", "xlnet_kernels reference", "plain SDPA, no positions")
    core(bench, {name: registry()[name] for name in eager}, [replace(small_case, mem_len=9)])
    for row in bench.rows:
        assert row["status"] == "ok", row
        assert row["implementation"] == eager[-1] or row["check"]["passed"], row


def test_whole_layers_are_compared(bench, small_case):
    from lib.sections import module

    pytest.importorskip("transformers")
    module(bench, "reference", replace(small_case, mem_len=9))
    assert len(bench.rows) == 4
    assert all(row["status"] == "ok" and row["check"]["passed"] for row in bench.rows), bench.rows


def test_wrong_result_gets_a_cross(bench, small_case, environment):
    from rich.console import Console

    from lib.implementations import Implementation, package_backend
    from lib.report import notes, tables
    from lib.sections import core

    def shifted_by_one(problem):
        return package_backend("reference")(replace(problem, rel_key=problem.rel_key.roll(1, -2)))

    def not_a_number(problem):
        run = package_backend("reference")(problem)
        return replace(run, forward=lambda forward=run.forward: forward() * math.nan)

    broken = (shifted_by_one, not_a_number)
    core(bench, {one.__name__: Implementation(one.__name__, one) for one in broken}, [small_case])
    assert [row["check"]["passed"] for row in bench.rows] == [False] * 4
    with (console := Console(width=150)).capture() as shown:
        for table in tables(bench.rows):
            console.print(table)
    assert shown.get().count("✗") == 4
    text = notes({"rows": bench.rows, "environment": environment})
    assert any(line.startswith("WRONG shifted_by_one") and "rel_key by" in line for line in text)


def test_what_cannot_run_is_a_row(bench, small_case, environment):
    from rich.console import Console

    from lib.harness import CannotRun
    from lib.implementations import BASELINE, Implementation, registry
    from lib.report import notes, tables
    from lib.sections import core

    def absent(problem):
        raise CannotRun("it is not installed")

    def raises(problem):
        raise RuntimeError("no kernel\nsecond line")

    def forward_only(problem):
        run = registry()[BASELINE].prepare(problem)

        def forward():
            if torch.is_grad_enabled():
                raise NotImplementedError("no backward, see /usr/lib/some/where/file.py")
            return run.forward()

        return replace(run, forward=forward)

    entries = [Implementation(one.__name__, one, checked=False) for one in (absent, raises, forward_only)]
    huge = Implementation("huge", registry()[BASELINE].prepare, maps=(1e9, 1e9))
    core(bench, {one.name: one for one in (*entries, huge)}, [small_case])
    status = {(row["implementation"], row["direction"]): (row["status"], row.get("reason")) for row in bench.rows}
    assert status["absent", "forward"] == status["absent", "backward"] == ("skipped", "it is not installed")
    assert status["raises", "forward"] == ("failed", "RuntimeError: no kernel")
    assert status["forward_only", "forward"] == ("ok", None)
    assert status["forward_only", "backward"] == ("failed", "NotImplementedError: no backward, see file.py")
    assert status["huge", "backward"][0] == "skipped" and "would need about" in status["huge", "backward"][1]
    with (console := Console(width=150)).capture() as shown:
        for table in tables(bench.rows):
            console.print(table)
    assert "failed" in shown.get() and "skipped" in shown.get()
    text = "\n".join(notes({"rows": bench.rows, "environment": environment}))
    assert "it is not installed" in text and "no kernel" in text


def test_interruption_keeps_what_was_measured(monkeypatch, tmp_path):
    import attn

    def interrupted(options, bench):
        bench.skip("core", "peer", {"length": 16, "batch": 1}, "left out")
        raise KeyboardInterrupt

    monkeypatch.setattr(attn, "measure", interrupted)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    output = tmp_path / "results.json"
    output.write_text("old")
    assert attn.main(["--device", "cpu", "--output", str(output)]) == 130
    results = json.loads(output.read_text())
    assert not results["complete"] and results["rows"][0]["reason"] == "left out"


def test_what_was_ready_when_the_run_was_stopped_is_timed(bench, small_case):
    from lib.implementations import BASELINE, Implementation, registry
    from lib.sections import core

    def stopped(problem):
        raise KeyboardInterrupt

    bench.seconds = 3600
    baseline = registry()[BASELINE]
    with pytest.raises(KeyboardInterrupt):
        stopping = Implementation("compiling", stopped)
        core(bench, {BASELINE: baseline, "compiling": stopping, "late": baseline}, [small_case])
    assert [(row["implementation"], row["samples"]) for row in bench.rows] == [(BASELINE, 3)] * 2


def test_plan_drops_peers_that_do_not_fit():
    from lib.sections import plan

    costs = {"peer": 3.0, "slow": 5.0, "other": 2.0}
    assert plan(costs, math.inf) == [] and plan(costs, 6.0) == ["slow"] and plan(costs, 0.0) == list(costs)


def test_compiled_peers_run_where_they_are_asked_for(bench, small_case):
    from lib.implementations import BASELINE, registry
    from lib.sections import core

    # "own" is not compiled and runs everywhere; nothing is dropped for running at one length only
    both = {name: replace(registry()[BASELINE], name=name, compiled=name == "peer") for name in ("own", "peer")}
    cases = [replace(small_case, length=length, batch=1) for length in (32, 48, 64)]
    core(bench, both, cases, compiled_lengths=[32, 64])
    assert {(row["implementation"], row["length"]) for row in bench.rows if row["status"] == "ok"} == {
        ("own", 32), ("own", 48), ("own", 64), ("peer", 32), ("peer", 64),
    }  # fmt: skip
    assert all(row["status"] == "ok" for row in bench.rows)


def test_baseline_is_the_fastest_kernel_of_plain_sdpa(bench, small_case):
    from lib.implementations import BASELINE, registry
    from lib.measure import _relate
    from lib.sections import core

    names = [f"{BASELINE}, {kernel}" for kernel in ("flash", "cuDNN", "efficient")]
    assert [name for name in registry("cuda") if name.startswith(BASELINE)] == names and BASELINE in registry("cpu")
    core(bench, {names[0]: registry("cuda")[names[0]]}, [small_case])
    assert [(row["status"], row["ratio_to_baseline"]) for row in bench.rows] == [("ok", 1), ("ok", 1)]
    rows = [{"implementation": name, "median_ms": ms} for name, ms in zip([*names, "own"], (4, 2, 8, 3), strict=True)]
    _relate(rows, [], BASELINE, None)
    assert [row["ratio_to_baseline"] for row in rows] == [2, 1, 4, 1.5]
    assert {row["baseline"] for row in rows} == {names[1]}


def test_parts_are_left_out_and_added(bench, small_case, monkeypatch, environment):
    from lib.implementations import BASELINE, registry
    from lib.report import markdown
    from lib.sections import TERMS, terms

    monkeypatch.setattr("gc.collect", lambda *_: 0)  # slow with all of transformers in memory

    own = "xlnet_kernels reference"
    terms(bench, {name: registry()[name] for name in (own, BASELINE)}, small_case)
    rows = {(row["case"], row["implementation"], row["direction"]): row for row in bench.rows}
    assert len(rows) == len(TERMS) * 2 * 2 and all(row["status"] == "ok" for row in bench.rows), bench.rows
    for (name, implementation, direction), row in rows.items():
        _, segmented, memory, two_streams = TERMS[name]
        assert row["rows"] == 48 + (48 // 6 if two_streams else 0) and row["mem_len"] == (24 if memory else 0)
        if implementation == own:
            assert row["check"]["passed"] and row["ratio_to_baseline"] > 0
            if direction == "backward":  # the largest gradient of what is not there is zero, and so is the error
                assert (row["check"]["errors"]["segment_embed"] > 0) == segmented
    results = {"benchmark": "attn", "rows": bench.rows, "environment": environment}
    page = markdown(results | {"settings": {"heads": 2, "head_dim": 16, "dtype": "float32", "mem_len": 0}})
    lines = page.splitlines()
    order = [next(i for i, line in enumerate(lines) if f"| 48 x 2, {name} " in line) for name in TERMS]
    assert order == sorted(order) and "* 2 heads of 16, float32." in lines


def test_parts_are_measured_where_they_are_asked_for(bench, monkeypatch):
    import attn
    from lib import sections

    measured = []
    monkeypatch.setattr(sections, "terms", lambda bench, chosen, case: measured.append((sorted(chosen), case.length)))
    common = ["--device", "cpu", "--implementations", "reference", "plain", "--lengths", "64", "512"]
    attn.measure(attn.parse([*common, "--sections", "terms"]), bench)
    assert measured == [(["plain SDPA, no positions", "xlnet_kernels reference"], 512)]
    assert "terms" not in attn.parse(common).sections


def test_memory_is_seen():
    from lib.harness import peak_memory, peak_memory_method

    if not peak_memory_method("cpu").startswith("VmHWM"):
        pytest.skip("peak memory cannot be reset here")
    peak, elapsed = peak_memory(lambda: (torch.ones(10_000_000).exp().sum(),), "cpu")
    assert 80e6 * 0.95 < peak < 80e6 * 1.3 and elapsed > 0


def test_used_up_budget_is_said(bench, small_case):
    from lib.implementations import BASELINE, registry
    from lib.sections import core

    bench.budget = 0
    core(bench, {BASELINE: registry()[BASELINE]}, [small_case, replace(small_case, length=64)])
    reasons = {(row["length"], row["direction"]): row.get("reason") for row in bench.rows}
    assert reasons.pop((64, "forward")) is None and len(reasons) == 3  # one measurement, whatever the budget
    assert all("time budget is used up" in reason for reason in reasons.values())


def test_compare_says_what_has_become_slower(tmp_path, capsys, monkeypatch):
    import attn

    def run(ratio: float, spread: float) -> dict:
        row = {"section": "core", "length": 64, "batch": 1, "direction": "forward", "baseline": "plain SDPA, flash"}
        row |= {"samples": 16, "ratio_to_baseline": ratio}
        times = {"median_ms": 1.0, "q1_ms": 1 - spread / 2, "q3_ms": 1 + spread / 2}
        names = ("xlnet_kernels cpu", "plain SDPA, flash", "transformers eager")
        return {"rows": [row | times | {"implementation": name} for name in names]}

    output, earlier = tmp_path / "now.json", tmp_path / "earlier.json"
    monkeypatch.setattr(attn.session, "run", lambda *_, **__: 0)
    arguments = ["--device", "cpu", "--output", str(output), "--compare", str(earlier)]
    earlier.write_text(json.dumps(run(1.0, 0.01)))
    for ratio, spread, status in ((1.09, 0.01, 0), (1.2, 0.01, 1), (1.2, 0.5, 0), (0.5, 0.01, 0)):
        output.write_text(json.dumps(run(ratio, spread)))
        assert attn.main(arguments) == status
        shown = capsys.readouterr().out.splitlines()
        assert len(shown) == 1 and ("SLOWER" in shown[0]) == bool(status)
    with pytest.raises(SystemExit):
        attn.main([*arguments, "--compare", str(tmp_path / "none.json")])
    earlier.write_text('{"rows": []}')
    assert attn.main(arguments) == 0 and "none of these rows" in capsys.readouterr().err


def test_a_row_keeps_the_largest_errors_of_many_weights():
    from lib.measure import MOST_ERRORS, _shortened

    errors = {f"weight {n}": n * 1e-8 for n in range(MOST_ERRORS + 1)}
    check = {"passed": True, "tolerance": 1e-5, "errors": errors, "missed_by_peer": {"weight 20": 1e-9}}
    found = _shortened(check)
    assert found["errors"] == {f"weight {n}": n * 1e-8 for n in (18, 19, 20)}
    assert found["missed_by_peer"] == {"weight 18": 0.0, "weight 19": 0.0, "weight 20": 1e-9}
    assert _shortened(check | {"passed": False})["errors"] == errors
    few = {"passed": True, "tolerance": 1e-5, "errors": {"out": 1e-7}}
    assert _shortened(few) == few
