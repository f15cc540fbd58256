"""Parts of measuring on a GPU that run without one: searches, the headline, the how-to."""

from __future__ import annotations

import doctest
import fnmatch
import importlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests import ROOT

pytest.importorskip("rich")

pytestmark = pytest.mark.usefixtures("scripts", "one_thread")

FLASH, CUDNN = "plain SDPA, no positions, flash", "plain SDPA, no positions, cuDNN"


# ---- the largest training step


@pytest.mark.parametrize("step", [1, 128])
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 63, 64, 65, 100, 1000, 4095, 4096])
def test_search_finds_the_largest_that_fits(limit, step):
    from capacity import largest

    asked = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= limit * step

    found, tried = largest(fits, step, most=4096 * step)
    assert tried == len(asked) == len(set(asked)) <= 1 + 2 * 12 and all(size % step == 0 for size in asked)
    assert found == 0 or fits(found)
    assert limit * step * (1 - 1 / 64) <= found <= limit * step
    if limit <= 64:
        assert found == limit * step


def test_search_ends_at_the_most_there_is():
    from capacity import largest

    assert largest(lambda size: True, 128, 1000) == (896, 5)
    assert largest(lambda size: True, 128, 100) == (0, 0)


def test_only_running_out_of_memory_means_too_large(monkeypatch):
    from capacity import step_fits

    monkeypatch.setattr("gc.collect", lambda *_: 0)  # slow with all of transformers in memory

    def raises(error: RuntimeError):
        def step():
            raise error

        return step

    assert step_fits(lambda: (torch.zeros(1),), "cpu", 10**9)
    assert not step_fits(lambda: (torch.ones(10_000_000).exp().sum(),), "cpu", 1000)
    assert not step_fits(raises(torch.OutOfMemoryError("CUDA out of memory")), "cpu", 10**9)
    assert not step_fits(raises(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")), "cpu", 10**9)
    with pytest.raises(RuntimeError, match="illegal address"):
        step_fits(raises(RuntimeError("illegal address")), "cpu", 10**9)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Arguments for a tiny model, whose step is said to need 1 kB a token; transformers' 4 kB."""
    import capacity

    needed: list[int] = []

    def peak_memory(step, device):
        step()
        return needed.pop(), 0.0

    def telling(run, per_token):
        def told(case, model):
            needed.append(case.batch * case.length * per_token)
            return run(case, model=model)

        return told

    pytest.importorskip("transformers")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("gc.collect", lambda *_: 0)
    monkeypatch.setattr(capacity, "peak_memory", peak_memory)
    for name, per_token in ((capacity.THEIRS, 4000), (capacity.OWN, 1000)):
        build, run = capacity.IMPLEMENTATIONS[name]
        monkeypatch.setitem(capacity.IMPLEMENTATIONS, name, (build, telling(run, per_token)))
    sizes = ["--layers", "1", "--d-model", "32", "--heads", "2", "--d-inner", "32", "--vocab", "258"]
    return ["--device", "cpu", *sizes, "--step", "16", "--output", str(tmp_path / "capacity.json")]


def test_largest_steps_of_both_models(tiny, tmp_path, capsys):
    import capacity

    assert capacity.main([*tiny, "--lengths", "32", "--memory", "0.0004", "--plot"]) == 0  # 400 tokens
    results = json.loads((tmp_path / "capacity.json").read_text())
    found = {(row["case"], row["implementation"]): row for row in results["rows"]}
    assert {key: row["largest"] for key, row in found.items()} == {
        ("batch at L 32", capacity.THEIRS): 3,
        ("batch at L 32", capacity.OWN): 12,
        ("length at batch 1", capacity.THEIRS): 96,
        ("length at batch 1", capacity.OWN): 400,
    }
    assert found["batch at L 32", capacity.OWN]["speedup"] == 4
    assert found["length at batch 1", capacity.OWN]["length"] == 400
    shown = capsys.readouterr().out
    assert "Largest training step" in shown and "4.00x" in shown and "Peak memory" not in shown
    assert "no picture" in shown


def test_a_search_that_fails_is_a_row(tiny, tmp_path, monkeypatch, capsys):
    import capacity

    def broken(case, model):
        raise RuntimeError("illegal address")

    build, _ = capacity.IMPLEMENTATIONS[capacity.OWN]
    monkeypatch.setitem(capacity.IMPLEMENTATIONS, capacity.OWN, (build, broken))
    monkeypatch.setattr(capacity, "MOST", 2)
    assert capacity.main([*tiny, "--lengths", "16", "--memory", "0.0002"]) == 0
    rows = json.loads((tmp_path / "capacity.json").read_text())["rows"]
    assert [(row["status"], row.get("reason")) for row in rows if row["implementation"] == capacity.OWN] == [
        ("failed", "RuntimeError: illegal address")
    ] * 2
    shown = capsys.readouterr().out
    assert "2 or more" in shown and "RuntimeError: illegal address" in shown


def test_a_search_has_a_process_of_its_own():
    import os

    from capacity import isolated

    assert isolated(os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError):
        isolated(divmod, 1, 0)


# ---- the headline


def core(name: str, length: int, forward: float, both: float, **labels) -> list[dict]:
    row = {"section": "core", "implementation": name, "length": length, "dtype": "bfloat16", "head_dim": 64} | labels
    return [row | {"direction": "forward", "median_ms": forward}, row | {"direction": "backward", "median_ms": both}]


def test_headline_takes_the_best_kernel_of_each_direction(tmp_path, capsys):
    import report
    from lib import headline

    # flash is the faster forward, cuDNN the faster backward: 3 against 4 alone, though flash is faster in all
    rows = core(FLASH, 512, 1, 5) + core(CUDNN, 512, 2.5, 5.5) + core("xlnet_kernels cuda", 512, 2, 8)
    (line,) = headline.summarise(rows + core("transformers eager", 512, 10, 40))
    assert line.forward == (2, "flash") and line.backward == (2, "cuDNN") and line.peers == [5, None, None, None]

    sources = []
    for dtype, head_dim in (("bfloat16", 64), ("float16", 128)):
        sources.append(tmp_path / f"{dtype}.json")
        facts = {"gpu": "a GPU", "torch": "2.11"}
        settings = {"dtype": dtype, "head_dim": head_dim}
        sources[-1].write_text(json.dumps({"rows": rows, "settings": settings, "environment": facts}))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- headline -->\nold\n<!-- end -->\nafter\n")
    assert report.main(["--headline", *map(str, sources), str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert "| bfloat16, 64 | 512 | cuda | 2.00 flash | 2.00 cuDNN |\n" in text and "| vs " not in text
    assert "| float16, 128 | 512 | cuda |" in text and text.count("a GPU, torch 2.11") == 1
    page.write_text("no place")
    assert report.main(["--headline", str(sources[0]), str(page)]) == 1
    assert "there is no <!-- headline -->" in capsys.readouterr().err
    assert report.main(["--headline", str(sources[0])]) == 0 and "2.00 flash" in capsys.readouterr().out


def test_headline_leaves_out_what_is_slower_or_not_timed():
    """Backends of plain torch beside a fused one, and peers without times."""
    from lib import headline

    own = {name: core(f"xlnet_kernels {name}", 512, 2, 8) for name in ("cpu", "torch", "reference")}
    facts = {"settings": {"dtype": "float32", "head_dim": 64}, "environment": {"cpu": "a CPU", "torch": "2.13"}}
    rows = core(FLASH, 512, 1, 5) + core("transformers eager", 512, 10, 40)
    runs = {"fused": facts | {"rows": sum(own.values(), rows)}, "plain": facts | {"rows": rows + own["torch"]}}
    heads, _, *lines = headline.markdown(runs).splitlines()
    assert heads.endswith("| backward | vs transformers eager |")
    assert [line.split(" | ")[::3] for line in lines[:3]] == [
        ["| fused", "cpu", "5.00x |"], ["| plain", "torch", "5.00x |"], [""]
    ]  # fmt: skip


def test_times_stand_beside_counts(tmp_path, capsys):
    """1 ms on 132 multiprocessors of 1 GHz for 16 heads of 512 x 512 pairs: 132e6 cycles, 32224 for 1024 pairs."""
    import report
    from lib import counted

    rows = core("xlnet_kernels cuda", 512, 1, 3, heads=16, batch=1) + core(FLASH, 512, 0.5, 2, heads=16, batch=1)
    gpu = {"gpu": "a GPU", "architecture": 90, "multiprocessors": 132, "clock_mhz": 1000.0}
    run = {"rows": rows, "environment": gpu, "settings": {"dtype": "bfloat16", "head_dim": 64}}
    forward, backward = sorted(counted.beside(run), key=lambda line: line.direction, reverse=True)
    assert forward.kernel == "cuda" and forward.measured == pytest.approx(132e6 / (16 * 512**2 / 1024))
    assert backward.measured == pytest.approx(2 * forward.measured)
    assert (forward.ratio, backward.ratio) == (2, 2 / 1.5)
    counts = json.loads(counted.COUNTS.read_text())["rows"]
    (row,) = [
        r for r in counts if [r[key] for key in ("kernel", "direction", "head_dim", "architecture", "length", "case")]
        == ["cuda", "forward", 64, 90, 512, "order+segments"]
    ]  # fmt: skip
    assert (forward.counted, forward.bound_by, forward.counted_ratio) == (
        row["bound_cycles"], row["bound_by"], row["ratio"]
    )  # fmt: skip

    path, page = tmp_path / "run.json", tmp_path / "page.md"
    path.write_text(json.dumps(run))
    page.write_text("<!-- counted -->\n<!-- end -->\n")
    assert report.main(["--counted", str(path), str(page)]) == 0
    assert f"| {forward.measured:.0f} |" in page.read_text() and "132 multiprocessors" in page.read_text()
    assert [line.split()[0] for line in counted.text(run)] == ["cycles", "kernel", "cuda", "cuda"]

    path.write_text(json.dumps(run | {"environment": gpu | {"architecture": 120}}))
    assert report.main(["--counted", str(path)]) == 1 and "nothing in it was counted" in capsys.readouterr().err
    assert not list(counted.text(run | {"environment": {}}))


def test_runs_of_one_machine_share_a_table(tmp_path, capsys):
    import report

    facts = dict(cpu="a CPU", cores=2, threads=2, cpu_capability="AVX2", torch="2.13", commit="c", peak_memory="VmHWM")
    settings = {"heads": 1, "head_dim": 64, "dtype": "float32"}
    sources = [tmp_path / f"{name}.json" for name in "abc"]
    for source, length, machine in zip(sources, (512, 1024, 512), (facts, facts, facts | {"cores": 4}), strict=True):
        rows = core("xlnet_kernels cpu", length, 1, 3, status="ok", batch=1, samples=1, q1_ms=1.0, q3_ms=1.0)
        run = {"benchmark": "attn", "rows": rows, "settings": settings, "environment": machine}
        source.write_text(json.dumps(run))
    page = tmp_path / "page.md"
    page.write_text("<!-- a.json b.json -->\n<!-- end -->\n")
    assert report.main([*map(str, sources[:2]), str(page)]) == 0
    text = page.read_text()
    assert "| 512 x 1 |" in text and "| 1024 x 1 |" in text and text.count("a CPU") == 1
    assert report.main([*map(str, sources), str(page)]) == 1
    assert "these runs have not the same cores" in capsys.readouterr().err


def test_highlights_are_of_the_greatest_length_that_all_have(tmp_path, capsys):
    import report

    own, peer = "xlnet_kernels cuda", "transformers eager"
    rows = core(own, 512, 2, 8, peak_bytes=3e6) + core(peer, 512, 20, 24, peak_bytes=5e8) + core(own, 1024, 1, 1)
    # of plain SDPA's kernels the best of each direction
    rows += core(FLASH, 512, 1, 5) + core(CUDNN, 512, 2.5, 4) + core(f"{own} reference", 512, 9, 9)
    settings = {"dtype": "bfloat16", "heads": 12, "head_dim": 64}
    run = {"rows": rows, "settings": settings, "environment": {"gpu": "a GPU", "torch": "2.11"}}
    source, page = tmp_path / "run.json", tmp_path / "page.md"
    source.write_text(json.dumps(run))
    page.write_text("<!-- highlights -->\n<!-- end -->\n")
    assert report.main(["--highlights", str(source), str(page)]) == 0
    text = page.read_text()
    assert "**10.0x / 3.0x** as fast" in text and "**2.0x / 2.0x** the time" in text
    assert "**3 MB** of memory, linear in length; transformers takes 500 MB" in text and "Length 512, " in text
    source.write_text(json.dumps(run | {"rows": core(own, 512, 1, 1)}))
    assert report.main(["--highlights", str(source)]) == 1
    assert "no length has this package, transformers and plain SDPA" in capsys.readouterr().err


def test_the_table_names_the_kernel_that_was_the_baseline():
    from lib.harness import environment
    from lib.measure import _relate
    from lib.report import markdown

    rows = core(FLASH, 512, 1, 5) + core(CUDNN, 512, 2.5, 4) + core("xlnet_kernels cuda", 512, 2, 8)
    for direction in ("forward", "backward"):
        _relate([row for row in rows if row["direction"] == direction], [], "plain SDPA, no positions", None)
    spread = {"batch": 2, "status": "ok", "q1_ms": 1.0, "q3_ms": 2.0, "samples": 2, "peak_bytes": 0}
    page = markdown({"rows": [row | spread for row in rows], "environment": environment("cpu")})
    ours = [line for line in page.splitlines() if "xlnet_kernels cuda" in line]
    assert [ratio for line in ours for ratio in ("2.00x flash", "2.00x cuDNN") if f"| {ratio} |" in line] == [
        "2.00x flash",
        "2.00x cuDNN",
    ]


# ---- examples in docstrings, and what results say of the machine


@pytest.mark.parametrize("name", ["lib.harness", "lib.sections"])
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed


def test_the_commit_of_a_copy_is_told(monkeypatch, tmp_path):
    from lib import harness

    monkeypatch.setattr(harness, "__file__", str(tmp_path / "harness.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("COMMIT", raising=False)
    assert harness._commit() is None
    monkeypatch.setenv("COMMIT", "abc")
    assert harness._commit() == "abc"
    assert harness._printed(["no-such-program"]) is None and harness._printed(["echo", "580, 700 W"]) == "580, 700 W"


# ---- the how-to


@pytest.fixture
def commands(tmp_path) -> list[list[str]]:
    """The page's commands as the shell runs them, with programs that record their arguments."""
    log = tmp_path / "log"
    programs = {
        "timeout": 'shift; exec "$@"',
        "make": "",
        "ncu": 'while [ "$1" != python ]; do shift; done; exec "$@"',
        "python": f"""printf '%s\\037' "$@" >> {log}; echo >> {log}""",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    blocks = re.findall(
        r"^```\n(.*?)^```", (ROOT / "docs/how-to/measure-on-a-gpu.md").read_text(), re.DOTALL | re.MULTILINE
    )
    paths = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euc", "".join(blocks)], cwd=ROOT, env={"PATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [line.split("\037")[:-1] for line in log.read_text().splitlines()]


def test_the_commands_of_the_how_to_are_understood(commands, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    outputs = []
    for script, *arguments in commands:
        module = importlib.import_module(Path(script).stem)
        if hasattr(module, "parse"):
            outputs.append(module.parse(arguments).output)
    assert len(outputs) == len(set(outputs)) == 4 + 4 + 2 + 1
    for path in outputs:  # they can be committed
        for pattern in (ROOT / ".gitignore").read_text().split():
            assert not fnmatch.fnmatch(str(path), pattern), (path, pattern)
