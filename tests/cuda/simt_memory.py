"""Tensors between pages that trap, so that a kernel that leaves them is seen."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def torch_guarded(library: ctypes.CDLL, at_start: bool = False) -> Iterator[None]:
    """All tensors that torch makes on the CPU meanwhile are like those of `guarded`; `library` is an extension."""
    library.simt_guard_torch(int(at_start))
    try:
        yield
    finally:
        library.simt_release_torch()


def guarded(library: ctypes.CDLL, tensor: torch.Tensor, at_start: bool = False) -> torch.Tensor:
    """A copy, with the same strides, in memory of a library that benchmarks/lib/simt is part of.

    What is just behind its end traps, or what is just before its start; the other side of it is NaN and, once written,
    an error of the next launch.
    """
    if tensor.numel() == 0:
        return tensor.clone()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    library.simt_allocate.restype = ctypes.c_void_p
    address = library.simt_allocate(ctypes.c_size_t(reach * tensor.element_size()), int(at_start))
    buffer = (ctypes.c_char * (reach * tensor.element_size())).from_address(address)
    weakref.finalize(buffer, library.simt_free, ctypes.c_void_p(address))
    flat = torch.frombuffer(buffer, dtype=tensor.dtype)
    flat.copy_(torch.as_strided(tensor, (reach,), (1,)))
    return flat.as_strided(tensor.shape, tensor.stride(), 0)
