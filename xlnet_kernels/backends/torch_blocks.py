"""Backend "torch": blocks of query rows in plain torch operators, on any device, with memory linear in length.

blocks.py makes the blocks. Their size follows from a budget in bytes, XLNET_KERNELS_BLOCK_BYTES, by default 128 MB.
Scores and sums are float32 (float64 for float64), products are those of torch.matmul in that dtype. row_max is in
natural units, unlike the compiled kernels'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from ..call import DIFFERENTIABLE, INPUT_NAMES, ROWS
from ..ops import define, rows_first
from .blocks import Block, BlockedCall, Part

__all__ = ["DEVICE", "DTYPES", "max_head_dim", "rel_attention", "unavailable"]

DEVICE = None  # any
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Gradients as long as the sequence that are sums over rows
_SUMMED = {"key", "value", "memory_key", "memory_value", "rel_key"}

rel_attention = define("rel_attention_torch", has_residual=False)


def max_head_dim(dtype: torch.dtype, device: torch.device | None = None) -> None:
    """No limit."""


def unavailable(device: torch.device | None = None) -> None:
    """None: always available."""


@torch.no_grad()
def _forward(*inputs):
    call = BlockedCall(inputs[:-1])
    query = call.query
    out = rows_first(query)
    lse, row_max, row_sum = (query.new_empty(query.shape[:3], dtype=call.dtype) for _ in range(3))
    with torch.autocast(query.device.type, enabled=False):
        for block in call.blocks():
            here = block.index
            probability, largest, total = _probabilities(block)
            out[here] = block.zero_masked_rows(block.drop(probability) @ block.value).to(out.dtype)
            row_max[here], row_sum[here] = largest, total
            lse[here] = torch.where(
                (total == 0) | (largest == -torch.inf), -torch.inf, total.log() + largest + block.same
            )
    return out, lse, row_max, row_sum, query.new_empty(0)


@torch.no_grad()
def _backward(grad_out, grad_lse, out, out_residual, row_max, row_sum, needs, *inputs):
    call = BlockedCall(inputs)
    sums = _Sums(call, needs)
    with torch.autocast(out.device.type, enabled=False):
        for block in call.blocks(backward=True):
            here = block.index
            block.leave_out_rows(row_sum[here] == 0)
            # Not by forward's row_max, because products in blocks of another size round very large scores differently.
            probability, _, total = _probabilities(block)
            grad = grad_out[here].to(call.dtype)
            grad_of_lse = torch.zeros_like(total) if grad_lse is None else grad_lse[here].to(call.dtype)
            grad_of_lse = torch.where(total == 0, 0, grad_of_lse)
            # A block has every key of its rows: delta is exact without the output that forward rounded. The second
            # step removes the rounding error of the first one's sum, because it has the same sign in a whole row.
            grad_score = torch.matmul(grad, block.value.mT, out=call.scratch("grad", *probability.shape))
            grad_score = block.drop(grad_score).mul_(probability)
            for _ in range(2):
                delta = grad_score.sum(-1) - grad_of_lse
                grad_score.addcmul_(probability, delta[..., None], value=-1)
            # To keep a NaN in one row from the gradients of keys that it does not see
            if block.hidden is not None and not (block.part.is_bounded and call.is_bounded(grad, grad_of_lse)):
                probability.masked_fill_(block.hidden, 0)
                grad_score.masked_fill_(block.hidden, 0)
            sums.add(block, block.drop(probability), grad, grad_score, grad_of_lse)
    return sums.gradients()


def _probabilities(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of the block's pairs, the largest score of each row, and the sum of exp(score - largest).

    All are 0 in fully masked rows. torch.softmax is used because torch.exp is slow for minus infinity.
    """
    score = block.scores()
    if not block.keys:
        return score, score.new_zeros(score.shape[:-1]), score.new_zeros(score.shape[:-1])
    largest = score.amax(-1)
    probability = torch.softmax(score, -1, out=block.call.scratch("probability", *score.shape))
    # Because the probability of the largest score is exp(0) / total.
    total = 1 / probability.amax(-1)
    if block.masked_rows is not None:
        for values in (largest, total, probability):
            values.masked_fill_(block.masked_rows if values.dim() == 3 else block.masked_rows[..., None], 0)
    return probability, largest, total


