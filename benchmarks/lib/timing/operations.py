"""Units that instructions of machine code occupy, and for how long: rates and latencies by architecture.

Sources: [guide] CUDA C++ programming guide, table "Throughput of native arithmetic instructions"; [A100], [H100]:
NVIDIA's whitepapers; [again] a repetition on an H100 SXM5 of the measurements of Luo et al. (arXiv 2402.13499 and
2501.12084): github.com/Johnsonms/NVIDIA-Hopper-Benchmark, folder reproduction/H100-dapperdingo. Latencies of all that
has no scoreboard are in the control codes, where the compiler put them.

Assumed, as no source at hand gives a figure: that an A100's memories have an H100's latencies; latency of exponentials,
of shuffles, of a barrier and of a product of warpgroups beyond its time on the tensor cores; the rate of atomic
additions, as in bounds.py. A read of operands takes until the unit has taken the operation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from compiled.control_codes import Step
from lib import bounds
from lib.timing.simulator import Operation


@dataclass(frozen=True)
class Latencies:
    """Cycles."""

    shared: float = 29  # load from shared memory, one pass [again]
    level2: float = 272  # load from the level-2 cache, as of keys, which many blocks read [again]
    special: float = 18  # assumed
    shuffle: float = 24  # assumed
    barrier: float = 20  # assumed
    drain: float = 16  # assumed


LATENCIES = {80: Latencies(), 90: Latencies()}
HMMA = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "1684": 16 * 8 * 4}  # multiply-adds; of TF32 they cost twice as much
SECTOR = 32

# The pipe of an instruction by how its name begins; the first that fits counts.
PIPES = (
    ("integer multiply", ("IMAD", "IDP", "UIMAD")),
    ("float", ("FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2", "FSWZADD")),
    ("special", ("MUFU", "I2F", "F2I", "F2F.F64", "FRND", "POPC", "FLO")),
    ("memory", ("LD", "ST", "RED", "ATOM", "SHFL", "MOVM", "S2R", "SYNCS", "UTM", "UBLKCP", "CCTL")),
    ("", ("HMMA", "HGMMA", "BAR", "BRA", "BSSY", "BSYNC", "NOP", "EXIT", "WARP", "DEPBAR", "LDGDEPBAR", "YIELD")),
    ("uniform", ("U", "R2UR", "S2UR", "CS2R", "VOTEU")),
    ("logic", ("",)),
)  # fmt: skip


def pipe(name: str) -> str:
    """The pipe that an instruction needs, "" for those that none of these limits."""
    if name.startswith("LDGDEPBAR"):
        return ""
    return next(pipe for pipe, starts in PIPES if name.startswith(starts))


def operations(steps: Sequence[Step], architecture: int) -> list[Operation]:
    """The operations of a warp that issues these instructions."""
    return [_operation(step, architecture) for step in steps]


def _operation(step: Step, architecture: int) -> Operation:
    (_, _, name, operands), control = step.instruction, step.control
    schedule = {
        "stall": control.stall, "yields": control.yields, "waits": tuple(sorted(control.waits)),
        "results": control.results, "operands": control.operands,
    }  # fmt: skip
    return Operation(**schedule, **_effect(name, operands, architecture))


def _effect(name: str, operands: str, architecture: int) -> dict:
    gpu, latencies = bounds.GPUS[architecture], LATENCIES[architecture]
    warps = bounds.WARP * bounds.SCHEDULERS  # lanes that four schedulers issue a cycle
    if name.startswith("HMMA"):
        size = next(size for shape, size in HMMA.items() if shape in name) * (2 if "TF32" in name else 1)
        return {"pipe": "tensor", "held": size * bounds.SCHEDULERS / gpu.warp_products}
    if name.startswith("HGMMA"):
        return _warpgroup_product(name, operands, gpu, latencies)
    if name.startswith(("WARPGROUP.DEPBAR", "DEPBAR.LE")):
        most = re.search(r"0x([0-9a-f]+)\s*$", operands)
        kind = "product" if name.startswith("WARPGROUP") else "copy"
        return {"leaves": (kind, int(most[1], 16) if most else 0)}
    if name.startswith("LDGDEPBAR"):
        return {"closes": "copy"}
    if name.startswith("BAR.") and name.split(".")[1] in ("SYNC", "ARV"):
        found = [part.strip() for part in operands.split(",")]
        threads = re.fullmatch(r"0x([0-9a-f]+)", found[1]) if len(found) > 1 else None
        return {"barrier": (found[0], int(threads[1], 16) // bounds.WARP if threads else 0, ".SYNC" in name)}
    kind = pipe(name)
    if kind == "memory":
        return _memory(name, gpu, latencies)
    if kind == "special":
        return {"units": (("special", warps / gpu.special),), "latency": latencies.special}
    if kind == "float":
        return {"pipe": kind, "held": warps / gpu.floats}
    if kind == "integer multiply" and gpu.floats == gpu.logic:  # float32 has another pipe of its own from sm_86 on
        kind = "float"
    return {"pipe": kind, "held": warps / gpu.logic if kind else 0.0}


def _warpgroup_product(name: str, operands: str, gpu: bounds.Gpu, latencies: Latencies) -> dict:
    """One warp's quarter of a product, m64nNk16, with what it reads from shared memory, 128 bytes a cycle.

    It takes the time of the whitepaper. An H100 reached 976 TFLOP/s at 1.98 GHz, which is 91 % of that, for operands of
    zeros, and 902 for random ones [again].
    """
    columns = int(re.search(r"64x(\d+)x", name)[1])
    on_tensor_cores = 64 * columns * 16 / gpu.tensor
    from_registers = re.match(r"\s*R\d+\S*,\s*R\d", operands)
    reads = (columns + (0 if from_registers else 64)) * SECTOR / 128 / bounds.SCHEDULERS
    found = {
        "units": (("shared memory", reads), ("tensor", on_tensor_cores)), "group": "product",
        "latency": on_tensor_cores + latencies.drain,
    }  # fmt: skip
    return found | ({"closes": "product"} if "gsb0" in operands else {})


def _memory(name: str, gpu: bounds.Gpu, latencies: Latencies) -> dict:
    """Loads, stores and copies without conflicts of banks, of which our kernels have few.

    Lanes have addresses beside each other.
    """
    words = 4 if re.search(r"\.128|M88\.4|MT88\.4|x4", name) else 2 if re.search(r"\.64|M88\.2|MT88\.2", name) else 1
    level2 = ("level-2 cache", words * 4 * bounds.WARP / SECTOR / gpu.sectors)
    shared = ("shared memory", float(words))
    if name.startswith("LDGSTS"):
        return {"units": (level2, shared), "latency": latencies.level2, "group": "copy"}
    if name.startswith(("LDG", "LD.")):
        return {"units": (level2,), "latency": latencies.level2}
    if name.startswith(("RED.", "REDG", "ATOMG")):
        atomics = ("atomics", words * 4 * bounds.WARP / SECTOR / gpu.atomics)
        return {"units": (atomics,), "latency": 0.0 if name.startswith("RED") else latencies.level2}
    if name.startswith(("STG", "ST.")):
        return {"units": (level2,)}
    if name.startswith("SHFL"):
        return {"units": (("shared memory", bounds.WARP / gpu.shuffles),), "latency": latencies.shuffle}
    if name.startswith(("LDC", "S2R", "SYNCS")):  # constants, special registers and barriers pass no banks
        return {"latency": latencies.shared}
    if name.startswith(("LDS", "LDL", "ATOMS", "MOVM")):
        return {"units": (shared,), "latency": latencies.shared + words - 1}
    return {"units": (shared,)}
