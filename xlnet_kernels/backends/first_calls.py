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
from typing import NamedTuple

import torch

from .. import _environment, _extension
from .._precision import float32_precision
from .._torch import constant_for_compilers, fixed_size, transformed
from .._version import __version__
from ..call import DIFFERENTIABLE, INPUT_NAMES, Call, mem_len
from . import gpus, self_check
from .triton import features

_LOGGER = logging.getLogger("xlnet_kernels")
# Compute capabilities on which a result under benchmarks/results/ shows the GPU tests to have passed, by backend.
VOUCHED: dict[str, frozenset[tuple[int, int]]] = {"cuda": frozenset(), "triton": frozenset()}
FILE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "xlnet_kernels" / "self_check.jsonl"
_OPTIONAL = tuple(name for name in INPUT_NAMES[4:] if name != "dropout_state")  # `has_dropout` stands for that


class Kind(NamedTuple):
    """The facts of a call that select a kernel."""

    dtype: torch.dtype
    head_dim: int
    tensors: tuple[str, ...]  # the optional ones that are given
    bounded: tuple[bool, bool]  # rel_key has no row for some key before its query, for some key after it
    has_dropout: bool
    deterministic: bool
    float32_precision: int
    has_gradients: bool

    def problem(self) -> self_check.Problem:
        """A small problem of this kind."""
        behind, ahead = self.bounded
        length = self_check.Problem.length
        return self_check.Problem(
            "first call",
            self.dtype,
            self.head_dim,
            mem_len=self_check.Problem.mem_len if "memory_key" in self.tensors else 0,
            mask="dense" if "mask" in self.tensors else "order" if "key_rank" in self.tensors else None,
            stacked="query_positions" in self.tensors,
            is_sorted="query_order" in self.tensors,
            segments="segment_embed" in self.tensors,
            is_causal=ahead,
            window=(20, 8 if ahead else length - 1) if behind else None,
            dropout_p=0.25 if self.has_dropout else 0.0,
            deterministic=self.deterministic,
            has_gradients=self.has_gradients,
            without=frozenset(_OPTIONAL) - frozenset(self.tensors),
        )


def kind_of(call: Call) -> Kind | None:
    """The kind of a call, whose numbers may still be None; None in a compiled graph that leaves head_dim free."""
    query, head_dim, deterministic = call.query, fixed_size(call.query.shape[3]), call.deterministic
    if head_dim is None:
        return None
    given = [name for name in INPUT_NAMES[:DIFFERENTIABLE] if getattr(call, name) is not None]
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return Kind(
        query.dtype,
        head_dim,
        tuple(name for name in _OPTIONAL if getattr(call, name) is not None),
        _bounded(call),
        call.dropout_p > 0,
        deterministic,
        float32_precision(query.device.type) if query.dtype == torch.float32 else 0,
        torch.is_grad_enabled() and any(getattr(call, name).requires_grad for name in given),
    )


def _bounded(call: Call) -> tuple[bool, bool]:
    length, memory, rel_len = (fixed_size(size) for size in (call.key.shape[2], mem_len(call), call.rel_key.shape[-2]))
    # Free sizes are not compared, because that would fix them in the graph.
    if length is None or memory is None or rel_len is None:
        return False, False
    max_distance = memory + length if call.max_distance is None else fixed_size(call.max_distance)
    if max_distance is None:
        return False, False
    return max_distance < memory + length - 1, rel_len < max_distance + length


@constant_for_compilers
def is_wanted(device: torch.device) -> bool:
    """Whether some backend of a device has to be compared."""
    wish = _wish()
    return wish != "0" and (wish == "1" or device.type == "cuda")


_lock = threading.RLock()
# The fault, or None. By device, because a machine may have GPUs of several kinds.
_verdicts: dict[tuple[str, torch.device, Kind], str | None] = {}
_wrong: dict[tuple[str, str, torch.dtype], str] = {}  # one of the faults, by backend, device type and dtype


