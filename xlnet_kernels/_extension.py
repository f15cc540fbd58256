"""Loads the compiled extension `xlnet_kernels._C`, or says why there is none; an accident is a warning at import.

A source tree that was never built, in whose root Python was started, takes the extension of the installed package if
that was built from the same sources.

module: the extension, or None
reason: None, or why there is no extension
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from types import ModuleType

import torch  # first: the extension links to torch's libraries

from ._sources import digest
from ._version import __version__

HERE = Path(__file__).parent


def build_record(folder: Path | None = None) -> dict:
    """What setup.py wrote down: the torch it built for (None: nothing compiled) and its decisions. {} if none.

    folder: default where the loaded extension is, else this package.
    """
    if folder is None:
        file = getattr(module, "__file__", None)
        folder = Path(file).parent if file else HERE
    try:
        return json.loads((folder / "_build_info.json").read_text())
    except (OSError, ValueError):
        return {}


def mismatch(built_for: str, have: str) -> str | None:
    """Why an extension built for one torch cannot run with another: the C++ ABI changes with each minor version."""
    if built_for.split(".")[:2] == have.split(".")[:2]:
        return None
    return f"the compiled extension was built for torch {built_for}, you have {have}: install xlnet_kernels again"


def find_installed() -> ModuleSpec | None:
    """The extension of another package folder of this version: an installed one that a source tree hides."""
    for entry in dict.fromkeys(sys.path):
        folder = Path(entry or ".").absolute() / HERE.name
        try:
            version = re.search(r'^__version__ = "(.+)"', (folder / "_version.py").read_text(), re.MULTILINE)
        except OSError:
            continue
        files = [folder / f"_C{suffix}" for suffix in EXTENSION_SUFFIXES]
        if version and version[1] == __version__ and folder.resolve() != HERE.resolve():
            for file in filter(Path.is_file, files):
                return importlib.util.spec_from_file_location(f"{__package__}._C", file)
    return None


def find(record: dict) -> tuple[ModuleSpec | None, str | None]:
    """Where the extension is, or why it is nowhere; `record` is this folder's."""
    spec = importlib.util.find_spec(f"{__package__}._C")  # of an editable install elsewhere, it may be
    if spec is not None and spec.origin and Path(spec.origin).parent.resolve() == HERE.resolve():
        return spec, None
    decision = record.get("extension")
    if decision is not None and decision.startswith("no"):
        return None, f"built without the compiled extension ({decision})"
    if decision is None:
        reason = "the compiled extension is missing: this source tree was never built (pip install -e .)"
    else:
        reason = "the compiled extension is missing, although it was built: install xlnet_kernels again"
    spec = spec or find_installed()
    if spec is None or spec.origin is None:
        return None, reason
    folder = Path(spec.origin).parent
    sources = digest(HERE.parent / "csrc")
    if not sources or build_record(folder).get("sources") != sources:
        return None, f"{reason}; the one in {folder} was built from other sources: install xlnet_kernels again"
    return spec, None


def load() -> tuple[ModuleType | None, str | None]:
    """Returns (module, None) or (None, reason)."""
    spec, reason = find(build_record(HERE))
    if spec is None or spec.loader is None or spec.origin is None:
        return None, reason
    # Asked before loading: code for another ABI may crash the process instead of raising.
    have, built_for = torch.__version__, build_record(Path(spec.origin).parent).get("torch")
    if built_for and (reason := mismatch(built_for, have)):
        return None, reason
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:  # an undefined symbol, a missing library, a failed registration
        built = f" (built for torch {built_for}, you have {have})" if built_for else ""
        return None, f"the compiled extension does not load{built}: {error}"
    reason = mismatch(module.torch_version, have)
    if reason is not None:
        return None, reason
    sys.modules[spec.name] = module
    return module, None


module, reason = None, None
module, reason = load()
if reason is not None and not reason.startswith("built without"):
    warnings.warn(f"xlnet_kernels runs without its C++ and CUDA kernels: {reason}", RuntimeWarning, stacklevel=2)
