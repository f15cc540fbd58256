"""The main job: a tiny run from the command line, batches by XLNet's rules, and what the table says of the broken."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import groupby

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

    return Bench("cpu", DIRECTIONS, seconds=0.01, rounds=(3, 3), budget=60)


def run_job(*arguments, **options):
    command = [sys.executable, str(BENCHMARKS / "attn.py"), *map(str, arguments)]
    paths = [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, **options)


def test_tiny_run(tmp_path):
    output = tmp_path / "new" / "results.json"
    names = ("--implementations", "reference", "plain", "--sections", "core", "streams")
    sizes = ("--lengths", "64", "--heads", "2", "--head-dim", "16", "--batch", "1", "--mem-len", "5")
    done = run_job("--device", "cpu", *sizes, *names, "--seconds", "0.01", "--output", output)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "xlnet_kernels reference" in done.stdout and "✓" in done.stdout and "median ms" in done.stdout

    results = json.loads(output.read_text())
    assert results["complete"] and results["settings"]["lengths"] == [64]
    facts = results["environment"]
    assert {"cpu", "cpu_capability", "cores", "threads", "torch", "xlnet_kernels", "commit", "backends"} <= facts.keys()
    rows = {(row["section"], row["implementation"], row["direction"]): row for row in results["rows"]}
    for direction in ("forward", "backward"):
        row = rows["core", "xlnet_kernels reference", direction]
        assert row["check"]["passed"] and row["mem_len"] == 5 and row["dtype"] == "float32"
        assert row["min_ms"] <= row["q1_ms"] <= row["median_ms"] <= row["q3_ms"] <= row["max_ms"]
        assert len(row["samples_ms"]) >= 3
        assert row["peak_bytes"] is None or row["peak_bytes"] >= 0
        floor = rows["core", "plain SDPA, no positions", direction]
        assert "check" not in floor and floor["ratio_to_floor"] == 1
        assert row["ratio_to_floor"] == pytest.approx(row["median_ms"] / floor["median_ms"], rel=1e-2)
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
    assert not (batch.targets & batch.special).any()
    assert (batch.targets.sum(1) == length // 6).all()
    assert (batch.order.sort(1).values == torch.arange(length)).all()
    for tokens, ids in zip(batch.tokens, batch.segment_ids, strict=True):
        first, second = (tokens == SEP).nonzero().flatten().tolist()
        assert tokens[-1] == CLS and second == length - 2
        assert ids.tolist() == [0] * (first + 1) + [1] * (second - first) + [2]
    assert torch.equal(batch.tokens, build_batch(3, length, mem_len, seed=1).tokens)
    assert not torch.equal(batch.tokens, build_batch(3, length, mem_len, seed=2).tokens)


def test_spans_are_spans():
    from lib.text import build_batch

    runs = groupby(build_batch(1, 4096).targets[0].tolist())
    sizes = [len(list(run)) for is_target, run in runs if is_target]
    assert sum(sizes) == 4096 // 6
    # p(n) ~ 1/n over 1..5: 44 % single; the topping-up adds some single ones.
    assert 0.35 < sum(size == 1 for size in sizes) / len(sizes) < 0.75 and 5 in sizes


@pytest.mark.parametrize("mem_len", [0, 7])
def test_mask_is_the_original_perm_mask(mem_len):
    """perm_mask[i, j] = (self_rev[i] <= rev[j]) & (masked | functional)[j], as in the original's data pipeline."""
    from lib.text import build_batch

    batch = build_batch(2, 40, mem_len)
    mask = batch.mask()
    query, content = mask.to_bool("query"), mask.to_bool("content")
    for b in range(2):
        for i in range(40):
            for j in range(40):
                target_i, target_j = batch.targets[b, i].item(), batch.targets[b, j].item()
                special_i, special_j = batch.special[b, i].item(), batch.special[b, j].item()
                rev_i = batch.order[b, i].item() if target_i or special_i else -1
                rev_j = batch.order[b, j].item() if target_j or special_j else -1
                self_rev = rev_i if target_i else rev_i + 1
                hidden = self_rev <= rev_j and (target_j or special_j)
                assert query[b, i, mem_len + j].item() == (not hidden)
                assert content[b, i, mem_len + j].item() == (not hidden or i == j)
    assert query[:, :, :mem_len].all()


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