@constant_for_compilers
def check_once(name: str, device: torch.device, *kind) -> None:
    """Compare a backend with the reference at its first call of a kind; `kind`: the fields of `Kind`."""
    key = name, device, Kind(*kind)
    if key in _verdicts or not _has_to_be_compared(name, device):
        return
    if transformed() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    with _lock:
        if key not in _verdicts:
            remembered = _remembered(device)
            try:
                if (about := _text(*key)) in remembered:
                    reason = remembered[about]
                else:
                    reason = _compare(*key)
            except torch.OutOfMemoryError:
                return  # not a verdict on the backend; the next call repeats the comparison
            _verdicts[key] = reason
            if reason is not None:
                _wrong.setdefault((name, device.type, key[2].dtype), reason)
                reason = f'backend "{name}" is not used for such calls, as {reason}'
                warnings.warn(f"xlnet_kernels: {reason} ({_versions(device)})", RuntimeWarning, stacklevel=2)


@constant_for_compilers
def refusal(name: str, device: torch.device, dtype: torch.dtype, *kind) -> str | None:
    """The fault found by `check_once`, or None; that of any kind and device where this kind was not compared here."""
    reason = _wrong.get((name, device.type, dtype))
    if reason is None or _wish() == "0":
        return None
    return _verdicts.get((name, device, Kind(*kind)), reason) if kind else reason


def _compare(name: str, device: torch.device, kind: Kind) -> str | None:
    # Here, because that module imports this one.
    from . import _BACKENDS

    _LOGGER.info("comparing backend %s with the reference once, for calls like this one (%s)", name, kind)
    is_lasting = True
    try:
        wrong = self_check.compare(_BACKENDS[name], kind.problem(), str(device))
        reason = f"its results are wrong on this device: {'; '.join(wrong)}" if wrong else None
    # Every exception of a compiler or driver, because the next backend may work.
    except Exception as failure:
        if isinstance(failure, torch.OutOfMemoryError) or "is out of memory" in str(failure):
            raise torch.OutOfMemoryError(str(failure)) from failure
        is_lasting = "CUDA error" not in str(failure)  # which other code may have caused
        reason = f"it could not be compared with the reference on this device: {type(failure).__name__}: {failure}"
    if reason is not None:
        reason += ". XLNET_KERNELS_SELF_CHECK=0 uses it anyway"
    if is_lasting and device.type == "cuda":
        _remember(_text(name, device, kind), device, reason)
    return reason


def _text(name: str, device: torch.device, kind: Kind) -> str:
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
        "sources": f"{_extension.build_record().get('sources')} {sources}",
        "Triton": triton,
        "torch": torch.__version__,
        "driver": gpus.driver() if is_gpu else "",
        "device": torch.cuda.get_device_name(device) if is_gpu else device.type,
    }


def _versions(device: torch.device) -> str:
    return ", ".join(f"{name} {value}" for name, value in _stack(device).items() if value and name != "sources")


@functools.cache
def _remembered(device: torch.device) -> dict[str, str | None]:
    """Earlier processes' results with this stack, by `_text`."""
    found = {}
    if device.type == "cuda" and _wish() != "1":
        try:
            lines = FILE.expanduser().read_text().splitlines()
        except (OSError, RuntimeError, UnicodeDecodeError):  # RuntimeError: there is no home
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


def _has_to_be_compared(name: str, device: torch.device) -> bool:
    if name == "reference" or not is_wanted(device):
        return False
    return _wish() == "1" or not _is_vouched_for(name, device)


# Cached, because reading the environment takes a tenth of a small call's time.
@functools.cache
def _wish() -> str:
    return _environment.read("XLNET_KERNELS_SELF_CHECK", ("0", "1").__contains__)


@functools.cache
def _is_vouched_for(name: str, device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) in VOUCHED.get(name, ())
