"""Gains of a newer torch, a newer Triton or another installation on this machine, from the facts of `info`.

Nothing is downloaded and no package index is queried: a table below maps Triton versions to torch versions.
"""

from __future__ import annotations

import re
from typing import Any

from ._extension import MIN_TORCH
from .backends.triton.features import FEATURES, family

# Triton's minor version -> the first torch that requires it (metadata of torch's packages on PyPI)
FIRST_TORCH = {(3, 6): "2.10", (3, 7): "2.12", (3, 7, 1): "2.13", (3, 8): "2.14", (3, 9): "2.15"}
BACKENDS = ("backend", "backend on sm_100")  # features without which there are no Triton kernels
LEAST_CAPABILITY = (8, 0)


def upgrades(facts: dict[str, Any]) -> dict[str, str]:
    """One line each for "torch", "Triton" and "kernels"; it begins with "nothing" where there is no gain.

    facts: as `info.collect` returns them.
    """
    return {"torch": _torch(facts), "Triton": _triton(facts), "kernels": _kernels(facts)}


def _torch(facts: dict[str, Any]) -> str:
    if facts["nvidia_driver"] and not facts["torch_cuda"]:
        return "a build for CUDA: the Triton kernels, on the NVIDIA GPU that this torch cannot use"
    least = _least_triton(facts)
    if least is not None:
        return f"{FIRST_TORCH[least]} or later: Triton {_dotted(least)} or later, and with it the Triton kernels"
    if _version(facts["torch"]) < MIN_TORCH:
        return f"{_dotted(MIN_TORCH)} or later: the compiled kernels"
    return f"nothing: every feature of this package runs with torch {facts['torch']}"


def _triton(facts: dict[str, Any]) -> str:
    served = _served(facts)
    if facts["nvidia_driver"] and not facts["torch_cuda"]:
        return "nothing: a torch built for CUDA comes first"
    if not served:
        return "nothing: no NVIDIA GPU here has compute capability 8.0 or newer"
    least = _least_triton(facts)
    if least is not None:
        return f"{_dotted(least)} or later, as torch {FIRST_TORCH[least]} has: the Triton kernels"
    families, found = {family(capability) for capability in served}, _version(facts["triton"])
    newer = {name: x for name, x in FEATURES.items() if x.since > found and name not in BACKENDS}
    off = {name: x.since for name, x in newer.items() if families & {*x.families}}
    if not off:
        return f"nothing: every feature of the kernels is on with Triton {facts['triton']}"
    last = max(off.values())
    names = ", ".join(off)
    return f"{_dotted(last)} or later, as torch {FIRST_TORCH[last]} has: {names} (docs/triton.md)"


def _kernels(facts: dict[str, Any]) -> str:
    served = _served(facts)
    if _version(facts["torch"]) < MIN_TORCH:
        return f"nothing: compiled kernels need torch {_dotted(MIN_TORCH)} or later"
    if facts["compiled"] is None:
        gpu = "; with CUDA's nvcc also those for the GPU" if served else ""
        return f"a wheel, or another installation with a C++ compiler: the compiled CPU kernels{gpu}"
    names = ", ".join(f"sm_{major}{minor}" for major, minor in served)
    if served and not facts["compiled"]["cuda_version"]:
        return f"another installation with CUDA's nvcc: the CUDA kernels for {names}"
    if served and "this GPU has" in facts["backends"]["cuda"]:
        return f"another installation on this machine: the CUDA kernels for {names}"
    return "nothing: the compiled kernels are loaded"


def _least_triton(facts: dict[str, Any]) -> tuple[int, ...] | None:
    """The first Triton with kernels for all GPUs of this machine; None where the installed version has them."""
    served, found = _served(facts), _version(facts["triton"])
    names = BACKENDS if served and served[-1][0] >= 10 else BACKENDS[:1]
    missing = [FEATURES[name].since for name in names if served and found < FEATURES[name].since]
    return max(missing, default=None)


def _served(facts: dict[str, Any]) -> list[tuple[int, int]]:
    """Compute capabilities of the GPUs that have kernels: (9, 0) of "NVIDIA H100 (sm_90)"; none with ROCm's torch."""
    if facts["torch_cuda"] is None:
        return []
    found = [re.search(r"\(sm_(\d+)(\d)\)$", device) for device in facts["cuda_devices"]]
    capabilities = {(int(match[1]), int(match[2])) for match in found if match}
    return sorted(capability for capability in capabilities if capability >= LEAST_CAPABILITY)


def _version(text: str) -> tuple[int, ...]:
    """Major, minor and patch; empty where Triton is not installed."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
