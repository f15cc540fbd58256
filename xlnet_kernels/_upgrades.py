"""Gains of a newer torch, a newer Triton or another installation on this machine, from facts that `info` has collected.

Nothing is downloaded and no index is asked: the table below says which torch has which Triton.
"""

from __future__ import annotations

import re
from typing import Any

from .backends.triton.features import FEATURES, family

# Triton's minor version -> the first torch that requires it (metadata of torch's packages on PyPI)
FIRST_TORCH = {(3, 6): "2.10", (3, 7): "2.12", (3, 8): "2.14", (3, 9): "2.15"}
LEAST_CAPABILITY = (8, 0)


def upgrades(facts: dict[str, Any]) -> dict[str, str]:
    """A line each for "torch", "Triton" and "kernels"; one that begins with "nothing" where there is no gain.

    facts: as `info.collect` returns them.
    """
    return {"torch": _torch(facts), "Triton": _triton(facts), "kernels": _kernels(facts)}


def _torch(facts: dict[str, Any]) -> str:
    if facts["nvidia_driver"] and not facts["torch_cuda"]:
        return "a build for CUDA: the Triton kernels, on the NVIDIA GPU that this torch cannot use"
    least = FEATURES["backend"].since
    if _served(facts) and _version(facts["triton"]) < least:
        return f"{FIRST_TORCH[least]} or later: Triton {_dotted(least)} or later, and with it the Triton kernels"
    return f"nothing: every feature of this package runs with torch {facts['torch']}"


def _triton(facts: dict[str, Any]) -> str:
    served = _served(facts)
    if not served:
        return f"nothing: {'no GPU here has compute capability 8.0' if facts['cuda_devices'] else 'no CUDA device'}"
    families = {family(capability) for capability in served}
    found = _version(facts["triton"])
    off = {name: x.since for name, x in FEATURES.items() if x.since > found and families & {*x.families}}
    if not off:
        return f"nothing: every feature of the kernels is on with Triton {facts['triton']}"
    if "backend" in off:
        least = off["backend"]
        return f"{_dotted(least)} or later, as torch {FIRST_TORCH[least]} has: the Triton kernels"
    last = max(off.values())
    names = ", ".join(off)
    return f"{_dotted(last)} or later, as torch {FIRST_TORCH[last]} has: {names} (docs/triton.md)"


def _kernels(facts: dict[str, Any]) -> str:
    served = _served(facts)
    if facts["compiled"] is None:
        gpu = "; with CUDA's nvcc also those for the GPU" if served else ""
        return f"a wheel, or another installation with a C++ compiler: the compiled CPU kernels{gpu}"
    names = ", ".join(f"sm_{major}{minor}" for major, minor in served)
    if served and not facts["compiled"]["cuda_version"]:
        return f"another installation with CUDA's nvcc: the CUDA kernels for {names}"
    if served and "this GPU has" in facts["backends"]["cuda"]:
        return f"another installation on this machine: the CUDA kernels for {names}"
    return "nothing: the compiled kernels are loaded"


def _served(facts: dict[str, Any]) -> list[tuple[int, int]]:
    """Compute capabilities of the GPUs that have kernels: (9, 0) of "NVIDIA H100 (sm_90)"."""
    found = [re.search(r"\(sm_(\d+)(\d)\)$", device) for device in facts["cuda_devices"]]
    capabilities = {(int(match[1]), int(match[2])) for match in found if match}
    return sorted(capability for capability in capabilities if capability >= LEAST_CAPABILITY)


def _version(text: str) -> tuple[int, ...]:
    """Major and minor version; (0, 0) of what is not installed."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _dotted(version: tuple[int, int]) -> str:
    return "{}.{}".format(*version)
