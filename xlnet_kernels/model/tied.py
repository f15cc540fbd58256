"""Tied table of embedding and logits, with its gradient in one piece.

With plain autograd, the embedding's gradient is a table of zeros with some rows filled in, which is then added to the
logits' gradient. These are three tables of vocabulary times width, where one is enough. On a CPU they take a tenth of a
small model's training step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._checks import readable
from .._torch import has_hooks, is_batch_of_gradients, transformed
from ..linear import Linear
from .encoder import XLNetModel
from .inputs import check_words


def words_and_table(encoder: XLNetModel, head: nn.Linear, ids: Tensor) -> tuple[Tensor, Tensor] | None:
    """encoder.word_embedding(ids), and a weight for `head` in place of its own; None where both modules must be called.

    Supported are plain modules with one weight on the CPU, when gradients are needed. Not supported are modules with
    hooks, wrapped, parametrized or separately sharded modules, compiled graphs, traces and transforms.
    """
    embedding = encoder.word_embedding
    if type(embedding) is not nn.Embedding or type(head) is not Linear:
        return None
    weight = head.weight
    if (
        embedding.weight is not weight
        or not (torch.is_grad_enabled() and weight.requires_grad)
        or weight.device.type != "cpu"
        or not readable(weight)
        or transformed()
        or torch.jit.is_tracing()
        or embedding.padding_idx is not None
        or embedding.max_norm is not None
        or embedding.scale_grad_by_freq
        or embedding.sparse
        or any(has_hooks(module) for module in (encoder, embedding, head))
    ):
        return None
    check_words(ids, None, encoder.config, weight)
    return _WordsAndTable.apply(weight, ids.long())


class _WordsAndTable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.shape = table.shape
        ctx.set_materialize_grads(False)
        return F.embedding(ids, table), table.detach()

    @staticmethod
    def backward(ctx, words: Tensor | None, table: Tensor | None) -> tuple[Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        if words is None:
            return table, None
        index, words = ids.reshape(-1), words.reshape(-1, words.shape[-1])
        if table is None:
            return words.new_zeros(ctx.shape).index_add(0, index, words), None
        # In place, because nothing else refers to the gradient of the logits' weight, unless it is differentiated
        # itself.
        if torch.is_grad_enabled() or is_batch_of_gradients(table) or is_batch_of_gradients(words):
            return table.index_add(0, index, words), None
        return table.index_add_(0, index, words), None
