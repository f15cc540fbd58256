"""Few rows and many keys: blocks of the CUDA forward kernel that share one tile of rows, on the machine."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from lib.machine import cuda_driver  # noqa: E402
from lib.machine.package import serving  # noqa: E402
from tests.cases import make  # noqa: E402
from tests.machine.rounding import assert_right  # noqa: E402

pytestmark = pytest.mark.skipif(cuda_driver.unavailable() is not None, reason=str(cuda_driver.unavailable()))

A100, H100 = (108, 4), (132, 4)  # what `serving` takes for their size
PROBLEMS = {
    "generation": (dict(length=1, mem=1799, dtype=torch.bfloat16, width=64), (1, 14)),
    "order": (dict(length=3, mem=900, mask="order", dtype=torch.bfloat16, width=128), (1, 7)),
    "causal": (dict(length=16, mem=700, mask="causal", rel_rows="uni", dtype=torch.float16, width=40), (1, 5)),
    "window": (dict(length=17, mem=1800, window=(900, 917), segments=False, dtype=torch.bfloat16), (1, 4)),
    "float32": (dict(length=1, mem=600, mask="ranks", width=80), (1, 9)),
    "rows-in-any-order": (dict(length=70, keys=520, positions=True, mask="dense", width=96), (3, 8)),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_right_with_gradients(problem):
    sizes, (row_tiles, splits) = PROBLEMS[problem]
    given = make(1, 2, **sizes)
    with serving(80, size=A100) as record:
        assert_right(given, "cuda", with_lse=True)
    prepare, forward, merge, *backward = record.launches
    assert "forward_kernel" in forward.name and forward.grid == (row_tiles * splits * 2, 1, 1)
    assert "merge_kernel" in merge.name and len(backward) == 3


@pytest.mark.parametrize("length, mem, split", [(1, 1799, True), (1, 700, False), (4300, 900, False)])
def test_kernels_of_sm_90a_serve_what_is_not_split_by_eight(length, mem, split, monkeypatch):
    names: list[str] = []
    monkeypatch.setattr(cuda_driver.Device, "names", names)
    with serving(90, size=H100):
        make(1, 1, length, mem=mem, width=64, dtype=torch.bfloat16).run("cuda", "cpu")
    assert ("warpgroup" not in names[1]) == split == ("merge" in names[-1]), names
