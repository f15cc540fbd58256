"""Models of other libraries on our operator. Nothing of those libraries is imported before it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import conformer, transformers
    from ._accelerate import accelerate, accelerated, restore

__all__ = ["accelerate", "accelerated", "conformer", "restore", "transformers"]


def __getattr__(name: str) -> Any:
    """What is here is imported when it is asked for."""
    if name in ("accelerate", "accelerated", "restore"):
        return getattr(importlib.import_module("._accelerate", __name__), name)
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
