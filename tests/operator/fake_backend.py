"""A backend on the CPU whose results are wrong as a test wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import torch

from xlnet_kernels.backends import first_calls, reference

BACKENDS = import_module("xlnet_kernels.backends")._BACKENDS


class Fake(SimpleNamespace):
    """The reference times `factor`. It counts its calls outside of compiled graphs, and keeps their kinds."""

    DEVICE = "cpu"
    DTYPES = (torch.float32, torch.float64)  # so that 16-bit problems are left out
    calls = 0
    factor = 1.0
    error: Exception | None = None
    wrong_gradient = False

    def __init__(self, **how) -> None:
        super().__init__(kinds=[], **how)

    def wrong_when(self, call) -> bool:
        return False

    def unavailable(self, device=None):
        return None

    def max_head_dim(self, dtype, device=None):
        return None

    def rel_attention(self, call):
        if not torch.compiler.is_compiling():
            self.calls += 1
            self.kinds.append(first_calls.kind_of(call))
        if self.error is not None:
            raise self.error
        out, lse = reference.rel_attention(call)
        if self.wrong_gradient:
            out = out.detach() + 1.1 * (out - out.detach())
        return out * (1.01 if self.wrong_when(call) else self.factor), lse


def forget(monkeypatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(first_calls, "_verdicts", {})
    monkeypatch.setattr(first_calls, "_wrong", {})


@contextmanager
def installed() -> Iterator[Callable[..., Fake]]:
    """Within it the function it gives makes a fake backend the best one, beside the reference."""
    original = dict(BACKENDS)

    def install(**how) -> Fake:
        fake = Fake(**how)
        BACKENDS.clear()
        BACKENDS.update({"fake": fake, "reference": reference})
        return fake

    try:
        yield install
    finally:
        BACKENDS.clear()
        BACKENDS.update(original)  # in their order, which is that of preference