def test_wrong_result_gets_a_cross(bench, small_case):
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
    text = notes({"rows": bench.rows, "environment": environment()})
    assert any(line.startswith("WRONG shifted_by_one") and "rel_key by" in line for line in text)


def test_what_cannot_run_is_a_row(bench, small_case):
    from rich.console import Console

    from lib.harness import CannotRun
    from lib.implementations import FLOOR, Implementation, registry
    from lib.report import notes, tables
    from lib.sections import core

    def absent(problem):
        raise CannotRun("it is not installed")

    def raises(problem):
        raise RuntimeError("no kernel\nsecond line")

    def forward_only(problem):
        run = registry()[FLOOR].prepare(problem)

        def forward():
            if torch.is_grad_enabled():
                raise NotImplementedError("no backward, see /usr/lib/some/where/file.py")
            return run.forward()

        return replace(run, forward=forward)

    entries = [Implementation(one.__name__, one, checked=False) for one in (absent, raises, forward_only)]
    huge = Implementation("huge", registry()[FLOOR].prepare, maps=(1e9, 1e9))
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
    text = "\n".join(notes({"rows": bench.rows, "environment": environment()}))
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
    from lib.implementations import FLOOR, Implementation, registry
    from lib.sections import core

    def stopped(problem):
        raise KeyboardInterrupt

    bench.seconds = 3600
    floor = registry()[FLOOR]
    with pytest.raises(KeyboardInterrupt):
        core(bench, {FLOOR: floor, "compiling": Implementation("compiling", stopped), "late": floor}, [small_case])
    assert [(row["implementation"], len(row["samples_ms"])) for row in bench.rows] == [(FLOOR, 3)] * 2


def test_plan_drops_peers_that_do_not_fit():
    from lib.sections import plan

    costs = {("own", 8): 3.0, ("peer", 8): 3.0, ("peer", 4): 1.0, ("other", 8): 2.0}
    assert plan(costs, ["peer", "other"], math.inf) == set()
    assert plan(costs, ["peer", "other"], 7.0) == {("other", 8)}
    assert plan(costs, ["peer", "other"], 0.0) == {("peer", 8), ("peer", 4), ("other", 8)}


def test_compiled_peers_run_where_they_are_asked_for(bench, small_case):
    from lib.implementations import FLOOR, registry
    from lib.sections import core

    # "own" is not compiled and runs everywhere; nothing is dropped for running at one length only
    both = {name: replace(registry()[FLOOR], name=name, compiled=name == "peer") for name in ("own", "peer")}
    cases = [replace(small_case, length=length, batch=1) for length in (32, 48, 64)]
    core(bench, both, cases, compiled_lengths=[32, 64])
    assert {(row["implementation"], row["length"]) for row in bench.rows if row["status"] == "ok"} == {
        ("own", 32), ("own", 48), ("own", 64), ("peer", 32), ("peer", 64),
    }  # fmt: skip
    assert all(row["status"] == "ok" for row in bench.rows)


def test_floor_is_the_fastest_kernel_of_plain_sdpa(bench, small_case):
    from lib.implementations import FLOOR, registry
    from lib.measure import _relate
    from lib.sections import core

    names = [f"{FLOOR}, {kernel}" for kernel in ("flash", "cuDNN", "efficient")]
    assert [name for name in registry("cuda") if name.startswith(FLOOR)] == names and FLOOR in registry("cpu")
    core(bench, {names[0]: registry("cuda")[names[0]]}, [small_case])
    assert [(row["status"], row["ratio_to_floor"]) for row in bench.rows] == [("ok", 1), ("ok", 1)]
    rows = [{"implementation": name, "median_ms": ms} for name, ms in zip([*names, "own"], (4, 2, 8, 3), strict=True)]
    _relate(rows, FLOOR, None)
    assert [row["ratio_to_floor"] for row in rows] == [2, 1, 4, 1.5]
    assert {row["floor"] for row in rows} == {names[1]}


