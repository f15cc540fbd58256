"""Fused two-stream relative attention (Transformer-XL, XLNet) for PyTorch."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from . import integrations
from ._version import __version__
from .attention import TwoStreamAttention
from .backends import Available, Unavailable, backends
from .distributed.tensor_parallel import tensor_parallel_plan
from .functional import rel_attention
from .linear import Linear
from .masks import RankMask
from .merging import merge
from .model import (
    ProjectedMemory,
    XLNetConfig,
    XLNetForMultipleChoice,
    XLNetForQuestionAnswering,
    XLNetForQuestionAnsweringSimple,
    XLNetForSequenceClassification,
    XLNetForTokenClassification,
    XLNetLMHeadModel,
    XLNetModel,
)
from .positions import relative_positions
from .segments import Segments
from .two_streams import RowPositions

if TYPE_CHECKING:
    from . import pretraining
    from .integrations import accelerate, restore

__all__ = [
    "Available",
    "Linear",
    "ProjectedMemory",
    "RankMask",
    "RowPositions",
    "Segments",
    "TwoStreamAttention",
    "Unavailable",
    "XLNetConfig",
    "XLNetForMultipleChoice",
    "XLNetForQuestionAnswering",
    "XLNetForQuestionAnsweringSimple",
    "XLNetForSequenceClassification",
    "XLNetForTokenClassification",
    "XLNetLMHeadModel",
    "XLNetModel",
    "__version__",
    "accelerate",
    "backends",
    "integrations",
    "merge",
    "pretraining",
    "rel_attention",
    "relative_positions",
    "restore",
    "tensor_parallel_plan",
]


def __getattr__(name: str) -> Any:
    """Import `pretraining`, `accelerate` and `restore` on first access."""
    if name in ("accelerate", "restore"):
        return getattr(integrations, name)
    if name == "pretraining":
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names and submodules, without this file's own imports."""
    modules = {name for name in globals() if f"{__name__}.{name}" in sys.modules and not name.startswith("_")}
    return sorted({*modules, *__all__, *(name for name in globals() if name.startswith("__"))})
