"""Table of tile sizes, warps and pipeline stages of the kernels, without a search at run time.

Not measured on a GPU yet. Entries "by counts" have the least load on the busiest resource (`make gpu-counts`). Entries
"by spills" have the fewest register spills among those with the widest matrix instructions of their GPUs.
docs/notebook/triton.md has what else was tried. Family 80 stays within 99 KB of shared memory, the limit of a program
on sm_86, sm_89 and sm_120; the others within 227 KB. benchmarks/results/triton-compiled.json has the compiler's counts.
benchmarks/tune_triton.py measures candidates on a GPU and writes entries of this form.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .features import ANY, family, is_on


class Config(NamedTuple):
    """Launch configuration: a tile is BLOCK_M query rows by BLOCK_N keys.

    BLOCK_M is at most 2 BLOCK_N, and BLOCK_N at least 32. For BLOCK_D and KEEP see operands.py.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    KEEP: bool
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread; None: the compiler's choice


KERNELS = ("forward", "rows", "keys")
# Source of the choice; (GPU class, kind of products, head_dim up to) -> a configuration for each of KERNELS. One class
# of lengths, because no measurement calls for more. See `gpu_class`.
TABLE = {
    # by counts
    (80, "16-bit", 64): ((64, 64, 64, True, 4, 2), (64, 64, 64, True, 4, 1), (64, 64, 64, True, 4, 2)),
    # by counts
    (80, "16-bit", 128): ((64, 32, 64, True, 4, 2), (64, 64, 64, True, 4, 1), (64, 64, 64, True, 4, 1)),
    # by spills
    (80, "16-bit", 256): ((32, 32, 64, False, 8, 1), (32, 32, 64, False, 8, 1), (32, 32, 64, False, 8, 1)),
    # by counts
    (80, "float32", 256): ((64, 64, 32, False, 4, 1), (64, 64, 32, False, 4, 1), (64, 64, 32, False, 4, 1)),
    # by spills
    (80, "ieee", 64): ((32, 32, 32, False, 8, 1), (32, 32, 32, False, 8, 1), (32, 32, 32, False, 8, 1)),
    # by spills
    (80, "ieee", 256): ((16, 32, 32, False, 8, 1), (16, 32, 32, False, 8, 1), (16, 32, 32, False, 8, 1)),
    # by counts
    (90, "16-bit", 64): ((128, 64, 64, True, 8, 2), (128, 64, 64, True, 8, 1), (64, 64, 64, True, 4, 1)),
    # by counts
    (90, "16-bit", 128): ((128, 64, 128, True, 8, 2), (128, 64, 128, True, 8, 1), (64, 64, 128, True, 4, 1)),
    # by spills
    (90, "16-bit", 256): ((64, 32, 64, False, 8, 1), (64, 32, 64, False, 8, 1), (64, 32, 64, False, 8, 1)),
    # by spills
    (100, "16-bit", 64): ((64, 64, 64, True, 4, 2), (64, 64, 64, True, 4, 1), (64, 64, 64, True, 4, 1)),
    # by spills
    (100, "16-bit", 128): ((128, 64, 128, True, 8, 2), (64, 64, 64, True, 4, 1), (64, 64, 64, True, 4, 1)),
}
PREPROCESS = Config(32, 32, 64, True, 4, 1)  # bound by memory; BLOCK_D is that of forward
_INTERPRETED = Config(64, 64, 64, True, 4, 1)  # few and large tiles


def in_registers(head_dim: int, tests: bool, capability: tuple[int, int] | None) -> bool:
    """Whether the forward kernel keeps query rows in registers; on sm_90 only those of the position product.

    Otherwise each tile reads them again from shared memory. On sm_90 they are copied for each product, so not where
    issue slots are the limit: in narrow heads with a mask or segments. Backward has no registers to spare.
    """
    if capability is None or not is_on("queries in registers", capability):
        return False
    return family(capability) == 80 or head_dim > 64 or not tests


def in_quads(config: Config, kind: str, capability: tuple[int, int] | None) -> bool:
    """Whether a tile is a fragment of mma.sync or wgmma, of 16 rows a warp; affects speed only.

    Four neighbouring threads then have the columns of a row, each two of every eight.
    """
    return is_on("fragments", capability) and kind != "ieee" and config.BLOCK_M == 16 * config.num_warps


def shifts_in_ptx(config: Config, kind: str, capability: tuple[int, int] | None) -> bool:
    """Whether shift_ptx.py shifts the scores."""
    return is_on("shift in PTX", capability) and config.BLOCK_N == 64 and in_quads(config, kind, capability)


def raises_late(config: Config, capability: tuple[int, int] | None) -> bool:
    """Whether forward raises row_max lazily: see softmax.py's LARGEST_SUM."""
    return config.KEEP and is_on("late maximum", capability)


def takes_one_pass(config: Config, kind: str, capability: tuple[int, int] | None) -> bool:
    """Whether nondeterministic backward makes the gradients of keys in the rows kernel.

    By counts: docs/notebook/triton.md, *One pass backward*.
    """
    return config.KEEP and kind == "16-bit" and is_on("one pass", capability)


def gpu_class(capability: tuple[int, int]) -> int:
    """The class of GPUs in TABLE: the family, but 86 for all of family 80 that are not sm_80; most have 99 KB."""
    return 86 if family(capability) == 80 and capability != (8, 0) else family(capability)


def choose(kernel: str, kind: str, head_dim: int, capability: tuple[int, int] | None) -> Config:
    """The configuration of `kernel`, one of KERNELS; `kind`: see kind_of. `capability` None: for Triton's interpreter.

    A family of GPUs without an entry takes that of the next lower family. Of a family's entries that are wide enough
    the narrowest counts, and of two of one width that of the GPU's own class.
    """
    config = _INTERPRETED
    if capability is not None:
        own = gpu_class(capability)
        classes = {own} | {one for one in ANY if one is not None and one <= own}
        keys = [key for key in TABLE if key[0] in classes and key[1] == kind and key[2] >= head_dim]
        best = min(keys, key=lambda key: (-(key[0] // 10), key[2], -key[0]))
        config = Config(*TABLE[best][KERNELS.index(kernel)])
    return config._replace(BLOCK_D=min(config.BLOCK_D, max(16, 1 << (head_dim - 1).bit_length())))


def kind_of(dtype: torch.dtype, precision: str) -> str:
    """Kind of products in the table: "16-bit", "float32" with tensor cores, or "ieee", float32 without them."""
    return "16-bit" if dtype.itemsize == 2 else "ieee" if precision == "ieee" else "float32"
