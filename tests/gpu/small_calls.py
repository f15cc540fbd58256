"""Small calls of the CUDA backend, forward and backward, for compute-sanitizer: python -m tests.gpu.small_calls"""

from __future__ import annotations

import sys

import torch

from tests.cases import MODULES, make
from xlnet_kernels import backends

PROBLEMS = (
    dict(length=75, mask="order"),
    dict(length=70, mem=37, mask="ranks", rel_batch=True),
    dict(length=40, keys=150, mem=20, positions=True, rel_rows="uni", mask="order"),
)

if __name__ == "__main__":
    if "cuda" not in MODULES:
        sys.exit(f"the CUDA backend is {backends()['cuda']}")
    for dtype, width in ((torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 24)):
        width = min(width, MODULES["cuda"].max_head_dim(dtype))
        for problem in PROBLEMS:
            for deterministic in (True, False):
                given = make(1, 2, width=width, dtype=dtype, **problem).with_options(deterministic=deterministic)
                given.with_options(dropout_p=0.1).results("cuda")
    torch.cuda.synchronize()
