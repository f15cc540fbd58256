"""benchmarks/tune_triton.py without a GPU: candidates, the choice among them, the entries it writes."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from tests import ROOT

pytest.importorskip("triton")
sys.path.insert(0, str(ROOT / "benchmarks"))
import tune_triton  # noqa: E402
from lib import compiling  # noqa: E402
from lib.problem import Case, build_problem  # noqa: E402
from tests.cases import INTERPRETED  # noqa: E402
from xlnet_kernels.backends.triton import launch_cache, tuning  # noqa: E402

KEY = (90, "16-bit", 128)


@pytest.mark.parametrize("kind, head_dim", [("16-bit", 16), ("16-bit", 64), ("16-bit", 256), ("float32", 64)])
def test_candidates_are_what_the_kernels_can_do(kind, head_dim):
    found = tune_triton.candidates(kind, head_dim)
    assert len(set(found)) == len(found) > 10
    for config in found:
        assert config.BLOCK_M <= 2 * config.BLOCK_N and config.BLOCK_N >= 32
        assert 16 <= config.BLOCK_D < max(17, 2 * head_dim)
    # 65536 registers are 168 a thread for three blocks of 128 threads; 255 is the most of a thread
    limited = kind == "16-bit" and head_dim <= 128
    assert {config.max_registers for config in found} == ({None, 168, 255} if limited else {None})


def test_the_fastest_candidate_of_each_kernel_is_taken():
    wanted = {"forward": tuning.Config(64, 32, 32, False, 4, 3), "rows": tuning.Config(32, 32, 64, False, 8, 2)}

    def measure(kernel, configs):
        config = configs[tuning.KERNELS.index(kernel)]
        return 1.0 if config == wanted.get(kernel, config) else 2.0

    found = tune_triton.tune(tuning.TABLE, KEY, measure)[KEY]
    assert found[:2] == (wanted["forward"], wanted["rows"])
    assert found[2] == tuning.Config(*tuning.TABLE[KEY][2])  # all equally fast: what there was stays


def test_what_fails_is_out():
    lines = []

    def measure(kernel, configs):
        if configs[tuning.KERNELS.index(kernel)].num_warps == 8:
            raise RuntimeError("out of resources")
        return 1.0

    found = tune_triton.tune(tuning.TABLE, KEY, measure, log=lines.append)[KEY]
    assert {config.num_warps for config in found} == {4}
    assert any("RuntimeError: ['out of resources']" in line for line in lines)
    with pytest.raises(RuntimeError, match="no configuration of the forward kernel works"):
        tune_triton.tune(tuning.TABLE, KEY, lambda *_: 1 / 0)


def test_a_candidate_that_loses_the_gpu_ends_the_search():
    def measure(kernel, configs):
        if configs[0].num_warps == 8:
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
        return 1.0

    with pytest.raises(RuntimeError, match="has cost this process the GPU"):
        tune_triton.tune(tuning.TABLE, KEY, measure)


def test_a_budget_is_shared_by_the_kernels():
    now, measured = [0.0], []

    def measure(kernel, configs):
        now[0] += 1
        measured.append((kernel, configs[tuning.KERNELS.index(kernel)]))
        return 1.0

    lines = []
    tune_triton.tune(tuning.TABLE, KEY, measure, lines.append, until=9.0, clock=lambda: now[0])
    assert [kernel for kernel, _ in measured] == [kernel for kernel in tuning.KERNELS for _ in range(3)]
    for kernel, config in zip(tuning.KERNELS, tuning.TABLE[KEY], strict=True):
        assert (kernel, tuning.Config(*config)) in measured  # what there is comes first
    assert sum("time is up" in line for line in lines) == 3
    now[0], measured[:] = 100.0, []
    tune_triton.tune(tuning.TABLE, KEY, measure, until=9.0, clock=lambda: now[0])
    assert len(measured) == 3


def test_what_was_not_compiled_is_not_launched():
    measured, config = [], tuning.Config(64, 32, 64, True, 4, 3)

    def measure(kernel, configs):
        measured.append((kernel, configs[tuning.KERNELS.index(kernel)]))
        return 1.0

    tune_triton.tune(tuning.TABLE, KEY, measure, among={("rows", config)})
    before = [(kernel, tuning.Config(*entry)) for kernel, entry in zip(tuning.KERNELS, tuning.TABLE[KEY], strict=True)]
    assert measured == [*before[:2], ("rows", config), before[2]]


def test_kernels_are_compiled_in_turn():
    config = tuning.Config(64, 32, 64, True, 4, 3)
    more = config._replace(num_stages=2)
    found = compiling.in_turn({"forward": [config, more], "rows": [config]})
    assert found == [("forward", config), ("rows", config), ("forward", more)]


def test_candidates_are_compiled_by_several_processes(monkeypatch, tmp_path):
    """For a GPU that is not there; what the compiler refuses is out, and so is what is not ready in time."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    good = [tuning.Config(32, 32, 16, True, 4, stages) for stages in (1, 2)]
    jobs = [("forward", config) for config in (*good, good[0]._replace(BLOCK_N=24))]
    cases, lines = [(Case(32, 1, 1, 16, 0, torch.float16), False)], []
    key = 80, "16-bit", 16
    assert compiling.compile_all(80, key, cases, jobs, 0.0, count=1) == set()
    done = compiling.compile_all(80, key, cases, jobs, 600, count=2, log=lines.append)
    assert done == set(jobs[:2])
    assert len(list(tmp_path.rglob("forward_kernel.cubin"))) == 4  # for each one that backward follows, and one without
    assert any("does not compile: " in line for line in lines) and "2 of 3 compiled" in lines[-1]


