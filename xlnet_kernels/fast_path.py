"""Fast path of plain calls, which skips the Python checks.

A small call spends more time on checks in Python than in its kernel; csrc/fast_path, where built, makes them in C++.
Other calls go through `functional.attend`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _extension
from ._torch import in_dispatch_mode
from .backends import choose, cpu, cuda, first_calls
from .call import Call

_fast_path = getattr(_extension.module, "fast_path", None)
# Backend name and module, by device type
_OF_DEVICE = {"cpu": ("cpu", cpu)}
if getattr(_extension.module, "cuda_version", None):
    _OF_DEVICE["cuda"] = ("cuda", cuda)
_PLAIN = (Tensor, torch.nn.Parameter)


def attend(call: Call, backend: str | None) -> tuple[Tensor, Tensor] | None:
    """The output and the log-sum-exp of an unchecked call; None where `functional` must handle it.

    These are calls with a possible error, dropout or a dense mask, and backends other than "cpu" and "cuda". So are
    calls under compilers, transforms, modes, subclasses or autocast.
    """
    query = call.query
    if _fast_path is None or type(query) not in _PLAIN or query.dim() != 4:
        return None
    if call.mask is not None or type(call.dropout_p) is not float or call.dropout_p != 0:
        return None
    if torch.compiler.is_compiling() or in_dispatch_mode():
        return None
    device = query.device
    name, module = _OF_DEVICE.get(device.type, (None, None))
    if name is None or (backend is not None and backend != name):
        return None
    kind = None
    if first_calls.has_to_be_compared(name, device):
        kind = first_calls.known_kind(name, call)
        if kind is None:
            return None
    # Under a transform of torch.func no fused backend can serve.
    if choose(None, device, query.dtype, query.shape[3], kind) is not module:
        return None
    return _fast_path(*call)
