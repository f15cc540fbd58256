"""Every way in which the CUDA kernels shift a band in registers, on the host, against the shift's definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lib.simt import simt_build
from tests.cuda.simt_kernels import INT, POINTER, Kernels, arguments

pytestmark = pytest.mark.skipif(simt_build.COMPILER is None, reason=simt_build.NO_COMPILER)

Shift = arguments("Shift", band=POINTER, shifts=POINTER, scores=POINTER, way=INT)
# in the order of shift.cu's enumerators
DEFINITION, *WAYS = "definition known-16 known-window known-halves found-16 found-window found-halves".split()
OVERWRITES = {"found-halves"}
HIDES = {"found-window": -torch.inf, "found-halves": -torch.inf}  # rows that are not served; others leave them alone

BAND = torch.arange(64 * 128.0).view(64, 128)  # no number twice
CONSECUTIVE = torch.arange(63, -1, -1)


def close(seed: int) -> torch.Tensor:
    """A window of the warpgroup kernels: of eight rows within 8, some not at all."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(57, (8, 1), generator=generator)
    first[seed % 8] = 8 * (seed % 8)
    shifts = (first + torch.randint(9, (8, 8), generator=generator)).flatten()
    shifts[torch.rand(64, generator=generator) < 0.2] = -1
    return shifts


def anywhere(seed: int) -> torch.Tensor:
    """Rows in any order, several slices of the window to a warp."""
    return torch.randint(-1, 64, (64,), generator=torch.Generator().manual_seed(seed))


LAST = torch.full((64,), 64)  # the most that a window of the warpgroup kernels serves: its last tile of all
SERVED = {
    "known-16": [CONSECUTIVE],
    "known-window": [CONSECUTIVE],
    "known-halves": [CONSECUTIVE],
    "found-16": [CONSECUTIVE, *map(anywhere, range(10))],
    "found-window": [CONSECUTIVE, LAST, *map(close, range(40))],
    "found-halves": [CONSECUTIVE, LAST, *map(close, range(40))],
}


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels(
        simt_build.library([Path(__file__).with_name("shift.cu")], "shift", ["-std=c++20", "-Wno-unknown-pragmas"])
    )


def shifted(kernels: Kernels, way: str, shifts: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores = scores.clone()
    number = [DEFINITION, *WAYS].index(way)
    assert kernels("shift", Shift, (BAND, shifts.int(), scores, number)) is None
    return scores


def test_definition(kernels):
    """Column j of a row is column j + shift of its band."""
    shifts, scores = close(0), torch.rand(64, 64).round(decimals=2)
    columns = shifts.clamp(min=0)[:, None] + torch.arange(64)
    expected = torch.where(shifts[:, None] >= 0, scores + BAND.gather(1, columns), scores)
    assert torch.equal(shifted(kernels, DEFINITION, shifts, scores), expected)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_as_defined(kernels, way):
    scores = torch.randint(1000, (64, 64), generator=torch.Generator().manual_seed(1)).float()
    for shifts in SERVED[way]:
        expected = shifted(kernels, DEFINITION, shifts, torch.zeros_like(scores) if way in OVERWRITES else scores)
        expected[shifts < 0] = HIDES.get(way, scores[shifts < 0])
        assert torch.equal(shifted(kernels, way, shifts, scores), expected), shifts
