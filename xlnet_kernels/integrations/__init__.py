"""Models of other libraries on our operator. Nothing of those libraries is imported before it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import conformer, transformers

__all__ = ["conformer", "transformers"]


def __getattr__(name: str) -> Any:
    """The modules are imported when they are asked for."""
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
