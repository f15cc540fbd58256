"""Comparison of a backend with the reference before the first call of each kind.

It happens on GPUs of a kind that no committed result vouches for: a small problem with the call's options, of its dtype
and head_dim, and backward only where the call wants gradients. A backend that is wrong or fails does not serve such
calls. Results are kept in a file, for the next process. XLNET_KERNELS_SELF_CHECK=0 leaves the comparison out, =1 makes
it in every process and on every device.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import threading
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import _environment, _extension
from .._precision import float32_precision
from .._torch import constant_for_compilers, fixed_size, transformed
from .._version import __version__
from ..call import DIFFERENTIABLE, INPUT_NAMES, Call, mem_len
from . import gpus, self_check
from .registry import BACKENDS
from .triton import features

_LOGGER = logging.getLogger("xlnet_kernels")
# Compute capabilities on which a result under benchmarks/results/ shows the GPU tests to have passed, by backend.
VOUCHED: dict[str, frozenset[tuple[int, int]]] = {"cuda": frozenset(), "triton": frozenset()}
FILE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "xlnet_kernels" / "self_check.jsonl"
# The operator's optional tensors but dropout_state, the last, for which `has_dropout` stands
_FIRST_OPTIONAL, _END_OPTIONAL = 4, len(INPUT_NAMES) - 1
_OPTIONAL = INPUT_NAMES[_FIRST_OPTIONAL:_END_OPTIONAL]
_NO_GRADIENTS = (False,) * DIFFERENTIABLE
MANY_KEYS = 2100  # CUDA's forward splits them among blocks where there are few rows
_AGAIN = f"{FILE} keeps this result, XLNET_KERNELS_SELF_CHECK=1 compares again, and "
# Names of exceptions that a compiler raises for a kernel, whatever else runs on the machine
_LASTING = ("CompilationError", "OutOfResources")


class Kind(NamedTuple):
    """The facts of a call that select a kernel."""

    dtype: torch.dtype
    head_dim: int
    given: tuple[bool, ...]  # whether a call has each of _OPTIONAL
    needs: tuple[bool, ...]  # whether each differentiable input wants a gradient
    bounded: tuple[bool, bool]  # rel_key has no row for some key before its query, for some key after it
    rel_batch: bool  # rel_key of each sequence
    rows: str  # "few" over many keys, "more" than keys of the segment, or ""
    has_dropout: bool
    deterministic: bool
    float32_precision: int

    def problems(self) -> tuple[self_check.Problem, ...]:
        """Small problems of this kind. Kernels for few rows also serve as others do, by the GPU's processors."""
        return (self._problem(self.rows),) if self.rows != "few" else (self._problem("few"), self._problem(""))

    def _problem(self, kind_of_rows: str) -> self_check.Problem:
        given = {name for name, is_given in zip(_OPTIONAL, self.given, strict=True) if is_given}
        behind, ahead = self.bounded
        is_few = kind_of_rows == "few"
        # K and M of calls with and without memory
        sizes = ((MANY_KEYS // 2, MANY_KEYS // 2), (MANY_KEYS, 0)) if is_few else ((70, 21), (70, 0))
        length, mem_len = sizes["memory_key" not in given]
        has_positions = "query_positions" in given
        rows = {"few": 3, "more": 81, "": 60 if has_positions else None}[kind_of_rows]
        # Wide enough for keys in parts, where rows are few
        left = MANY_KEYS - 100 if is_few else 20
        return self_check.Problem(
            "first call",
            self.dtype,
            self.head_dim,
            length=length,
            mem_len=mem_len,
            mask="dense" if "mask" in given else "order" if "key_rank" in given else None,
            rows=rows,
            positions="sorted" if "query_order" in given else "unsorted" if has_positions else None,
            segments="segment_embed" in given,
            is_causal=ahead,
            window=(left, 8 if ahead else length - 1) if behind else None,
            rel_batch=self.rel_batch,
            dropout_p=0.25 if self.has_dropout else 0.0,
            deterministic=self.deterministic,
            needs=frozenset(name for name, needed in zip(INPUT_NAMES, self.needs, strict=False) if needed),
            without=frozenset(_OPTIONAL) - given,
        )


def kind_of(call: Call) -> Kind | None:
    """The kind of a call, whose numbers may still be None; None in a compiled graph that leaves head_dim free."""
    query, deterministic = call.query, call.deterministic
    batch, heads, length, head_dim = query.shape
    max_distance, memory, keys, rel_len = call.max_distance, mem_len(call), call.key.shape[2], call.rel_key.shape[-2]
    if max_distance is None:
        max_distance = memory + keys
    are_free = False
    if torch.compiler.is_compiling():
        sizes: list[Any] = [head_dim, batch, heads, length, max_distance, memory, keys, rel_len]
        head_dim, batch, heads, length, max_distance, memory, keys, rel_len = sizes = [*map(fixed_size, sizes)]
        if head_dim is None:
            return None
        are_free = None in sizes
    # Free sizes count as ordinary ones, because a comparison would fix them in the graph.
    bounded, rows = (False, False), ""
    if not are_free:
        bounded = max_distance < memory + keys - 1, rel_len < max_distance + keys
        if memory + keys >= max(MANY_KEYS, 16 * length) and batch * heads * -(-length // 128) <= 40:
            rows = "few"
        elif length > keys and call.query_positions is not None:
            rows = "more"
    inputs: tuple[Any, ...] = call[:DIFFERENTIABLE]
    needs = _NO_GRADIENTS
    if torch.is_grad_enabled():
        needs = tuple([value is not None and value.requires_grad for value in inputs])
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return Kind(
        query.dtype,
        head_dim,
        tuple([value is not None for value in call[_FIRST_OPTIONAL:_END_OPTIONAL]]),
        needs,
        bounded,
        call.rel_key.dim() == 4,
        rows,
        # Not the comparison itself, because compilers make it a symbol where dropout_p is an argument.
        True if call.dropout_p > 0 else False,
        deterministic and True in needs,
        float32_precision(query.device.type) if query.dtype == torch.float32 else 0,
    )


@constant_for_compilers
def is_wanted(device: torch.device) -> bool:
    """Whether some backend of a device has to be compared."""
    return any(has_to_be_compared(name, device) for name in VOUCHED)


def has_to_be_compared(name: str, device: torch.device) -> bool:
    """Whether a backend is compared on a device; not on fake GPUs."""
    wish = _wish()
    if wish == "" and device.type == "cuda" and gpus.number(device) is not None:
        return not _is_vouched_for(name, device)
    return wish == "1" and name != "reference"


def known_kind(name: str, call: Call) -> Kind | None:
    """The kind of an unchecked call, if the backend was compared for it; None where the call may be wrong, too."""
    try:
        kind = kind_of(call)
        return kind if kind is not None and (name, call.query.device, *kind) in _verdicts else None
    except (AttributeError, IndexError, OverflowError, RuntimeError, TypeError, ValueError):
        return None


_lock = threading.RLock()
# The fault, or None. By device, because a machine may have GPUs of several kinds.
_verdicts: dict[tuple, str | None] = {}  # by backend, device and the fields of `Kind`
_wrong: dict[tuple[str, str, torch.dtype], str] = {}  # one of the faults, by backend, device type and dtype


@constant_for_compilers
def check_once(name: str, device: torch.device, *kind) -> None:
    """Compare a backend with the reference at its first call of a kind; `kind`: the fields of `Kind`."""
    key = name, device, *kind
    if key in _verdicts or not has_to_be_compared(name, device):
        return
    if transformed() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    with _lock:
        if key not in _verdicts:
            remembered = _remembered(device)
            try:
                about = _text(name, kind)
                reason = remembered[about] if about in remembered else _compare(name, device, Kind(*kind))
            except torch.OutOfMemoryError:
                return  # not a verdict on the backend; the next call repeats the comparison
            _verdicts[key] = reason
            if reason is not None:
                _wrong.setdefault((name, device.type, kind[0]), reason)
                reason = f'backend "{name}" is not used for such calls, as {reason}'
                warnings.warn(f"xlnet_kernels: {reason} ({_versions(device)})", RuntimeWarning, stacklevel=2)


@constant_for_compilers
def refusal(name: str, device: torch.device, dtype: torch.dtype, *kind) -> str | None:
    """The fault found by `check_once`, or None; that of any kind and device where this kind was not compared here."""
    reason = _wrong.get((name, device.type, dtype))
    if reason is None or _wish() == "0":
        return None
    return _verdicts.get((name, device, *kind), reason) if kind else reason


def _compare(name: str, device: torch.device, kind: Kind) -> str | None:
    _LOGGER.info("comparing backend %s with the reference once, for calls like this one (%s)", name, kind)
    is_lasting = device.type == "cuda"
    try:
        found = (self_check.compare(BACKENDS[name], problem, str(device)) for problem in kind.problems())
        wrong = next(filter(None, found), None)
        reason = f"its results are wrong on this device: {'; '.join(wrong)}" if wrong else None
    # Every exception of a compiler or driver, because the next backend may work.
    except Exception as failure:
        if isinstance(failure, torch.OutOfMemoryError) or "out of memory" in str(failure):
            raise torch.OutOfMemoryError(str(failure)) from failure
        is_lasting = is_lasting and type(failure).__name__ in _LASTING
        reason = f"it could not be compared with the reference on this device: {type(failure).__name__}: {failure}"
    if reason is not None:
        reason += f". {_AGAIN if is_lasting else ''}XLNET_KERNELS_SELF_CHECK=0 uses it anyway"
    if is_lasting:
        _remember(_text(name, kind), device, reason)
    return reason


def _text(name: str, kind: tuple) -> str:
    return f"{name} {tuple(kind)}"


@functools.cache
def _stack(device: torch.device) -> dict[str, str]:
    """The software and the GPU of a comparison."""
    folder = Path(__file__).parent / "triton"
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()[:16]
    try:
        triton = features.installed()
    except metadata.PackageNotFoundError:
        triton = ""
    is_gpu = device.type == "cuda"
    return {
        "xlnet_kernels": __version__,
        "build": f"{_build()} {sources}",
        "Triton": triton,
        "torch": torch.__version__,
        "driver": gpus.driver() if is_gpu else "",
        "device": torch.cuda.get_device_name(device) if is_gpu else device.type,
    }


def _build() -> str:
    """The build of the compiled library: its record, and the time of its file."""
    file = getattr(_extension.module, "__file__", None)
    return f"{_extension.build_record()} {os.stat(file).st_mtime_ns}" if file else ""


def _versions(device: torch.device) -> str:
    return ", ".join(f"{name} {value}" for name, value in _stack(device).items() if value and name != "build")


def _remembered(device: torch.device) -> dict[str, str | None]:
    """Earlier processes' results with this stack, by `_text`."""
    found = {}
    if device.type == "cuda" and _wish() != "1":
        try:
            lines = FILE.expanduser().read_text(errors="replace").splitlines()
        except (OSError, RuntimeError):  # RuntimeError: there is no home
            lines = []
        for line in lines:
            try:
                result = json.loads(line)
                if result["stack"] == _stack(device):
                    found[result["call"]] = result["fault"]
            except (ValueError, KeyError, TypeError):
                continue  # a line cut short by a full disk
    return found


def _remember(about: str, device: torch.device, reason: str | None) -> None:
    line = json.dumps({"stack": _stack(device), "call": about, "fault": reason})
    try:
        file = FILE.expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        # One line in one write, because several processes may append.
        with open(file, "a") as stream:
            stream.write(f"{line}\n")
    except (OSError, RuntimeError):
        _LOGGER.debug("no results of comparisons in %s", FILE, exc_info=True)


# Cached, because reading the environment takes a tenth of a small call's time.
@functools.cache
def _wish() -> str:
    return _environment.read("XLNET_KERNELS_SELF_CHECK", ("0", "1").__contains__)


@functools.cache
def _is_vouched_for(name: str, device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) in VOUCHED.get(name, ())
