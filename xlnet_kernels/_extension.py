"""Loader of the compiled kernel library, with the reason where there is none; a failure to load is a warning at import.

The library, `_kernels.so`, uses torch's stable ABI only: one build serves every Python and every torch from MIN_TORCH
on. The module of csrc/fast_path beside it is built for one Python and one minor version of torch. It makes small calls
cheaper; where it does not fit, the library works without it.

An unbuilt source tree that shadows an installed package uses the installed library, if built from the same sources.

module: the library (`_compiled.describe`), or None
reason: None, or why there is no library
fast_path_reason: None, or why there is no fast path
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType, SimpleNamespace

# Imported first, because the library links to torch's.
import torch

from ._compiled import describe
from ._environment import warn_of_names_and_instruction_set
from ._library_file import fault, takes_other_arguments
from ._ops import ops
from ._sources import digest
from ._version import __version__
from .call import Call

HERE = Path(__file__).parent
LIBRARY = "_kernels.so"
FAST_PATH = "_fast_path"
MIN_TORCH = (2, 10)  # build_backend/build_decisions.py has it too
AGAIN = "install xlnet_kernels again"


def build_record(folder: Path | None = None) -> dict:
    """The record written by setup.py: the torch it built with (None: nothing compiled) and its decisions. {} if none.

    folder: default: the loaded library's folder, else this package's.
    """
    if folder is None:
        file = getattr(module, "__file__", None)
        folder = Path(file).parent if file else HERE
    try:
        record = json.loads((folder / "_build_info.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict):
        return {}
    return {name: value for name, value in record.items() if isinstance(value, str) or value is None}


def too_old(have: str) -> str | None:
    """Why the library cannot run with this torch, or None."""
    found = re.match(r"(\d+)\.(\d+)", have)
    if found is None or (int(found[1]), int(found[2])) >= MIN_TORCH:
        return None
    least = ".".join(map(str, MIN_TORCH))
    return f'compiled kernels need torch {least} or later, you have {have}: backend "torch" serves'


def mismatch(built_for: str, have: str) -> str | None:
    """Why the fast path built for one torch cannot run with another: the C++ ABI changes with each minor version."""
    if built_for.split(".")[:2] == have.split(".")[:2]:
        return None
    return f"it was built for torch {built_for}, you have {have}: {AGAIN} from source"


def find_installed() -> Path | None:
    """The library of another package folder of this version: an installed one that a source tree shadows."""
    for entry in dict.fromkeys(sys.path):
        folder = Path(entry or ".").absolute() / HERE.name
        try:
            version = re.search(r'^__version__ = "(.+)"', (folder / "_version.py").read_text(), re.MULTILINE)
        except (OSError, ValueError):
            continue
        if version and version[1] == __version__ and folder.resolve() != HERE.resolve():
            if (folder / LIBRARY).is_file():
                return folder / LIBRARY
    return None


def find(record: dict) -> tuple[Path | None, str | None]:
    """The library's file, or the reason why there is none; `record` is this folder's."""
    if (HERE / LIBRARY).is_file():
        return HERE / LIBRARY, None
    decision = record.get("extension")
    if decision is not None and decision.startswith("no"):
        return None, f"built without the compiled kernels ({decision})"
    if decision is None:
        reason = "the compiled library is missing: this source tree was never built (pip install -e .)"
    else:
        reason = f"the compiled library is missing, although it was built: {AGAIN}"
    file = find_installed()
    if file is None:
        return None, reason
    sources = digest(HERE.parent / "csrc")
    if not sources or build_record(file.parent).get("sources") != sources:
        return None, f"{reason}; the one in {file.parent} was built from other sources: {AGAIN}"
    return file, None


def load() -> tuple[SimpleNamespace | None, str | None]:
    """Returns (module, None) or (None, reason)."""
    file, reason = find(build_record(HERE))
    if file is None:
        return None, reason
    # Checked before loading, because a library too new for torch or a truncated file may crash the process.
    if old := too_old(torch.__version__):
        return None, f"{file}: {old}"
    if wrong := fault(file) or takes_other_arguments(file, Call._fields):
        return None, f"{file} {wrong}: {AGAIN}"
    try:
        torch.ops.load_library(str(file))
        return describe(ops, str(file), load_fast_path(file.parent)), None
    # Every exception, because the loader and torch's registry raise many kinds.
    except Exception as error:
        built = build_record(file.parent).get("torch")
        built = f" (built with torch {built}, you have {torch.__version__})" if built else ""
        return None, f"{file} does not load{built}: {_cure(error)}"


def load_fast_path(folder: Path) -> ModuleType | None:
    """The module of csrc/fast_path in this folder; None, with `fast_path_reason` set, where none fits."""
    global fast_path_reason
    fast_path_reason = None
    record = build_record(folder)
    decision = record.get("fast_path") or ""
    # Because a file of an earlier build may be left, which does not fit.
    if decision.startswith("no"):
        fast_path_reason = f"it was not built ({decision})"
        return None
    own = [folder / f"{FAST_PATH}{suffix}" for suffix in EXTENSION_SUFFIXES]
    file = next(filter(Path.is_file, own), None)
    if file is None:
        others = sorted(path.name for path in folder.glob(f"{FAST_PATH}.*") if path.suffix == ".so")
        built = f"the one here, {others[0]}, is for another Python" if others else "it was not built"
        fast_path_reason = f"{built} (it is for one Python and torch: install from source)"
        return None
    built_for = record.get("torch")
    fast_path_reason = (built_for and mismatch(built_for, torch.__version__)) or fault(file)
    if fast_path_reason:
        return None
    try:
        spec = importlib.util.spec_from_file_location(f"{__package__}.{FAST_PATH}", file)
        assert spec is not None and spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        fast_path_reason = mismatch(found.torch_version, torch.__version__)
    # Every exception, because the library works without the fast path.
    except Exception as error:
        fast_path_reason = f"{file} does not load: {_cure(error)}"
    return None if fast_path_reason else found


def _cure(error: Exception) -> str:
    """An error of the dynamic loader in one line, with its remedy."""
    # The cause, because torch's own error has only the file's name.
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    text = next(iter(str(error).splitlines()), type(error).__name__)
    if missing := re.match(r"(\S+): cannot open shared object file: No such file", text):
        package = " (Debian, Ubuntu: apt-get install libgomp1)" if missing[1].startswith("libgomp") else ""
        return f"it needs {missing[1]}, which this system has not got{package}"
    if "undefined symbol" in text:
        return f"it was built for another torch or Python ({text.split(': ', 1)[-1]}): {AGAIN}"
    return f"{text}: {AGAIN}"


module: SimpleNamespace | None = None
fast_path_reason: str | None = "there are no compiled kernels"
module, reason = load()
if reason is not None and not reason.startswith("built without"):
    warnings.warn(f"xlnet_kernels runs without its C++ and CUDA kernels: {reason}", RuntimeWarning, stacklevel=2)
warn_of_names_and_instruction_set(module)
