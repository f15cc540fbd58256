"""XLNet in plain PyTorch, with attention by `xlnet_kernels.rel_attention`."""

from .config import XLNetConfig
from .encoder import XLNetModel
from .heads import (
    XLNetForMultipleChoice,
    XLNetForQuestionAnsweringSimple,
    XLNetForSequenceClassification,
    XLNetForTokenClassification,
    XLNetLMHeadModel,
)
from .memory import ProjectedMemory
from .outputs import BeamOutput, HeadOutput, SpanOutput, XLNetOutput
from .question_answering import XLNetForQuestionAnswering

__all__ = [
    "BeamOutput",
    "HeadOutput",
    "ProjectedMemory",
    "SpanOutput",
    "XLNetConfig",
    "XLNetForMultipleChoice",
    "XLNetForQuestionAnswering",
    "XLNetForQuestionAnsweringSimple",
    "XLNetForSequenceClassification",
    "XLNetForTokenClassification",
    "XLNetLMHeadModel",
    "XLNetModel",
    "XLNetOutput",
]