def test_processes_are_no_more_than_memory_has_room_for(monkeypatch):
    monkeypatch.setattr(compiling, "NEEDS", 2**60)
    assert compiling.processes() == 1
    monkeypatch.setattr(compiling, "NEEDS", 1)
    assert compiling.processes() >= 1


def test_each_row_of_the_table_says_how_it_was_chosen():
    lines = (ROOT / "xlnet_kernels/backends/triton/tuning.py").read_text().splitlines()
    before = [lines[at - 1].strip() for at, line in enumerate(lines) if re.match(r"    \(\d+, ", line)]
    assert len(before) == len(tuning.TABLE)
    assert all(line.startswith(("# by counts", "# by spills", "# measured: ")) for line in before)


def test_each_head_dim_starts_from_the_best_of_those_before(monkeypatch):
    """A head_dim without an entry starts from that of the next larger one, which must not be the last one measured."""
    monkeypatch.setattr(tuning, "TABLE", dict(tuning.TABLE))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(tune_triton, "build_problem", lambda *_, **__: None)
    starts = []

    class Measure:
        def __init__(self, key, *_):
            self.key = key
            starts.append(tuple(tuning.choose(kernel, "float32", key[2], (9, 0)) for kernel in tuning.KERNELS))

        def __call__(self, kernel, configs):
            tuning.TABLE[self.key] = configs
            return float(configs != starts[0])

    monkeypatch.setattr(tune_triton, "OnGPU", Measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(compiling, "compile_all", lambda _, key, cases, jobs, *rest: set(jobs))
    assert tune_triton.main(["--head-dims", "128", "64", "--dtype", "float32"]) == 0
    assert starts[0] == starts[1]


def test_entries_are_read_as_they_were_written():
    entries = {key: tuple(tuning.Config(*config) for config in configs) for key, configs in tuning.TABLE.items()}
    entries[KEY] = tuple(config._replace(max_registers=168) for config in entries[KEY])
    text = tune_triton.write(entries, "measured: a GPU")
    assert tune_triton.read(text) == entries
    assert text.count("    # measured: a GPU\n") == len(entries)


@pytest.mark.skipif("triton" not in INTERPRETED, reason="measures with an injected clock, in Triton's interpreter")
def test_results_are_checked_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(tuning, "TABLE", dict(tuning.TABLE))
    problem = build_problem(Case(16, 1, 1, 16))
    monkeypatch.setattr(launch_cache, "plans", {("of other tiles",): None})
    calls = []
    measure = tune_triton.OnGPU(KEY, problem, [problem], lambda call, **_: calls.append(call()) or 2.0)
    configs = tuple(tuning.Config(*config) for config in tuning.TABLE[KEY])
    assert measure("forward", configs) == pytest.approx(2.0)
    assert launch_cache.plans and ("of other tiles",) not in launch_cache.plans
    assert measure("rows", configs) == pytest.approx(2.0)
    assert calls[0].shape == problem.query.shape and len(calls[1]) == len(problem.INPUTS)
    measure.exact[0] = measure.exact[0] + 1
    with pytest.raises(ValueError, match="out is off by"):
        measure("forward", configs)
    assert len(calls) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is missing; this machine has a GPU")
def test_says_that_it_needs_a_gpu(capsys):
    assert tune_triton.main([]) == 1
    assert "needs a CUDA GPU" in capsys.readouterr().err
