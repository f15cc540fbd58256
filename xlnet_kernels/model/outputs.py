"""What models return: named tuples, which DDP, FSDP and torch.compile look into without being told."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._torch import register_output
from .memory import ProjectedMemory


@register_output
class XLNetOutput(NamedTuple):
    """Of `XLNetModel`; what was not asked for is None.

    last_hidden_state: (B, N, d_model) of the targets where there are some, else (B, L, d_model).
    mems: one (M, B, d_model) per layer, detached, or `ProjectedMemory` where that was given.
    hidden_states: the input of every layer and the last output, (B, L, d_model); with targets h and g take turns.
    attentions: per layer (B, H, L, M + L) after dropout; with targets a pair (content, query) of these.
    """

    last_hidden_state: Tensor
    mems: list[Tensor] | ProjectedMemory | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple | None = None


@register_output
class HeadOutput(NamedTuple):
    """Of the language model, the classifiers and multiple choice: `loss` where there were labels, `logits`, the rest
    as in `XLNetOutput`."""

    loss: Tensor | None
    logits: Tensor
    mems: list[Tensor] | ProjectedMemory | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple | None = None


@register_output
class SpanOutput(NamedTuple):
    """Of `XLNetForQuestionAnsweringSimple`: start_logits and end_logits (B, L)."""

    loss: Tensor | None
    start_logits: Tensor
    end_logits: Tensor
    mems: list[Tensor] | ProjectedMemory | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple | None = None


@register_output
class BeamOutput(NamedTuple):
    """Of `XLNetForQuestionAnswering`: `loss` in training, everything else without answers.

    start_top_log_probs, start_top_index: (B, S), the S = min(start_n_top, L) likeliest starts.
    end_top_log_probs, end_top_index: (B, E * S), E = min(end_n_top, L) ends for each; entry e * S + s belongs to
        start s.
    cls_logits: (B,), higher where the question has no answer.

    The log-probabilities are logarithms; transformers' fields of these names hold probabilities.
    """

    loss: Tensor | None = None
    start_top_log_probs: Tensor | None = None
    start_top_index: Tensor | None = None
    end_top_log_probs: Tensor | None = None
    end_top_index: Tensor | None = None
    cls_logits: Tensor | None = None
    mems: list[Tensor] | ProjectedMemory | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple | None = None
