"""Loads the compiled extension `xlnet_kernels._C`, or says why there is none. Importing this file never fails.

module: the extension, or None
reason: None, or why there is no extension
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import torch  # first: the extension links to torch's libraries


def build_record(folder: Path | None = None) -> dict:
    """What setup.py wrote down: the torch it built for (None: nothing compiled) and its decisions. {} if none."""
    try:
        return json.loads(((folder or Path(__file__).parent) / "_build_info.json").read_text())
    except (OSError, ValueError):
        return {}


def mismatch(built_for: str, have: str) -> str | None:
    """Why an extension built for one torch cannot run with another: the C++ ABI changes with each minor version."""
    if built_for.split(".")[:2] == have.split(".")[:2]:
        return None
    return f"the compiled extension was built for torch {built_for}, you have {have}: install xlnet_kernels again"


@functools.cache
def load() -> tuple[ModuleType | None, str | None]:
    """Returns (module, None) or (None, reason)."""
    record = build_record()
    if importlib.util.find_spec("xlnet_kernels._C") is None:
        decision = record.get("extension")
        if decision is None:
            return None, "the compiled extension is missing: this source tree was never built (pip install -e .)"
        if decision.startswith("no"):
            return None, f"built without the compiled extension ({decision})"
        return None, "the compiled extension is missing, although it was built: install xlnet_kernels again"
    # Asked before loading: code for another ABI may crash the process instead of raising.
    have, built_for = torch.__version__, record.get("torch")
    if built_for and (reason := mismatch(built_for, have)):
        return None, reason
    try:
        module = importlib.import_module("xlnet_kernels._C")
    except Exception as error:  # an undefined symbol, a missing library, a failed registration
        built = f" (built for torch {built_for}, you have {have})" if built_for else ""
        return None, f"the compiled extension does not load{built}: {error}"
    reason = mismatch(module.torch_version, have)
    return (None, reason) if reason else (module, None)


module, reason = load()
