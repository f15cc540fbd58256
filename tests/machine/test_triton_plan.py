"""Compiled Triton kernels that are kept from call to call: see xlnet_kernels/backends/triton/plan.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
import triton  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from tests.cases import assert_right, make  # noqa: E402
from tests.machine.package import serving  # noqa: E402


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
