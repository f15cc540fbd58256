"""Counter-based attention dropout: the same mask from every backend and for all tile sizes.

The state is two int64: a seed, and an offset whose upper half selects the call's heads of a larger problem. With
``first = offset >> 32 & 0xFFFFF`` and ``others = offset >> 52 & 0xFFF``, both 0 in a call of all heads, element
(b, h, i, j) has head ``b * (H + others) + h + first`` and takes a byte of Philox-4x32-10 (Salmon et al. 2011) with key
``(seed_low, seed_high)`` and counter ``(j // 64 * 4 + j % 8 // 2, i, head, offset_low)``: of word ``j % 64 // 16`` byte
``j % 16 // 8 * 2 + j % 2``. A lane of a tensor-core fragment holds these sixteen of 64 columns, so it makes one call
for them. The element is kept iff the byte is at least ``t``, ``256 p`` rounded down or up so that p is exact on
average: ``t = (floor(p 2**32) + phase // 2**8) // 2**24``, where ``phase`` is ``seed_low + head * 0xC2B2AE35 + i *
0x85EBCA6B + j // 64 * 0x9E3779B9`` modulo 2**32, one for 64 columns of a row. Dropout of these is correlated by
``f (1 - f) / (2**16 p (1 - p))``, f being the fraction of ``256 p``: 4e-5 at p 0.1, 0.003 at p 0.001. `drop_out`
numbers the elements of a tensor likewise: element n is (0, 0, n // 2**36, n % 2**36).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from . import _extension
from ._ops import add_op_namespace_prefix, ops
from ._torch import is_batch_of_gradients
from .distributed.tensors import is_distributed, replicated

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_STEPS = (
    0x9E3779B9,
    0x85EBCA6B,
    0xC2B2AE35,
)  # steps of the phase: per 64 columns, per row, per head
_LOW = 0xFFFFFFFF
_shard = 0  # upper half of the offset


def new_state(device: torch.device) -> Tensor:
    """(seed, offset) as an int64 tensor of 2, drawn from torch's generator of `device`."""
    seed, offset = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
    return torch.stack((seed, offset & _LOW | _shard))


@contextmanager
def of_shard(first: int, others: int) -> Iterator[None]:
    """Make the calls within use the dropout mask of their heads in a larger problem.

    Args:
        first: the number of the call's first head, b * H + h in the problem.
        others: the number of heads of the problem that the call lacks.

    Raises:
        ValueError: a number does not fit into the state.
    """
    global _shard
    if first >= 2**20 or others >= 2**11:
        raise ValueError(f"dropout has room for 2^20 heads of all sequences and 2^11 heads, not {first} and {others}")
    before, _shard = _shard, first << 32 | others << 52
    try:
        yield
    finally:
        _shard = before


_SMALLEST = 2**13  # elements; in smaller tensors the overhead of a call exceeds the time of its random numbers

_NAME = add_op_namespace_prefix("drop_out")
torch.library.define(_NAME, "(Tensor input, Tensor state, float p) -> Tensor")


@torch.library.register_fake(_NAME)
def _fake(input: Tensor, state: Tensor, p: float) -> Tensor:
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)


class Dropout(nn.Dropout):
    """torch.nn.Dropout, faster on CPUs and without its mask in memory, because backward draws it again.

    For float32 and bfloat16; results are contiguous. Other dtypes, traces and compiled graphs use torch's own dropout
    (torch.jit.script accepts torch.nn.Dropout only). The seed is drawn from torch's generator, so torch.manual_seed
    repeats a mask, but masks differ from torch's. Modes and torch.func transforms do not change them.
    """

    def forward(self, input: Tensor) -> Tensor:
        if is_distributed(input) and self.training and self.p > 0:
            return self._of_shards(input)
        if self.training and 0 < self.p < 1 and not self.inplace and _serves(input):
            return _DropOut.apply(input, torch.randint(0, 2**63 - 1, (2,), device=input.device), self.p)
        return super().forward(input)

    def _of_shards(self, x: DTensor) -> Tensor:
        """Drop the elements of a DTensor that a single process would drop; torch supports this on GPUs only."""
        kept = self(torch.ones(x.shape, dtype=x.dtype, device=x.device))
        return x * replicated(kept, x).redistribute(placements=x.placements)


def in_force(dropout: nn.Module) -> float:
    """The current probability of a dropout module: 0 in evaluation, and for other modules such as nn.Identity.

    The module's own mode counts, as in its call, because dropout alone may be on in evaluation or off in training.
    """
    return getattr(dropout, "p", 0.0) if dropout.training else 0.0


