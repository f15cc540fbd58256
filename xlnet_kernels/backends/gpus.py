"""Facts of GPUs, by device, because a machine may have several kinds."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import torch

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def number(device: torch.device | None = None) -> int | None:
    """The number of a GPU, of the current one unless `device` names one; None on a machine without a GPU."""
    # The first question is cheap, and true for every tensor on a GPU.
    if not torch.cuda.is_initialized() and not torch.cuda.is_available():
        return None
    is_named = device is not None and device.type == "cuda" and device.index is not None
    return device.index if is_named else torch.cuda.current_device()  # type: ignore[union-attr]


@functools.cache
def driver() -> str:
    """The version of NVIDIA's driver, "" if unknown."""
    try:
        return _DRIVER_FILE.read_text().splitlines()[0]
    except (OSError, IndexError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.partition("\n")[0]
        except (OSError, subprocess.SubprocessError):
            return ""