def test_parts_are_left_out_and_added(bench, small_case, monkeypatch):
    from lib.implementations import FLOOR, registry
    from lib.report import markdown
    from lib.sections import TERMS, terms

    monkeypatch.setattr("gc.collect", lambda *_: 0)  # slow with all of transformers in memory

    own = "xlnet_kernels reference"
    terms(bench, {name: registry()[name] for name in (own, FLOOR)}, small_case)
    rows = {(row["case"], row["implementation"], row["direction"]): row for row in bench.rows}
    assert len(rows) == len(TERMS) * 2 * 2 and all(row["status"] == "ok" for row in bench.rows), bench.rows
    for (name, implementation, direction), row in rows.items():
        _, segmented, memory, two_streams = TERMS[name]
        assert row["rows"] == 48 + (48 // 6 if two_streams else 0) and row["mem_len"] == (24 if memory else 0)
        if implementation == own:
            assert row["check"]["passed"] and row["ratio_to_floor"] > 0
            if direction == "backward":  # the largest gradient of what is not there is zero, and so is the error
                assert (row["check"]["errors"]["segment_embed"] > 0) == segmented
    results = {"benchmark": "attn", "rows": bench.rows, "environment": environment()}
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


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from lib.plot import main

    rows = [
        {"section": "core", "implementation": "SDPA + bias", "direction": "forward", "length": length, "batch": 1}
        | {"median_ms": length / 8, "peak_bytes": length * 1000}
        for length in (64, 128)
    ]
    settings = {"heads": 2, "head_dim": 16, "dtype": "float32"}
    source = tmp_path / "results.json"
    source.write_text(json.dumps({"rows": rows, "settings": settings, "environment": environment()}))
    assert main([str(source)]) == 0
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    source.write_text(json.dumps({"rows": [], "settings": settings, "environment": environment()}))
    assert main([str(source)]) == 1


def test_share_of_the_limit(tmp_path):
    """Three products forward in 1.5 times the time of two are made as fast as those; the picture gets a third row."""
    pytest.importorskip("matplotlib")
    from lib.plot import limit_share, plot

    row = {"section": "core", "implementation": "xlnet_kernels cpu", "direction": "forward", "length": 64, "batch": 1}
    row |= {"median_ms": 3.0, "peak_bytes": 1000, "ratio_to_floor": 1.5}
    assert limit_share(row) == {"limit_share": 1}
    assert limit_share(row | {"ratio_to_floor": 1.2}) == {"limit_share": pytest.approx(1.25)}
    assert limit_share(row | {"direction": "backward"}) == {"limit_share": pytest.approx(11 / 7 / 1.5)}
    assert limit_share(row | {"implementation": "plain SDPA, no positions"}) == {}
    assert limit_share({name: row[name] for name in row if name != "ratio_to_floor"}) == {}

    heights = []
    settings = {"heads": 2, "head_dim": 16, "dtype": "float32"}
    for rows in ([row], [{name: row[name] for name in row if name != "ratio_to_floor"}]):
        plot({"rows": rows, "settings": settings, "environment": environment()}, tmp_path / "picture.png")
        # width and height are words 4 and 5 of a PNG
        heights.append(int.from_bytes((tmp_path / "picture.png").read_bytes()[20:24], "big"))
    assert heights == [1500, 1050]


def environment():
    from lib.harness import environment

    return environment("cpu")


def test_used_up_budget_is_said(bench, small_case):
    from lib.implementations import FLOOR, registry
    from lib.sections import core

    bench.budget = 0
    core(bench, {FLOOR: registry()[FLOOR]}, [small_case, replace(small_case, length=64)])
    reasons = {row["length"]: row.get("reason") for row in bench.rows}
    assert reasons[64] is None and "time budget is used up" in reasons[48]
