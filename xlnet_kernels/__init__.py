"""Fused two-stream relative attention (Transformer-XL, XLNet) for PyTorch."""

from . import integrations
from ._version import __version__
from .attention import TwoStreamAttention
from .backends import Available, Unavailable, backends
from .functional import rel_attention
from .linear import Linear
from .masks import RankMask
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

__all__ = [
    "Available",
    "Linear",
    "ProjectedMemory",
    "RankMask",
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
    "backends",
    "integrations",
    "rel_attention",
    "relative_positions",
]
