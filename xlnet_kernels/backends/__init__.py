"""Implementations of the operator.

Each is a module with:

- `DEVICE` and `DTYPES`: the supported device type and dtypes, None for all;
- `max_head_dim(dtype, device)`: the largest head_dim on a device (default: the current one), None for all;
- `unavailable(device)`: the reason why it cannot be used there, or None;
- `rel_attention(call)` as in reference.py.

To add a backend, write such a module and name it in registry.py.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

from .._torch import exports_to_onnx, transformed
from . import exported, first_calls, reference, torch_blocks
from .first_calls import Kind
from .registry import BACKENDS as _BACKENDS

_LOGGER = logging.getLogger("xlnet_kernels")


@dataclass(frozen=True)
class Available:
    """Marker of a usable backend."""

    reason: str = "ready"
    available = True

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Unavailable:
    """Marker of an unusable backend, with the `reason`."""

    reason: str
    available = False

    def __str__(self) -> str:
        return self.reason


def backends() -> dict[str, Available | Unavailable]:
    """The backends by name, each `Available` or `Unavailable` with the reason, on this machine.

    >>> backends()["reference"].available
    True
    """
    found = {}
    for name, backend in _BACKENDS.items():
        reason = backend.unavailable()
        found[name] = Available() if reason is None else Unavailable(reason)
    return found


def check_name(name: str | None) -> None:
    """Raise ValueError where there is no backend of that name; None, for the best available, is valid."""
    if name is not None and (not isinstance(name, str) or name not in _BACKENDS):
        raise ValueError(f"backend must be None or one of {[*_BACKENDS]}, got {name!r}")


def choose(name: str | None, device: torch.device, dtype: torch.dtype, head_dim: int, kind: Kind | None = None):
    """The backend module `name`, or the best for tensors of `dtype` and `head_dim` on `device`.

    kind: of the call, for the comparison of an unverified backend with the reference (first_calls.py); None: without.

    Raises:
        ValueError: there is no backend of that name.
        RuntimeError: the backend asked for by name cannot serve the call.
    """
    call = device, dtype, head_dim, kind
    # Because ONNX export supports torch's own operators only.
    if exports_to_onnx():
        check_name(name)
        if name not in (None, "reference"):
            raise RuntimeError(f'backend="{name}" is unavailable: torch.onnx.export needs None or "reference"')
        return exported if name is None else reference
    if name is None:
        found = reference
        for name, backend in _BACKENDS.items():
            if _refusal(name, backend, *call) is None:
                found = backend
                break
        if (found is torch_blocks or found is reference) and not torch.compiler.is_compiling():
            _explain(found, *call)
        return found
    check_name(name)
    backend = _BACKENDS[name]
    reason = backend.unavailable(device) or _refusal(name, backend, *call)
    if reason is not None:
        raise RuntimeError(f'backend="{name}" is unavailable: {reason}')
    return backend


def _explain(found, device: torch.device, *call) -> None:
    """Log why the automatic choice is a plain-torch backend: "torch" is slower, "reference" quadratic in memory."""
    served = {name: backend for name, backend in _BACKENDS.items() if backend.DEVICE == device.type}
    reasons = "; ".join(f"{name}: {_refusal(name, backend, device, *call)}" for name, backend in served.items())
    name = next(name for name, backend in _BACKENDS.items() if backend is found)
    if reasons or found is reference:
        is_expected = device.type == "cpu" or transformed()
        _log_once(logging.INFO if is_expected else logging.WARNING, name, device.type, reasons)


@functools.cache
def _log_once(level: int, name: str, device_type: str, reasons: str) -> None:
    _LOGGER.log(level, "the %s backend serves tensors on %s, since no fused one can (%s)", name, device_type, reasons)


def _refusal(
    name: str, backend, device: torch.device, dtype: torch.dtype, head_dim: int, kind: Kind | None
) -> str | None:
    """Why the backend cannot serve this call, or None."""
    if backend is reference:
        return None
    device_type = device.type
    if backend.DEVICE not in (None, device_type):
        return f"it serves {backend.DEVICE} tensors, query is on {device_type}"
    if backend.DTYPES is not None and dtype not in backend.DTYPES:
        return f"it serves {', '.join(str(served) for served in backend.DTYPES)}, query is {dtype}"
    if transformed():
        return "torch.func transforms and forward-mode gradients need the reference"
    reason = backend.unavailable(device)
    if reason is not None:
        return reason
    most = backend.max_head_dim(dtype, device)
    if most is not None and head_dim > most:
        return f"it serves head_dim up to {most}, query has {head_dim}"
    if kind is not None:
        first_calls.check_once(name, device, *kind)
    return first_calls.refusal(name, device, dtype, *(kind or ()))
