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

from ._environment import warn_of_names_and_instruction_set
from ._library_file import fault
from ._sources import digest
from ._version import __version__

HERE = Path(__file__).parent
AGAIN = "install xlnet_kernels again"


def build_record(folder: Path | None = None) -> dict:
    """What setup.py wrote down: the torch it built for (None: nothing compiled) and its decisions. {} if none.

    folder: default where the loaded extension is, else this package.
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


def mismatch(built_for: str, have: str) -> str | None:
    """Why an extension built for one torch cannot run with another: the C++ ABI changes with each minor version."""
    if built_for.split(".")[:2] == have.split(".")[:2]:
        return None
    return f"the compiled extension was built for torch {built_for}, you have {have}: {AGAIN}"


def find_installed() -> ModuleSpec | None:
    """The extension of another package folder of this version: an installed one that a source tree hides."""
    for entry in dict.fromkeys(sys.path):
        folder = Path(entry or ".").absolute() / HERE.name
        try:
            version = re.search(r'^__version__ = "(.+)"', (folder / "_version.py").read_text(), re.MULTILINE)
        except (OSError, ValueError):
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
    own = [f"_C{suffix}" for suffix in EXTENSION_SUFFIXES]
    libraries = sorted(file for file in HERE.glob("_C.*") if file.suffix in (".so", ".pyd", ".dylib"))
    if other := [file for file in libraries if file.name not in own]:
        reason = f"{other[0]} is for another Python or platform, this one takes {own[0]}: {AGAIN}"
    elif decision is None:
        reason = "the compiled extension is missing: this source tree was never built (pip install -e .)"
    else:
        reason = f"the compiled extension is missing, although it was built: {AGAIN}"
    spec = spec or find_installed()
    if spec is None or spec.origin is None:
        return None, reason
    folder = Path(spec.origin).parent
    sources = digest(HERE.parent / "csrc")
    if not sources or build_record(folder).get("sources") != sources:
        return None, f"{reason}; the one in {folder} was built from other sources: {AGAIN}"
    return spec, None


def load() -> tuple[ModuleType | None, str | None]:
    """Returns (module, None) or (None, reason)."""
    spec, reason = find(build_record(HERE))
    if spec is None or spec.loader is None or spec.origin is None:
        return None, reason
    # Asked before loading: code for another ABI and a truncated file may crash the process instead of raising.
    file = Path(spec.origin)
    have, built_for = torch.__version__, build_record(file.parent).get("torch")
    if built_for and (reason := mismatch(built_for, have)):
        return None, f"{file}: {reason}"
    if wrong := fault(file):
        return None, f"{file} {wrong}: {AGAIN}"
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the loader, Python or torch's registry raises
        built = f" (built for torch {built_for}, you have {have})" if built_for else ""
        return None, f"{file} does not load{built}: {_cure(error)}"
    reason = mismatch(module.torch_version, have)
    if reason is not None:
        return None, f"{file}: {reason}"
    sys.modules[spec.name] = module
    return module, None


def _cure(error: Exception) -> str:
    """An error of the dynamic loader in one line, with what to do."""
    text = next(iter(str(error).splitlines()), type(error).__name__)
    if missing := re.match(r"(\S+): cannot open shared object file: No such file", text):
        package = " (Debian, Ubuntu: apt-get install libgomp1)" if missing[1].startswith("libgomp") else ""
        return f"it needs {missing[1]}, which this system has not got{package}"
    if "undefined symbol" in text:
        return f"it was built for another torch or Python ({text.split(': ', 1)[-1]}): {AGAIN}"
    return f"{text}: {AGAIN}"


module, reason = None, None
module, reason = load()
if reason is not None and not reason.startswith("built without"):
    warnings.warn(f"xlnet_kernels runs without its C++ and CUDA kernels: {reason}", RuntimeWarning, stacklevel=2)
warn_of_names_and_instruction_set(module)