class _DropOut(torch.autograd.Function):
    @staticmethod
    def forward(input: Tensor, state: Tensor, p: float) -> Tensor:
        return ops.drop_out(input, state, p)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        _, state, ctx.p = inputs
        ctx.save_for_backward(state)
        ctx.save_for_forward(state)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (state,) = ctx.saved_tensors
        if is_batch_of_gradients(grad):
            ones = torch.ones(grad.shape, dtype=grad.dtype, device=state.device)
            return grad * ops.drop_out(ones, state, ctx.p), None, None
        return _DropOut.apply(grad, state, ctx.p), None, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, *_others):
        (state,) = ctx.saved_tensors
        return _DropOut.apply(tangent, state, ctx.p)

    @staticmethod
    def vmap(info, in_dims, input: Tensor, state: Tensor, p: float) -> tuple[Tensor, int]:
        """Drop out sample by sample, because each numbers its elements from 0."""
        samples, states = (
            [x] * info.batch_size if dim is None else x.unbind(dim)
            for x, dim in zip((input, state), in_dims[:2], strict=True)
        )
        return torch.stack([_DropOut.apply(*pair, p) for pair in zip(samples, states, strict=True)]), 0


def _serves(input: Tensor) -> bool:
    """Whether the kernel serves the input: decided by the input alone, to avoid another mask in a recomputation."""
    if _extension.module is None or torch.jit.is_tracing() or torch.compiler.is_compiling():
        return False
    if type(input) not in (Tensor, nn.Parameter) or input.device.type != "cpu" or input.layout != torch.strided:
        return False
    return input.dtype in (torch.float32, torch.bfloat16) and input.numel() >= _SMALLEST


def threshold(dropout_p: float) -> int:
    """The kernels' integer form of p, in units of 2**-32."""
    return min(int(dropout_p * 2**32), _LOW)


def keep_mask(state: Tensor, batch: int, heads: int, length: int, keys: int, dropout_p: float) -> Tensor:
    """The (B, H, L, M + K) bool mask of kept probabilities for a (seed, offset) `state`."""
    return keep_block(state, heads, slice(0, batch), slice(0, heads), slice(0, length), slice(0, keys), dropout_p)


def keep_block(
    state: Tensor, heads: int, batch: slice, some_heads: slice, rows: slice, keys: slice, dropout_p: float
) -> Tensor:
    """A block of `keep_mask`, by slices of its four dimensions; the call has `heads` heads."""
    device = state.device
    first, end = keys.start // 64, -(-keys.stop // 64)  # groups of 64 columns
    group = torch.arange(first, end, device=device)
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    seed, offset = state[0], state[1]
    first_head, others = offset >> 32 & 0xFFFFF, offset >> 52 & 0xFFF
    sequence, head = (torch.arange(part.start, part.stop, device=device) for part in (batch, some_heads))
    head = (sequence[:, None] * (heads + others) + head + first_head).view(-1, 1, 1)
    key = [seed & _LOW, _high(seed)]
    shape = (head.shape[0], row.shape[0], 4 * (end - first))
    call = torch.arange(4 * first, 4 * end, device=device)
    words = philox([call.expand(shape), row.expand(shape), head.expand(shape), (offset & _LOW).expand(shape)], key)
    drawn = torch.stack([word >> 8 * byte & 0xFF for word in words for byte in range(4)], -1)
    # (..., groups, calls, words, halves, parities) -> a group's 64 columns
    drawn = drawn.view(*shape[:2], end - first, 4, 4, 2, 2).permute(0, 1, 2, 4, 5, 3, 6).flatten(-4)
    phase = key[0] + group * _STEPS[0] + row * _STEPS[1] + head * _STEPS[2] & _LOW
    least = (threshold(dropout_p) + (phase >> 8)) >> 24
    kept = (drawn >= least[..., None]).flatten(-2)[..., keys.start - 64 * first : keys.stop - 64 * first]
    return kept.unflatten(0, (len(sequence), some_heads.stop - some_heads.start))


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Philox-4x32-10 on int64 tensors that hold unsigned 32-bit words."""
    for _ in range(10):
        low, high = _multiply(counter[0], _MULTIPLIERS[0])
        low2, high2 = _multiply(counter[2], _MULTIPLIERS[1])
        counter = [high2 ^ counter[1] ^ key[0], low2, high ^ counter[3] ^ key[1], low]
        key = [(key[0] + _WEYL[0]) & _LOW, (key[1] + _WEYL[1]) & _LOW]
    return counter


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    product = word * multiplier  # wraps to the right 64 bits
    return product & _LOW, _high(product)


def _high(value: Tensor) -> Tensor:
    return (value >> 32) & _LOW
