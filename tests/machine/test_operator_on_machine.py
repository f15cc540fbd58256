"""The operator's GPU kernels as their compilers left them, on the machine: outputs and all gradients, every feature."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
import triton  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from tests.machine import cuda_driver  # noqa: E402
from tests.machine.features import Features, pairwise  # noqa: E402
from tests.machine.package import serving  # noqa: E402

EVERYTHING = "XLNET_KERNELS_MACHINE" in os.environ
BASE = Features(
    architecture=80, dtype=torch.bfloat16, head_dim=16, mask="order", rel_rows="bi", rel_batch=False, memory=False,
    positions=False, segments=True, biases=True, dropout=False, deterministic=False, grad_lse=False, tf32=False,
    aligned=False, layout="contiguous",
)  # fmt: skip
# Together they have every mask, dtype and feature once, on either architecture.
SAMPLE = {
    "order": BASE,
    "wgmma": replace(BASE, architecture=90, head_dim=64, layout="projections"),
    "uni-padding": replace(BASE, dtype=torch.float16, rel_rows="uni", mask="padding", deterministic=True),
    "memory-positions": replace(BASE, architecture=90, memory=True, positions=True, mask="ranks", grad_lse=True),
    "float32-dense": replace(BASE, dtype=torch.float32, mask="dense", segments=False, memory=True),
    "tf32-causal": replace(BASE, architecture=90, dtype=torch.float32, tf32=True, mask="causal", rel_batch=True),
    "dropout-window": replace(BASE, mask="window", dropout=True, aligned=True, head_dim=40, biases=False),
    "window-of-distances": replace(BASE, rel_rows="window", positions=True, memory=True),
    "no-mask": replace(BASE, architecture=90, dtype=torch.float16, mask=None, segments=False, head_dim=80),
}


KERNELS = {"triton": {"forward_kernel", "rows_kernel", "keys_kernel"}, "cuda": {"forward_kernel", "backward_kernel"}}
# nvcc takes a minute for each architecture: a normal run has the kernels of one of them
NVCC_ARCHITECTURE = 80


@pytest.fixture(params=["triton", "cuda"])
def backend(request) -> str:
    if request.param == "cuda" and cuda_driver.unavailable() is not None:
        pytest.skip(cuda_driver.unavailable())
    return request.param


@pytest.mark.parametrize("features", SAMPLE.values(), ids=SAMPLE.keys())
def test_sample(backend, features):
    if backend == "cuda" and not EVERYTHING:
        features = replace(features, architecture=NVCC_ARCHITECTURE)
    with serving(features.architecture) as record:
        features.check(backend, features.problem(1, rows=80, most_batch=1))
    ran = " ".join(launch.name for launch in record.launches)
    assert all(name in ran for name in KERNELS[backend]), ran


@pytest.mark.skipif(cuda_driver.unavailable() is not None, reason=str(cuda_driver.unavailable()))
def test_a_kernel_that_is_refused_leaves_the_next_launch_alone(monkeypatch):
    """A GPU without the shared memory for it keeps the error until someone asks."""
    problem = BASE.problem(1, rows=40, most_batch=1)
    with serving(NVCC_ARCHITECTURE):
        with monkeypatch.context() as small:
            small.setitem(cuda_driver.SHARED_MEMORY, NVCC_ARCHITECTURE, 16 * 1024)
            with pytest.raises(RuntimeError, match="forward.*invalid argument"):
                problem.results("cuda")
        BASE.check("cuda", problem)


@pytest.mark.skipif(not EVERYTHING, reason="`make test-machine` asks for it")
@pytest.mark.parametrize("features", pairwise(), ids=str)
def test_every_pair_of_features(backend, features):
    features = features.serves(backend)
    with serving(features.architecture):
        features.check(backend, features.problem(0, rows=150))
