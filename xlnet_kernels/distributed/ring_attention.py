"""Sequence parallelism: one long sequence over several processes, keys and values going round in a ring.

Process r of W holds rows and keys r n .. (r + 1) n - 1 of a sequence of W n. In W steps every process meets every chunk
of keys, and `rel_attention` gives its rows' output over each chunk with the log-sum-exp, by which the chunks' outputs
are weighted and added: exactly the attention over the whole sequence (Liu et al., Ring Attention, 2023). Backward goes
round once more; gradients of keys and values travel with them and arrive at home with the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..functional import autocasts, rel_attention
from ..masks import RankMask
from ..merging import merge, part_of
from ..segments import Segments
from ..two_streams import RowPositions


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_key: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    content_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    segments: Segments | None = None,
    mask: RankMask | None = None,
    query_positions: Tensor | RowPositions | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`rel_attention` over a sequence of which each process of `group` holds a chunk; called by all of them together.

    Memory and work of a process are those of its own rows and keys, but for `rel_key`. Arguments are those of
    `rel_attention` for the own chunk:

    Args:
        query: (B, H, L, D), own rows. key, value: (B, H, n, D), own keys; n is the same in all processes.
        rel_key: (H, P, D) or (B, H, P, D) for the whole sequence of W n keys, the same in all processes: row p encodes
            distance W n - p, P = 2 W n, or P = W n + 1 where keys ahead of the query are invisible.
        group: the processes, in the order of their chunks; default all.
        segments: with key_ids (B, n) of the own keys. mask: RankMask with key_rank (B, n) of the own keys; ranks are of
            the whole sequence. query_positions: (B, L) in [0, n), within the chunk.

    Gradients of `query`, `key` and `value` are whole; those of rel_key, biases and segment embeddings are this
    process's share: their sum over the processes is the gradient, as of any parameter under data parallelism. Under
    autocast give tensors of the dtype wanted.

    Returns:
        (B, H, L, D), or that and the log-sum-exp (B, H, L).

    Raises:
        ValueError: chunks differ in length, or an argument does not fit; the text names it. An error in one process
            alone leaves the others waiting, until the group's timeout: the lengths are compared once all are there.

    >>> q = k = v = torch.randn(1, 2, 5, 8)  # one process alone has the whole sequence
    >>> ring_attention(q, k, v, torch.randn(2, 10, 8)).shape
    torch.Size([1, 2, 5, 8])
    """
    ring = Ring(group)
    if isinstance(query, Tensor) and autocasts(query.device.type) and query.dtype == torch.float32:
        raise ValueError("query is float32 under autocast: cast the tensors before ring_attention")
    if not isinstance(key, Tensor) or key.dim() != 4 or not isinstance(value, Tensor) or value.shape != key.shape:
        raise ValueError("key and value must be (B, H, n, D) each")
    if mask is not None and not isinstance(mask, RankMask):
        raise ValueError(f"mask must be a RankMask or None, got {type(mask).__name__}")
    batch, length, whole = key.shape[0], key.shape[2], ring.size * key.shape[2]
    lengths = ring.gather(torch.tensor([length], device=key.device))
    if (lengths != length).any():
        raise ValueError(f"key must have as many rows in all processes, got {lengths.tolist()}")
    if (
        not isinstance(rel_key, Tensor)
        or rel_key.dim() not in (3, 4)
        or rel_key.shape[-2] not in (2 * whole, whole + 1)
    ):
        got = tuple(rel_key.shape) if isinstance(rel_key, Tensor) else type(rel_key).__name__
        raise ValueError(
            f"rel_key must have 2 W n = {2 * whole} rows, or W n + 1 = {whole + 1} to see nothing ahead, got {got}"
        )
    query_ids = key_ids = key_rank = None
    if segments is not None:
        query_ids = segments.query_ids
        _check_keys("segments.key_ids", segments.key_ids, batch, length)
        key_ids = ring.gather(segments.key_ids)
    if mask is not None:
        _check_keys("mask.key_rank", mask.key_rank, batch, length)
        key_rank = ring.gather(mask.key_rank.expand(batch, -1))
    options = dict(query_positions=query_positions, scale=scale, deterministic=deterministic, backend=backend)
    call = Call(ring, length, query_ids, key_ids, mask, key_rank, options)
    embed, bias = (segments.embed, segments.bias) if segments is not None else (None, None)
    out, lse = RingAttention.apply(query, key, value, rel_key, content_bias, position_bias, embed, bias, call)
    return (out, lse) if return_lse else out


