"""Integration of other libraries' models with the operator. Those libraries are imported only on demand."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import conformer, transformers
    from ._accelerate import accelerate, accelerated, restore
    from .registry import register
    from .relative_attention import RelativeAttention

_PLACES = {
    "RelativeAttention": "relative_attention",
    "accelerate": "_accelerate",
    "accelerated": "_accelerate",
    "register": "registry",
    "restore": "_accelerate",
}
__all__ = ["RelativeAttention", "accelerate", "accelerated", "conformer", "register", "restore", "transformers"]


def __getattr__(name: str) -> Any:
    """Import public names on first access."""
    if name in _PLACES:
        return getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
