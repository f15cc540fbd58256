"""The backends by name, the best first."""

from __future__ import annotations

from . import cpu, cuda, reference, torch_blocks, triton

BACKENDS = {"cpu": cpu, "cuda": cuda, "triton": triton, "torch": torch_blocks, "reference": reference}