class Ring:
    """The processes of a group, each handing on to the next; one alone where there is no group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.rank, self.size = group, 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, own: Tensor) -> Tensor:
        """What all processes hold, side by side in the last dimension."""
        if self.size == 1:
            return own
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    def hand_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Sends to the next process, and receives from the one before: a function that waits for that."""
        if self.size == 1:
            return lambda: tensor
        group = self.group or dist.group.WORLD
        assert group is not None, "processes of a ring are joined in a group"
        after, before = (dist.get_global_rank(group, (self.rank + step) % self.size) for step in (1, -1))
        received = torch.empty_like(tensor)
        sending = dist.P2POp(dist.isend, tensor, after, group)
        works = dist.batch_isend_irecv([sending, dist.P2POp(dist.irecv, received, before, group)])

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return received

        return wait

    def chunks(self, key_value: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each chunk's number and its keys and values, the own one first; the next one comes while this one is used."""
        for step in range(self.size):
            last = step == self.size - 1
            wait = None if last else self.hand_on(key_value)
            yield (self.rank - step) % self.size, key_value
            if wait is not None:
                key_value = wait()


@dataclass(frozen=True)
class Call:
    """What one call has besides differentiable tensors; key_ids and key_rank (B, W n) are of the whole sequence."""

    ring: Ring
    length: int
    query_ids: Tensor | None
    key_ids: Tensor | None
    mask: RankMask | None
    key_rank: Tensor | None
    options: dict[str, Any]

    def partial(
        self,
        chunk: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rel_key: Tensor,
        content_bias: Tensor | None,
        position_bias: Tensor | None,
        embed: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """Output and log-sum-exp of the own rows over one chunk of keys; None where they see nothing of it."""
        ahead, size = chunk - self.ring.rank, self.length
        one_way = rel_key.shape[-2] == self.ring.size * size + 1
        if one_way and ahead > 0:
            return None
        # Within the chunk distances are smaller by n for each chunk between: rows for n .. -(n - 1) begin further on.
        begin = (self.ring.size - 1 + ahead) * size
        table = rel_key.narrow(-2, begin, size + 1 if one_way and ahead == 0 else 2 * size)
        keys = slice(chunk * size, (chunk + 1) * size)
        segments = mask = None
        if self.query_ids is not None and self.key_ids is not None and embed is not None:
            segments = Segments(self.query_ids, self.key_ids[:, keys], embed, bias)
        if self.mask is not None and self.key_rank is not None:
            sees_self = self.mask.sees_self if ahead == 0 else False  # a row's own key is in its own chunk
            rows = self.mask.expand(len(self.key_rank))
            mask = RankMask(rows.query_rank, self.key_rank[:, keys], rows.query_floor, sees_self)
            if isinstance(sees_self, Tensor):
                mask = mask.seeing_self(rows.sees_self)
        return rel_attention(
            query,
            key,
            value,
            table,
            content_bias=content_bias,
            position_bias=position_bias,
            segments=segments,
            mask=mask,
            max_distance=size,
            return_lse=True,
            **self.options,
        )


class RingAttention(torch.autograd.Function):
    """Forward keeps the own chunk, the output and its log-sum-exp; backward computes each chunk's part again."""

    @staticmethod
    def forward(ctx: Any, query, key, value, rel_key, content_bias, position_bias, embed, bias, call: Call):
        shared = (rel_key, content_bias, position_bias, embed, bias)
        out = lse = None
        for chunk, (k, v) in call.ring.chunks(torch.stack([key, value])):
            part = call.partial(chunk, query, k, v, *shared)
            if part is None:
                continue
            part_out, part_lse = part[0].to(part[1].dtype), part[1]
            if out is None or lse is None:  # the own chunk comes first, and some of it is always there
                out, lse = part_out, part_lse
                continue
            out, lse = merge((out, part_out), (lse, part_lse))
        assert out is not None and lse is not None
        ctx.call = call
        ctx.save_for_backward(query, key, value, *shared, out, lse)
        return out.to(query.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor):
        query, key, value, *shared, out, lse = ctx.saved_tensors
        call, ring, wide = ctx.call, ctx.call.ring, lse.dtype
        grad_out = grad_out.to(wide)
        needs = ctx.needs_input_grad[0], *ctx.needs_input_grad[3:-1]  # False where there is None
        given = [x for x, need in zip((query, *shared), needs, strict=True) if need]
        totals = [torch.zeros_like(x, dtype=wide) for x in given]
        travelling = torch.zeros(2, *key.shape, dtype=wide, device=key.device)
        for chunk, (k, v) in ring.chunks(torch.stack([key, value])):
            with torch.enable_grad():
                # Those of keys and values in any case: their own process may want them.
                flags = (needs[0], True, True, *needs[1:])
                tensors = zip((query, k, v, *shared), flags, strict=True)
                leaves = [None if x is None else x.detach().requires_grad_(need) for x, need in tensors]
                part = call.partial(chunk, *leaves)
            if part is not None:
                weight = part_of(part[1].detach(), lse)
                of_out = weight * grad_out
                # out = sum of weights times parts, and the weights are the softmax of the parts' log-sum-exp
                of_lse = weight[..., 0] * ((grad_out * (part[0].detach() - out)).sum(-1) + grad_lse)
                ordered = (*leaves[1:3], *leaves[:1], *leaves[3:])
                wanted = [x for x in ordered if x is not None and x.requires_grad]
                above = of_out.to(query.dtype), of_lse
                of_key, of_value, *rest = torch.autograd.grad(part, wanted, above, materialize_grads=True)
                travelling[0] += of_key
                travelling[1] += of_value
                for total, gradient in zip(totals, rest, strict=True):
                    total += gradient
            travelling = ring.hand_on(travelling)()  # with their keys; from the last step they come home
        found = iter(total.to(x.dtype) for total, x in zip(totals, given, strict=True))
        grad_query, *others = [next(found) if need else None for need in needs]
        return grad_query, *travelling.to(key.dtype), *others, None


def _check_keys(name: str, values: Tensor, batch: int, length: int) -> None:
    if values.dim() != 2 or values.shape[0] not in (1, batch) or values.shape[1] != length:
        raise ValueError(f"{name} must have shape ({batch}, n = {length}), got {tuple(values.shape)}")
