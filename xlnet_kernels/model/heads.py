"""Models with a head on an XLNetModel: XLNetLMHeadModel, classifiers, multiple choice and question answering.

Every `forward` passes other arguments than its own to the encoder, with the names and meanings of `XLNetModel`.
`calls.model_call` shows them in its signature.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._checks import check_range
from ..linear import Linear, linear
from .calls import model_call
from .checkpoint import PretrainedModel
from .config import ACTIVATIONS, XLNetConfig
from .encoder import XLNetModel
from .generation import Generation
from .inputs import check_labels, check_tensor
from .outputs import HeadOutput, SpanOutput, rest_of
from .tied import words_and_table

# Index of inputs_embeds among the arguments after input_ids.
_EMBEDS = list(inspect.signature(XLNetModel.forward).parameters).index("inputs_embeds") - len(("self", "input_ids"))


class HeadedModel(PretrainedModel):
    """Base class of an encoder with a head, added by `make_head`."""

    def __init__(self, config: XLNetConfig, backend: str | None = None) -> None:
        super().__init__(config)
        self.transformer = XLNetModel(self.config, backend)
        self.make_head(self.config)
        self.init_head()
        self.tie_weights()

    def make_head(self, config: XLNetConfig) -> None:
        raise NotImplementedError


class XLNetLMHeadModel(Generation, HeadedModel):
    """Language model: scores of every token at every target, or at every position without targets.

    forward(..., labels=None): labels (B, N) for N targets, else (B, L); -100 is ignored.

    >>> config = XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64)
    >>> lm = XLNetLMHeadModel(config)
    >>> ids, targets = torch.randint(100, (2, 7)), torch.tensor([[3, 5], [0, 6]])
    >>> order = torch.stack([torch.randperm(7) for _ in range(2)])
    >>> mask = RankMask.from_order(steps=order, targets=torch.zeros(2, 7, dtype=torch.bool).scatter(1, targets, True))
    >>> output = lm(ids, mask=mask, target_positions=targets, labels=ids.gather(1, targets))
    >>> output.logits.shape, output.loss.shape
    (torch.Size([2, 2, 100]), torch.Size([]))
    """

    _tied_weights_keys = {"lm_loss.weight": "transformer.word_embedding.weight"}
    _keys_to_ignore_on_save = ["lm_loss.weight"]

    def make_head(self, config: XLNetConfig) -> None:
        self.lm_loss = Linear(config.d_model, config.vocab_size)

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_loss.weight = self.transformer.word_embedding.weight

    @model_call(XLNetModel.forward)
    def forward(self, input_ids: Tensor | None = None, *inputs, labels: Tensor | None = None, **options) -> HeadOutput:
        tied = None
        embeds = inputs[_EMBEDS] if len(inputs) > _EMBEDS else options.get("inputs_embeds")
        if input_ids is not None and embeds is None:
            tied = words_and_table(self.transformer, self.lm_loss, input_ids)
        if tied is None:
            output = self.transformer(input_ids, *inputs, **options)
            logits = self.lm_loss(output.last_hidden_state)
        else:
            words, table = tied
            inputs = inputs[:_EMBEDS] + inputs[_EMBEDS + 1 :]  # only None may be there
            output = self.transformer(None, *inputs, **options | {"inputs_embeds": words})
            logits = linear(output.last_hidden_state, table, self.lm_loss.bias)
        return HeadOutput(loss=_token_loss(logits, labels), logits=logits, **rest_of(output))


class XLNetForTokenClassification(HeadedModel):
    """Token classifier: one of num_labels classes for each token.

    forward(..., labels=None): labels (B, L); -100 is ignored.

    >>> config = XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64, num_labels=5)
    >>> XLNetForTokenClassification(config)(torch.randint(100, (2, 7))).logits.shape
    torch.Size([2, 7, 5])
    """

    def make_head(self, config: XLNetConfig) -> None:
        self.classifier = nn.Linear(config.d_model, config.num_labels)

    @model_call(XLNetModel.forward)
    def forward(self, *inputs, labels: Tensor | None = None, **options) -> HeadOutput:
        output = self.transformer(*inputs, **options)
        logits = self.classifier(output.last_hidden_state)
        return HeadOutput(loss=_token_loss(logits, labels), logits=logits, **rest_of(output))


class SequenceSummary(nn.Module):
    """Sequence summary: the last (XLNet's CLS), first or mean state, projected."""

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__()
        self.kind = config.summary_type
        self.summary: nn.Module = nn.Identity()
        if config.summary_use_proj:
            width = config.num_labels if config.summary_proj_to_labels else config.d_model
            self.summary = Linear(config.d_model, width)
        self.activation = ACTIVATIONS[config.summary_activation] if config.summary_activation else nn.Identity()
        self.first_dropout = nn.Dropout(config.summary_first_dropout)
        self.last_dropout = nn.Dropout(config.summary_last_dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Summarise (B, L, d_model), or (B, 1, d_model) of the needed state."""
        state = hidden.mean(1) if self.kind == "mean" else hidden[:, -1 if self.kind == "last" else 0]
        return self.last_dropout(self.activation(self.summary(self.first_dropout(state))))


def _summary_rows(config: XLNetConfig, *inputs: Any) -> Tensor | None:
    """output_rows of `XLNetModel` for the states that `SequenceSummary` reads, on the inputs' device; None for all."""
    given = next((x for x in inputs if isinstance(x, Tensor)), None)
    # For a missing input the encoder raises the error.
    if config.summary_type == "mean" or given is None:
        return None
    return torch.full((1, 1), -1 if config.summary_type == "last" else 0, device=given.device)


class XLNetForSequenceClassification(HeadedModel):
    """Sequence classifier: one of num_labels classes, several classes, or a number, for each sequence.

    forward(..., labels=None): config.problem_type determines the labels. None: a number (B,) where num_labels is 1,
    classes (B,) where labels are integers, else probabilities (B, num_labels) of independent classes.

    >>> config = XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64, num_labels=3)
    >>> output = XLNetForSequenceClassification(config)(torch.randint(100, (2, 7)), labels=torch.tensor([0, 2]))
    >>> output.logits.shape, output.loss.shape
    (torch.Size([2, 3]), torch.Size([]))
    """

    def make_head(self, config: XLNetConfig) -> None:
        self.sequence_summary = SequenceSummary(config)
        self.logits_proj = nn.Linear(config.d_model, config.num_labels)

    @model_call(XLNetModel.forward)
    def forward(self, *inputs, labels: Tensor | None = None, **options) -> HeadOutput:
        options.setdefault("output_rows", _summary_rows(self.config, *inputs, *options.values()))
        output = self.transformer(*inputs, **options)
        logits = self.logits_proj(self.sequence_summary(output.last_hidden_state))
        return HeadOutput(loss=self._loss(logits, labels), logits=logits, **rest_of(output))

    def _loss(self, logits: Tensor, labels: Tensor | None) -> Tensor | None:
        if labels is None:
            return None
        problem = self.config.problem_type
        if problem is None and self.config.num_labels == 1:
            problem = "regression"
        elif problem is None:
            problem = "multi" if labels.is_floating_point() else "single_label_classification"
        if problem == "single_label_classification":
            return _token_loss(logits, labels.reshape(-1))
        if self.config.num_labels == 1:
            labels = labels.reshape(-1, 1)
        check_tensor("labels", labels, logits.shape, logits)
        loss = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
        return loss(logits, labels.to(logits.dtype))


class XLNetForMultipleChoice(HeadedModel):
    """Multiple choice: scores (B, C) of C sequences (B, C, L).

    forward(..., labels=None): labels (B,), the right choice. All tensors have the dimension C, except mems and mask,
    which have a batch of B * C.

    >>> config = XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64)
    >>> XLNetForMultipleChoice(config)(torch.randint(100, (2, 4, 7)), labels=torch.tensor([3, 0])).logits.shape
    torch.Size([2, 4])
    """

    def make_head(self, config: XLNetConfig) -> None:
        self.sequence_summary = SequenceSummary(config)
        self.logits_proj = nn.Linear(config.d_model, 1)

    @model_call(XLNetModel.forward)
    def forward(self, input_ids: Tensor | None = None, *, labels: Tensor | None = None, **options) -> HeadOutput:
        given = input_ids if input_ids is not None else options.get("inputs_embeds")
        if not isinstance(given, Tensor) or given.dim() < 3:
            got = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"input_ids must be (B, C, L), or inputs_embeds (B, C, L, d_model), got {got}")
        batch, choices = given.shape[:2]
        for name, x in options.items():
            if isinstance(x, Tensor):
                if tuple(x.shape[:2]) != (batch, choices):
                    raise ValueError(f"{name} must start with (B, C) = {(batch, choices)}, got shape {tuple(x.shape)}")
                options[name] = x.flatten(0, 1)
        options.setdefault("output_rows", _summary_rows(self.config, given))
        output = self.transformer(None if input_ids is None else input_ids.flatten(0, 1), **options)
        logits = self.logits_proj(self.sequence_summary(output.last_hidden_state)).view(batch, choices)
        return HeadOutput(loss=_token_loss(logits, labels), logits=logits, **rest_of(output))


class XLNetForQuestionAnsweringSimple(HeadedModel):
    """Question answering with independent scores of the answer's start and end.

    forward(..., start_positions=None, end_positions=None): (B,) integers; positions past the sequence are ignored.

    >>> config = XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64)
    >>> output = XLNetForQuestionAnsweringSimple(config)(torch.randint(100, (2, 7)))
    >>> output.start_logits.shape, output.end_logits.shape
    (torch.Size([2, 7]), torch.Size([2, 7]))
    """

    def make_head(self, config: XLNetConfig) -> None:
        self.qa_outputs = nn.Linear(config.d_model, 2)

    @model_call(XLNetModel.forward)
    def forward(
        self, *inputs, start_positions: Tensor | None = None, end_positions: Tensor | None = None, **options
    ) -> SpanOutput:
        output = self.transformer(*inputs, **options)
        start, end = (x.squeeze(-1) for x in self.qa_outputs(output.last_hidden_state).split(1, -1))
        losses = []
        for name, logits, x in (("start_positions", start, start_positions), ("end_positions", end, end_positions)):
            if x is not None:
                length = logits.shape[1]
                x = x.reshape(-1)
                check_range(name, x, 0, torch.iinfo(torch.int64).max)
                losses.append(_mean_loss(logits, x.long().clamp(max=length), length))
        loss = (losses[0] + losses[1]) / 2 if len(losses) == 2 else None
        return SpanOutput(loss=loss, start_logits=start, end_logits=end, **rest_of(output))


def _token_loss(logits: Tensor, labels: Tensor | None) -> Tensor | None:
    """Mean cross-entropy over the valid labels; 0, with gradients of 0, if there are none."""
    if labels is None:
        return None
    check_labels("labels", labels, logits)
    return _mean_loss(logits.flatten(0, -2), labels.flatten().long(), -100)


def _mean_loss(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Mean cross-entropy, without torch's NaN where all labels are ignored."""
    losses = F.cross_entropy(logits, labels, ignore_index=ignored, reduction="none")
    counted = (labels != ignored).sum().clamp(min=1)
    return (losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32)) / counted).to(losses.dtype)
