"""From what a launch counted to the cycles that each resource of a multiprocessor needs at least.

Rates per cycle and multiprocessor. Sources: [guide] CUDA C++ programming guide, table "Throughput of native arithmetic
instructions", columns 8.0 and 9.0; [A100] NVIDIA A100 whitepaper (2020); [H100] NVIDIA H100 whitepaper (2022); [cudnn]
github.com/NVIDIA/cudnn-frontend/pull/650: 4096 operations of 16 bits a cycle and multiprocessor, 132 at 1.83 GHz;
[again] a repetition on an H100 SXM5 of the measurements of Luo et al. (arXiv 2402.13499 and 2501.12084):
github.com/Johnsonms/NVIDIA-Hopper-Benchmark, folder reproduction/H100-dapperdingo; [benches]
github.com/te42kyfo/gpu-benches, gpu-l2-cache/a100_80.txt: 5.4 TB/s, at 1.41 GHz.

Assumed, as no source at hand gives a figure: atomic sectors.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lib.machine.machine import Counts

PAIRS = 1024  # what bounds are given for
SCHEDULERS = 4  # of a multiprocessor, each issues one instruction of a warp a cycle [A100, H100]
WARP = 32


@dataclass(frozen=True)
class Gpu:
    name: str
    multiprocessors: int
    clock: float  # GHz, boost
    tensor: int  # multiply-adds of 16-bit numbers, dense [A100, H100, cudnn]
    warp_products: float  # those of them that mma.sync reaches: on H100 two thirds [again]
    floats: int  # additions, multiplications, multiply-adds of float32 [guide]
    logic: int  # selections, comparisons, logic: the pipe beside that of float32 [guide]
    special: int  # exp2, log2, reciprocals [guide]
    shuffles: int  # lanes [guide]
    shared: int  # passes through shared memory's 32 banks [guide]
    sectors: float  # of 32 bytes from the level-2 cache, see LEVEL2
    atomics: float  # sectors: one a cycle in each 64-byte-wide slice of that cache (assumed, NVIDIA gives no figure)


# Bytes a cycle from the level-2 cache, of all of a GPU. A100: [benches], below NVIDIA's limit of 5120 [A100]. H100:
# [again], where two other programs reached 3783 and 4808.
LEVEL2 = {80: 3840, 90: 4207}
GPUS = {
    80: Gpu("A100", 108, 1.41, 1024, 1024, 64, 64, 16, 32, 1, LEVEL2[80] / 32 / 108, 80 / 108),
    90: Gpu("H100", 132, 1.83, 2048, 4096 / 3, 128, 64, 16, 32, 1, LEVEL2[90] / 32 / 132, 80 / 132),
}


ASSUMED = "atomics, at an assumed rate"  # shown, but bounds nothing

# Measured speeds of Triton's tutorial kernel (06-fused-attention), float16, not causal: architecture, direction,
# head_dim, length, heads of all sequences, TFLOP/s, source. Pull request 1917, of 2023, does not name its GPU; that
# tutorial was timed on an A100 then. Nor does Triton's page, of a later compiler: FP8 is as fast as FP16 there, and all
# is below an A100's peak.
PUBLISHED = [
    (80, "forward", 64, 2048, 192, 136.6, "github.com/triton-lang/triton/pull/1917"),
    (80, "backward", 64, 2048, 192, 84.2, "github.com/triton-lang/triton/pull/1917"),
    (80, "forward", 64, 2048, 128, 159.7, "triton-lang.org/main/getting-started/tutorials/06-fused-attention.html"),
    (90, "forward", 128, 512, 512, 328.9, "github.com/pytorch/benchmark/pull/2391"),
    (90, "forward", 128, 2048, 128, 433.7, "github.com/pytorch/benchmark/pull/2391"),
    (90, "forward", 128, 2048, 128, 427.8, "github.com/facebookexperimental/triton/pull/205"),
]


def cycles(counts: Counts, gpu: Gpu, machine_instructions: float) -> dict[str, float]:
    """By resource. `machine_instructions`: how many of them, of machine code, warps issue.

    Integer arithmetic is bound by issue alone: machine code spreads it over two pipes and merges up to three of PTX's.
    """
    by_class = counts.instructions
    return {
        "issue": machine_instructions / SCHEDULERS,
        "tensor cores": counts.tensor_cycles / SCHEDULERS + _slower(counts, gpu),
        "float32": by_class.get("float", 0) * WARP / gpu.floats,
        "selections": by_class.get("selection", 0) * WARP / gpu.logic,
        "exponentials": counts.special_operations / gpu.special,
        "shuffles": by_class.get("shuffle", 0) * WARP / gpu.shuffles,
        "shared memory": counts.shared_wavefronts / gpu.shared,
        "level-2 cache": (counts.global_sectors_read + counts.global_sectors_written) / gpu.sectors,
        ASSUMED: counts.atomic_sectors / gpu.atomics,
    }


_OF_WARPS = re.compile(r"mma\.m(\d+)n(\d+)k(\d+)\.[a-z]+(8|16|32)")


def _slower(counts: Counts, gpu: Gpu) -> float:
    """Cycles that mma.sync takes beyond those of wgmma, at whose rate the machine counts all products."""
    found = [(_OF_WARPS.fullmatch(name), times) for name, times in counts.tensor.items()]
    of_16_bits = sum(times * math.prod(map(int, shape.groups())) / 16 for shape, times in found if shape)
    return of_16_bits * (1 / gpu.warp_products - 1 / gpu.tensor)


def limit(gpu: Gpu, head_dim: int, products: int) -> float:
    """Cycles for PAIRS pairs that no kernel of plain attention can do without: products, or exponentials if more."""
    return max(products * head_dim * PAIRS / gpu.tensor, PAIRS / gpu.special)


def teraflops(gpu: Gpu, cycles_of_pairs: float, head_dim: int, products: int) -> float:
    """The speed that a time of `cycles_of_pairs` for PAIRS pairs means, for all of a GPU."""
    return 2 * products * head_dim * PAIRS / cycles_of_pairs * gpu.multiprocessors * gpu.clock / 1000
