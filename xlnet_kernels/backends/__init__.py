"""The implementations of the operator.

Each is a module with `DEVICE`, `DTYPES` and `MAX_WIDTH` (the device type, the dtypes and the largest head width it
serves, None for all), `unavailable()` (why it cannot be used on this machine, or None) and `rel_attention` with the
reference's signature. To add one: write that module and name it here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from . import cpu, reference, triton

_BACKENDS = {"cpu": cpu, "triton": triton, "reference": reference}  # best first
_PLANNED = {"cuda": "not in this version"}


@dataclass(frozen=True)
class Available:
    """The backend can be used."""

    reason: str = "ready"
    available = True

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Unavailable:
    """The backend cannot be used; `reason` says why."""

    reason: str
    available = False

    def __str__(self) -> str:
        return self.reason


def backends() -> dict[str, Available | Unavailable]:
    """Which backends can be used on this machine, and why the others cannot.

    >>> backends()["reference"].available
    True
    """
    found = {}
    for name, backend in _BACKENDS.items():
        reason = backend.unavailable()
        found[name] = Available() if reason is None else Unavailable(reason)
    return found | {name: Unavailable(reason) for name, reason in _PLANNED.items()}


def choose(name: str | None, device_type: str, dtype: torch.dtype, width: int):
    """The backend module called `name`, or the best one for tensors of `dtype` and head width `width` on
    `device_type`.

    Raises:
        ValueError: there is no backend of that name.
        RuntimeError: the backend asked for by name cannot serve the call.
    """
    if name is None:
        return next(backend for backend in _BACKENDS.values() if _refusal(backend, device_type, dtype, width) is None)
    if not isinstance(name, str) or name not in [*_BACKENDS, *_PLANNED]:
        raise ValueError(f"backend must be None or one of {[*_BACKENDS, *_PLANNED]}, got {name!r}")
    reason = _PLANNED[name] if name in _PLANNED else _refusal(_BACKENDS[name], device_type, dtype, width)
    if reason is not None:
        raise RuntimeError(f'backend="{name}" is unavailable: {reason}')
    return _BACKENDS[name]


def _refusal(backend, device_type: str, dtype: torch.dtype, width: int) -> str | None:
    """Why the backend cannot serve this call, or None."""
    if backend.DEVICE is None:
        return None
    if backend.DEVICE != device_type:
        return f"it serves {backend.DEVICE} tensors, query is on {device_type}"
    if dtype not in backend.DTYPES:
        return f"it serves {', '.join(str(served) for served in backend.DTYPES)}, query is {dtype}"
    if backend.MAX_WIDTH is not None and width > backend.MAX_WIDTH:
        return f"it serves head widths up to {backend.MAX_WIDTH}, query has {width}"
    if _transformed():
        return "torch.func transforms and forward-mode gradients need the reference"
    return backend.unavailable()


def _transformed() -> bool:
    """Whether the call is inside grad, vmap or jvp of torch.func, or a dual level: registered kernels know none."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
