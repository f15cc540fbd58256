"""pytest-benchmark on the benchmarks' own problems: one call of each kind, absolute times.

    python -m pytest tests/benchmarks/test_speed.py -p no:xdist --benchmark-autosave       keep this machine's times
    python -m pytest tests/benchmarks/test_speed.py -p no:xdist --benchmark-compare        beside the last ones kept

Whether something has become slower is better asked of `benchmarks/attn.py --compare`, which measures ratios.
"""

from __future__ import annotations

import pytest
import torch

import xlnet_kernels as xk
from tests.cases import COMPILED

pytest.importorskip("pytest_benchmark")
pytestmark = pytest.mark.usefixtures("scripts", "as_users_run_it")


@pytest.fixture
def as_users_run_it(poisoned_memory):
    """Filling memory with NaN takes time, too."""
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("two_streams", [False, True], ids=["content", "both-streams"])
@pytest.mark.parametrize("name", COMPILED)
def test_operator(benchmark, name, two_streams, direction):
    from lib.implementations import package_backend
    from lib.problem import Case, build_problem

    run = package_backend(name)(build_problem(Case(128, 2), two_streams))
    run.step(direction)
    assert all(result.isfinite().all() for result in benchmark(run.step, direction))


@pytest.fixture
def model() -> xk.XLNetLMHeadModel:
    return xk.XLNetLMHeadModel(xk.XLNetConfig(vocab_size=1000, d_model=256, n_layer=4, n_head=4, d_inner=1024)).eval()


def test_model(benchmark, model):
    from lib.text import build_batch

    batch = build_batch(2, 128)
    labels = batch.tokens.gather(1, batch.target_positions)

    def step() -> torch.Tensor:
        loss = model(batch.tokens, mask=batch.mask, target_positions=batch.target_positions, labels=labels).loss
        loss.backward()
        return loss

    assert benchmark(step).isfinite()


def test_generation(benchmark, model):
    """Eight tokens, one at a time: what a call costs beside its arithmetic."""
    (tokens,) = benchmark(model.generate, [list(range(10, 42))], max_new_tokens=8, temperature=0.0)
    assert len(tokens) == 32 + 8
