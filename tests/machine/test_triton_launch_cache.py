"""Compiled Triton kernels that are kept from call to call, and deterministic additions.

Their code is launch_cache.py and ordered_accumulation.py in xlnet_kernels/backends/triton.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
import triton  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from lib.machine.package import serving  # noqa: E402
from lib.machine.triton_driver import LAST_BLOCK_FIRST  # noqa: E402
from tests.cases import assert_right, make  # noqa: E402
from xlnet_kernels.backends.triton import launch_cache  # noqa: E402


def test_kept_kernels_get_the_tensors_of_their_call_and_those_of_their_alignment(monkeypatch):
    bound = []
    original = triton.JITFunction.run
    monkeypatch.setattr(
        triton.JITFunction, "run", lambda self, *args, **named: bound.append(self) or original(self, *args, **named)
    )
    first, second = (make(1, 1, 40, mask="order", seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    with serving(80) as record:
        first.results("triton")
        assert len(bound) == len(record.launches) == 6  # two kernels forward, four backward
        assert_right(second, "triton")  # other values, masks and segments
        assert len(bound) == 6 and len(record.launches) == 12
        wanted, _ = second.call("triton")
        given = second.leaves["query"]
        query = torch.empty(given.numel() + 4, dtype=given.dtype)[4:].view_as(given).copy_(given)
        assert query.data_ptr() % 16 == 8
        bound.clear()
        for _ in range(2):
            out, _ = replace(second, leaves=second.leaves | {"query": query}).call("triton")
            assert torch.equal(out, wanted)
    assert len(bound) == 2


QUEUES = {  # run and copies of two processors
    "one-head": (dict(heads=1, length=150), (3, 2)),
    "window": (dict(heads=2, length=150, window=(30, 41)), (1, 2)),
    "rows-far-apart": (dict(heads=4, length=70, keys=150, positions=True), (2, 1)),
}


@pytest.mark.parametrize("name", QUEUES)
def test_deterministic_additions_keep_their_order(name):
    """Whatever the order in which blocks of the same heads begin and run, several side by side."""
    sizes, queues = QUEUES[name]
    problem = make(3, width=16, mask="order", dtype=torch.bfloat16, **sizes).with_options(deterministic=True)
    found = []
    for seed in (0, 1, LAST_BLOCK_FIRST + 2):
        with serving(80, seed=seed):
            found.append(problem.results("triton"))
            assert {known.queues for known in launch_cache.plans.values()} == {queues}
    for other in found[1:]:
        assert all(torch.equal(values, found[0][result]) for result, values in other.items())


# In a normal run one compilation, which takes half a minute, for each width.
FOLDED = [(64, 70, "bi"), (64, 200, "bi"), (128, 130, "window")]
EVERY_FOLDED = [(*size, rel_rows) for size in ((64, 70), (64, 200), (128, 130)) for rel_rows in ("bi", "uni", "window")]


@pytest.mark.parametrize(
    ("width", "length", "rel_rows"),
    [pytest.param(*case, marks=[] if case in FOLDED else [pytest.mark.thorough]) for case in EVERY_FOLDED],
)
def test_folded_rows_of_tiles_that_are_not_whole(width, length, rel_rows):
    """On sm_90 rows n and n + 64 of a tile share registers; neither half, or the first alone, is whole."""
    kind = {"window": (40, 71)} if rel_rows == "window" else {"rel_rows": rel_rows}
    problem = make(1, 1, length, width=width, mask="order", dtype=torch.bfloat16, **kind)
    with serving(90):
        assert_right(problem, "triton")
        plans = launch_cache.plans.values()
        kept = [(name, meta.FOLDED) for known in plans for (name, _), (_, meta) in known.kernels.items()
                if name in ("forward_kernel", "rows_kernel")]  # fmt: skip
    assert {name for name, _ in kept} == {"forward_kernel", "rows_kernel"} and all(folded for _, folded in kept)
