"""The cases of `make bench-suite`, each beside plain SDPA of the same size. A name is what results are compared by."""

from __future__ import annotations

import pytest
import torch

import xlnet_kernels as xk
from lib.harness import Run
from lib.implementations import package_backend, plain_sdpa
from lib.modules import our_module
from lib.problem import Case, build_problem

READY = [name for name, state in xk.backends().items() if state.available]
FUSED = [name for name in READY if name != "reference"]
DIRECTIONS = ("forward", "backward")

# name -> the case on a CPU; a GPU gets 8 times the batch
OPERATOR = {
    "L128": Case(128, 8),
    "L512": Case(512, 2),
    "L1024": Case(1024, 1),
    "D128": Case(512, 1, heads=8, head_dim=128),
    "bfloat16": Case(512, 2, dtype=torch.bfloat16),
    "memory": Case(256, 2, mem_len=256),
}


@pytest.fixture
def sized(pytestconfig, device):
    """A case for this device, or a tiny one."""

    def sized(case: Case) -> Case:
        if pytestconfig.getoption("tiny"):
            return Case(32, 1, 2, 16, min(case.mem_len, 8), case.dtype, device)
        batch = case.batch * (8 if device == "cuda" else 1)
        return Case(case.length, batch, case.heads, case.head_dim, case.mem_len, case.dtype, device)

    return sized


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", OPERATOR)
@pytest.mark.parametrize("backend", FUSED)
def test_operator(measure, sized, backend, name, direction):
    problem = build_problem(sized(OPERATOR[name]))
    measure(package_backend(backend)(problem), plain_sdpa(problem), direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backend", FUSED)
def test_two_streams(measure, sized, backend, direction):
    case = sized(OPERATOR["L512"])
    run = package_backend(backend)(build_problem(case, two_streams=True))
    measure(run, plain_sdpa(build_problem(case)), direction)


@pytest.mark.parametrize("backend", FUSED)
def test_causal(measure, sized, backend):
    """Half of the tiles are empty: what skipping them is worth."""
    case = sized(OPERATOR["L1024"])
    problem = build_problem(case)
    mask = xk.RankMask.causal(case.batch, case.length).to(case.device)

    def forward() -> torch.Tensor:
        return xk.rel_attention(problem.query, problem.key, problem.value, problem.rel_key, mask=mask, backend=backend)

    measure(Run(forward, {}, problem.grad_out), plain_sdpa(problem), "forward")


def test_reference(measure, sized):
    problem = build_problem(sized(OPERATOR["L128"]))
    measure(package_backend("reference")(problem), plain_sdpa(problem), "backward")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_module(measure, sized, direction):
    pytest.importorskip("transformers")  # whose initial weights it takes
    case = sized(OPERATOR["L512"])
    measure(our_module(case, None), plain_sdpa(build_problem(case)), direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_model(measure, sized, direction):
    """A language model with permutation targets: loss, or the gradients of all weights."""
    case = sized(Case(256, 2, heads=4))
    width = case.d_model
    config = xk.XLNetConfig(
        vocab_size=1000, d_model=width, n_layer=4, n_head=case.heads, d_inner=4 * width, dropout=0.0
    )
    torch.manual_seed(0)
    model = xk.XLNetLMHeadModel(config).to(case.device)
    ids = torch.randint(1000, (case.batch, case.length))
    order = torch.stack([torch.randperm(case.length) for _ in range(case.batch)])
    targets = order >= case.length * 5 // 6
    positions = targets.nonzero()[:, 1].view(case.batch, -1).to(case.device)
    mask, ids = xk.RankMask.from_order(order, targets).to(case.device), ids.to(case.device)
    labels = ids.gather(1, positions)

    def loss() -> torch.Tensor:
        return model(ids, mask=mask, target_positions=positions, labels=labels).loss

    leaves = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    run = Run(loss, leaves, torch.ones((), device=case.device))
    measure(run, plain_sdpa(build_problem(case)), direction)


def test_generation(measure, sized):
    """Sixteen tokens, one at a time: what a call costs beside its arithmetic."""
    case = sized(Case(64, 1, heads=4))
    config = xk.XLNetConfig(vocab_size=1000, d_model=case.d_model, n_layer=4, n_head=case.heads, d_inner=256)
    torch.manual_seed(0)
    model = xk.XLNetLMHeadModel(config).to(case.device).eval()
    prompt = [list(range(10, 10 + case.length // 2))]

    def generate() -> torch.Tensor:
        return torch.cat(model.generate(prompt, max_new_tokens=16, temperature=0.0))

    measure(Run(generate, {}, torch.empty(0)), plain_sdpa(build_problem(case)), "forward")
