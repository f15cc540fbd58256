"""XLNetForQuestionAnswering: beam search for an answer's start and end, and a score of unanswerability."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._checks import check_range
from ..ddp_unused import with_unused
from .calls import model_call
from .config import XLNetConfig
from .encoder import XLNetModel
from .heads import HeadedModel
from .inputs import check_tensor
from .outputs import BeamOutput, rest_of


class StartLogits(nn.Module):
    """Score of each position as the start."""

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dense(hidden).squeeze(-1)


class EndLogits(nn.Module):
    """Score of each position as the end, given the state at the start."""

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__()
        self.dense_0 = nn.Linear(2 * config.d_model, config.d_model)
        self.LayerNorm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dense_1 = nn.Linear(config.d_model, 1)

    def forward(self, hidden: Tensor, start: Tensor) -> Tensor:
        """Scores (B, S, L) from hidden (B, L, d_model) and start (B, S, d_model)."""
        both = torch.cat(torch.broadcast_tensors(hidden[:, None], start[:, :, None]), -1)
        return self.dense_1(self.LayerNorm(self.dense_0(both).tanh())).squeeze(-1)


class AnswerClass(nn.Module):
    """Score of unanswerability, from the states at the start and at CLS."""

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__()
        self.dense_0 = nn.Linear(2 * config.d_model, config.d_model)
        self.dense_1 = nn.Linear(config.d_model, 1, bias=False)

    def forward(self, start: Tensor, cls: Tensor) -> Tensor:
        return self.dense_1(self.dense_0(torch.cat([start, cls], -1)).tanh()).squeeze(-1)


class XLNetForQuestionAnswering(HeadedModel):
    """Question answering: start, end given start, and answerability (Yang et al. 2019, as trained for SQuAD 2.0).

    forward(..., start_positions=None, end_positions=None, is_impossible=None, cls_index=None, p_mask=None):
    start_positions, end_positions (B,) integers in [0, L): with both, only `loss` is returned, otherwise the beam.
    is_impossible (B,), 1 or True where there is no answer: part of the loss, together with cls_index. cls_index (B,),
    position of CLS, default the last. p_mask (B, L), 1 or True where an answer is impossible.

    >>> from xlnet_kernels import XLNetConfig
    >>> config = XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64, start_n_top=3, end_n_top=2)
    >>> output = XLNetForQuestionAnswering(config).eval()(torch.randint(100, (2, 7)))
    >>> output.start_top_index.shape, output.end_top_index.shape
    (torch.Size([2, 3]), torch.Size([2, 6]))
    """

    def make_head(self, config: XLNetConfig) -> None:
        self.start_logits = StartLogits(config)
        self.end_logits = EndLogits(config)
        self.answer_class = AnswerClass(config)

    @model_call(XLNetModel.forward)
    def forward(
        self,
        *inputs,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        is_impossible: Tensor | None = None,
        cls_index: Tensor | None = None,
        p_mask: Tensor | None = None,
        **options,
    ) -> BeamOutput:
        output = self.transformer(*inputs, **options)
        hidden = output.last_hidden_state
        batch, length = hidden.shape[:2]
        indices = dict(start_positions=start_positions, end_positions=end_positions, cls_index=cls_index)
        for name, x in indices.items():
            if x is not None:
                indices[name] = x = x.reshape(-1)
                check_tensor(name, x, (batch,), hidden, integers=True)
                check_range(name, x, 0, length)
        start_positions, end_positions, cls_index = indices.values()
        impossible_at = torch.zeros(batch, length, dtype=torch.bool, device=hidden.device)
        if p_mask is not None:
            check_tensor("p_mask", p_mask, (batch, length), hidden)
            impossible_at = p_mask > 0
        lowest = torch.finfo(hidden.dtype).min

        cls = hidden[:, -1] if cls_index is None else _states(hidden, cls_index[:, None])[:, 0]
        start_logits = self.start_logits(hidden).masked_fill(impossible_at, lowest)
        if start_positions is not None and end_positions is not None:
            start = _states(hidden, start_positions[:, None])
            end_logits = self.end_logits(hidden, start)[:, 0].masked_fill(impossible_at, lowest)
            spans = ((start_logits, start_positions), (end_logits, end_positions))
            of_start, of_end = (F.cross_entropy(logits, x.long()) for logits, x in spans)
            loss = (of_start + of_end) / 2
            if is_impossible is not None and cls_index is not None:
                check_tensor("is_impossible", is_impossible.reshape(-1), (batch,), hidden)
                scores = self.answer_class(start[:, 0], cls)
                loss = loss + F.binary_cross_entropy_with_logits(scores, is_impossible.reshape(-1).to(scores.dtype)) / 2
            else:
                loss = with_unused(loss, *self.answer_class.parameters())
            return BeamOutput(loss=loss, **rest_of(output))

        start_log_probs = start_logits.log_softmax(-1)
        start_top, start_index = start_log_probs.topk(min(self.config.start_n_top, length), -1)
        end_logits = self.end_logits(hidden, _states(hidden, start_index)).masked_fill(impossible_at[:, None], lowest)
        end_top, end_index = end_logits.log_softmax(-1).topk(min(self.config.end_n_top, length), -1)
        start = (start_log_probs.exp()[:, None] @ hidden)[:, 0]
        return BeamOutput(
            start_top_log_probs=start_top,
            start_top_index=start_index,
            end_top_log_probs=end_top.mT.flatten(1),
            end_top_index=end_index.mT.flatten(1),
            cls_logits=self.answer_class(start, cls),
            **rest_of(output),
        )


def _states(hidden: Tensor, index: Tensor) -> Tensor:
    """The states (B, S, d_model) at index (B, S)."""
    return hidden.gather(1, index.long()[:, :, None].expand(-1, -1, hidden.shape[2]))