class _Sums:
    """Gradients of the inputs that need them, summed block by block in the dtype of the scores.

    Where that dtype is wider than the inputs', only the current heads have sums over rows. Those of all heads would
    take twice the memory of the gradients.
    """

    def __init__(self, call: BlockedCall, needs: list[bool]) -> None:
        self.call = call
        self.part: Part | None = None
        self.names = INPUT_NAMES[:DIFFERENTIABLE]
        self.found: dict[str, Tensor] = {}  # whole gradients
        self.sums: dict[str, Tensor] = {}  # the sums of `part`
        for name, need in zip(self.names, needs, strict=True):
            tensor = call.tensors[name]
            if need and tensor is not None:
                whole = rows_first(tensor) if name in ROWS else tensor.new_empty(tensor.shape)
                # Small gradients are summed as a whole, and each block writes its own rows of the query's gradient.
                self.found[name] = (whole if name in _SUMMED or name == "query" else whole.to(call.dtype)).zero_()

    def add(self, block: Block, dropped: Tensor, grad: Tensor, grad_score: Tensor, grad_lse: Tensor) -> None:
        """Add a block's gradients; `dropped`: its probabilities after dropout."""
        self._go_to(block.part)
        if not block.keys:
            return
        heads, found, scale = block.part.heads, self.found, self.call.scale
        self._add_to_keys(block, "value", dropped, grad)
        self._add_to_keys(block, "key", grad_score, block.content)
        grad_content = block.zero_masked_rows((grad_score @ block.key).mul_(scale))
        band = block.to_band(grad_score)
        if block.rel_key.dim() == 4:
            positional, grad_positional = block.positional, band @ block.rel_key
        else:
            band, positional = (x.transpose(0, 1).flatten(1, 2) for x in (band, block.positional))
            grad_positional = (band @ block.rel_key).unflatten(1, (-1, block.length)).transpose(0, 1)
        if "rel_key" in found:
            self.sums["rel_key"][..., block.table, :] += band.mT @ positional
        grad_positional = block.zero_masked_rows(grad_positional * scale)
        grad_query = grad_content + grad_positional
        parts = {"content_bias": grad_content, "position_bias": grad_positional}
        if block.part.embed is not None:
            same, different = block.part.embed[:, :, None]
            of_different = (grad_score * block.different).sum(-1)[..., None]
            # Because a row of dS sums to the gradient of lse.
            of_same = grad_lse[..., None] - of_different
            for index, weight in enumerate((of_same, of_different)):
                if "segment_embed" in found:
                    found["segment_embed"][index, heads] += (weight * block.segmental).sum((0, 2))
            parts["segment_bias"] = (of_same * same + of_different * different).mul_(scale)
            grad_query += parts["segment_bias"]
        for name, value in parts.items():
            if name in found:
                found[name][heads] += value.sum((0, 2))
        if "query" in found:
            found["query"][block.index] = grad_query.to(found["query"].dtype)

    def _add_to_keys(self, block: Block, name: str, pairs: Tensor, rows: Tensor) -> None:
        """Add each key's sum over the rows to the gradients of memory (first keys) and segment."""
        memory, current = self.sums.get(f"memory_{name}"), self.sums.get(name)
        if memory is None and current is None:
            return
        grad, mem_len, span = pairs.mT @ rows, self.call.mem_len, block.span
        of_memory = max(0, min(mem_len, span.stop) - span.start)
        if of_memory and memory is not None:
            memory[:, :, span.start : span.start + of_memory] += grad[:, :, :of_memory]
        if current is not None:
            first = max(span.start, mem_len) - mem_len
            current[:, :, first : max(first, span.stop - mem_len)] += grad[:, :, of_memory:]

    def _go_to(self, part: Part | None) -> None:
        """Begin the sums of a part, and round those of the last part into the gradients."""
        last = self.part
        if part is last:
            return
        for name in _SUMMED & self.found.keys():
            # Sums of a table shared by sequences continue through all parts of its heads.
            if last and part and part.heads == last.heads and not self._has_sequences(name):
                continue
            if last is not None and self.sums[name].dtype != self.found[name].dtype:
                self._gradient(name, last).copy_(self.sums.pop(name))
            if part is not None:
                gradient = self._gradient(name, part)
                is_cast = gradient.dtype != self.call.dtype
                self.sums[name] = gradient.new_zeros(gradient.shape, dtype=self.call.dtype) if is_cast else gradient
        self.part = part

    def _has_sequences(self, name: str) -> bool:
        return self.found[name].dim() == 4

    def _gradient(self, name: str, part: Part) -> Tensor:
        """View of a part's share of the gradient."""
        return self.found[name][part.batch, part.heads] if self._has_sequences(name) else self.found[name][part.heads]

    def gradients(self) -> list[Tensor]:
        """The operator's results: gradients in the inputs' dtypes, empty where not needed."""
        self._go_to(None)
        empty = self.call.query.new_empty(0)
        found = [self.found.get(name) for name in self.names]
        return [empty.clone() if grad is None else grad.to(self.call.query.dtype) for grad in found]


# "default" serves every device.
torch.library.impl(add_op_namespace_prefix("rel_attention_torch"), "default", _forward)
torch.library.impl(add_op_namespace_prefix("rel_attention_torch_backward"), "default", _backward)
