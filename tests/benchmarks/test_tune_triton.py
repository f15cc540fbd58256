"""benchmarks/tune_triton.py without a GPU: candidates, the choice among them, the entries it writes."""

from __future__ import annotations

import sys

import pytest
import torch

from tests import ROOT

pytest.importorskip("triton")
sys.path.insert(0, str(ROOT / "benchmarks"))
import tune_triton  # noqa: E402
from lib.problem import Case, build_problem  # noqa: E402
from tests.cases import INTERPRETED  # noqa: E402
from xlnet_kernels.backends.triton import plan, tuning  # noqa: E402

KEY = (90, "16-bit", 128)


@pytest.mark.parametrize("kind, head_dim", [("16-bit", 16), ("16-bit", 64), ("16-bit", 256), ("float32", 64)])
def test_candidates_are_what_the_kernels_can_do(kind, head_dim):
    found = tune_triton.candidates(kind, head_dim)
    assert len(set(found)) == len(found) > 10
    for config in found:
        assert config.BLOCK_M <= 2 * config.BLOCK_N and config.BLOCK_N >= 32
        assert 16 <= config.BLOCK_D < max(17, 2 * head_dim)


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
            starts.append(tuple(tuning.choose(kernel, torch.float32, key[2], (9, 0)) for kernel in tuning.KERNELS))

        def __call__(self, kernel, configs):
            tuning.TABLE[self.key] = configs
            return float(configs != starts[0])

    monkeypatch.setattr(tune_triton, "OnGPU", Measure)
    assert tune_triton.main(["--head-dims", "128", "64", "--dtype", "float32"]) == 0
    assert starts[0] == starts[1]


def test_entries_are_read_as_they_were_written():
    assert tune_triton.read("# a GPU\n" + tune_triton.write(tuning.TABLE)) == tuning.TABLE


@pytest.mark.skipif("triton" not in INTERPRETED, reason="measures with an injected clock, in Triton's interpreter")
def test_results_are_checked_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(tuning, "TABLE", dict(tuning.TABLE))
    problem = build_problem(Case(16, 1, 1, 16))
    monkeypatch.setattr(plan, "plans", {("of other tiles",): None})
    calls = []
    measure = tune_triton.OnGPU(KEY, problem, [problem], lambda call, **_: calls.append(call()) or 2.0)
    configs = tuple(tuning.Config(*config) for config in tuning.TABLE[KEY])
    assert measure("forward", configs) == pytest.approx(2.0)
    assert plan.plans and ("of other tiles",) not in plan.plans
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
