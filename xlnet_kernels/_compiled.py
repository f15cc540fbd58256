"""Build facts of a loaded kernel library, read through the operators of csrc/stable/facts.cpp."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any


def describe(ops: Any, file: str, fast_path: Any = None) -> SimpleNamespace:
    """Build facts by name, and the library's query functions.

    ops: the operators' namespace.
    file: path of the library.
    fast_path: the module of csrc/fast_path, or None.
    """
    facts = json.loads(ops.build_facts())
    kernels, forward, backward = (
        facts.pop(name) for name in ("cuda_kernels", "cuda_forward_choices", "cuda_backward_choices")
    )
    if fast_path is not None:
        fast_path.use(ops.entries())
    return SimpleNamespace(
        **facts,
        __file__=file,
        cuda_kernels=lambda: kernels,
        cuda_forward_choices=lambda: forward,
        cuda_backward_choices=lambda: backward,
        cuda_shared_memory=ops.cuda_shared_memory,
        fast_path=getattr(fast_path, "fast_path", None),
        register_autograd=getattr(fast_path, "register_autograd", None),
    )
