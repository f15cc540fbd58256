"""Sequence parallelism: one long sequence over several processes, with keys and values passed around a ring.

Process r of W holds rows and keys r n .. (r + 1) n - 1 of a sequence of W n. In W steps every process receives every
chunk of keys. `rel_attention` gives the output of its rows over each chunk with the log-sum-exp. The outputs are
weighted by these and added: exactly the attention over the whole sequence (Liu et al., Ring Attention, 2023). Backward
passes the chunks around once more, together with the gradients of keys and values, which return to their process with
the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._torch import autocasts
from ..call import DIFFERENTIABLE, INPUT_NAMES, TENSORS, Argument, Call, collect, replace
from ..call_checks import fits
from ..functional import attend
from ..masks import RankMask
from ..merging import merge
from ..segments import Segments
from ..two_streams import RowPositions

_OF_KEYS = tuple(name for name, argument in TENSORS.items() if argument.axes.endswith("T"))  # vectors over keys


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
    """`rel_attention` over a sequence split into chunks among the processes of `group`, called by all of them together.

    Memory and work of a process are those of its own rows and keys, except for `rel_key`. Arguments are those of
    `rel_attention` for the process's own chunk:

    Args:
        query: (B, H, L, D), own rows. key, value: (B, H, n, D), own keys; n is the same in all processes.
        rel_key: (H, P, D) or (B, H, P, D) for the whole sequence of W n keys, the same in all processes: row p encodes
            distance W n - p, P = 2 W n, or P = W n + 1 where keys ahead of the query are invisible.
        group: the processes, in the order of their chunks; default all.
        segments: with key_ids (B, n) of the own keys. mask: RankMask with key_rank (B, n) of the own keys; ranks are of
            the whole sequence. query_positions: (B, L) in [0, n), within the chunk.

    Gradients of `query`, `key` and `value` are whole; those of rel_key, biases and segment embeddings are this
    process's share. Their sum over the processes is the gradient, as for any parameter under data parallelism. Under
    autocast give tensors of the wanted dtype.

    Returns:
        (B, H, L, D), or that and the log-sum-exp (B, H, L).

    Raises:
        ValueError: chunks differ in length, or an argument is invalid; the text names it. After an error in a single
            process the others wait until the group's timeout, because lengths are compared by all processes together.

    >>> q = k = v = torch.randn(1, 2, 5, 8)  # a single process has the whole sequence
    >>> ring_attention(q, k, v, torch.randn(2, 10, 8)).shape
    torch.Size([1, 2, 5, 8])
    """
    call = collect(
        query, key, value, rel_key, segments=segments, mask=mask, query_positions=query_positions,
        content_bias=content_bias, position_bias=position_bias, scale=scale, deterministic=deterministic,
    )  # fmt: skip
    ring = Ring(group)
    out, lse = RingAttention.apply(_gathered(call, ring), ring, backend, *call[:DIFFERENTIABLE])
    return (out, lse) if return_lse else out


def _gathered(call: Call, ring: Ring) -> Call:
    """The checked call, with the vectors over keys gathered for the whole sequence."""
    query, key, value, rel_key = call[:4]
    if isinstance(query, Tensor) and autocasts(query.device.type) and query.dtype == torch.float32:
        raise ValueError("query is float32 under autocast: cast the tensors before ring_attention")
    if not isinstance(key, Tensor) or key.dim() != 4 or not isinstance(value, Tensor) or value.shape != key.shape:
        raise ValueError("key and value must be (B, H, n, D) each")
    if call.mask is not None:
        raise ValueError(f"mask must be a RankMask or None, got {type(call.mask).__name__}")
    for name, argument in TENSORS.items():
        if getattr(call, name) is not None and not _is_served(name, argument):
            raise ValueError(f"ring_attention does not serve {argument.label}")
    length, whole = key.shape[2], ring.size * key.shape[2]
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
    gathered = {}
    for name in _OF_KEYS:
        values = getattr(call, name)
        if values is not None:
            sizes = {"B": key.shape[0], "H": key.shape[1], "T": length}
            gathered[name] = ring.gather(_checked_chunk(values, TENSORS[name], sizes))
    return replace(call, **gathered)


def _is_served(name: str, argument: Argument) -> bool:
    """Whether ring attention supports an argument: its part for a chunk of keys is known."""
    if name in ("key", "value", "rel_key"):
        return True
    return not set(argument.axes.upper()) & set("KMPT") or (name in _OF_KEYS and not argument.has_gradient)


def _checked_chunk(values: Tensor, argument: Argument, sizes: dict[str, int]) -> Tensor:
    """The own part of a vector over keys, expanded to every sequence."""
    axes = argument.axes_of(values)
    wanted = [sizes[axis.upper()] for axis in axes]
    if not fits(axes, values.shape, wanted):
        shape = ", ".join([*map(str, wanted[:-1]), f"n = {wanted[-1]}"])
        raise ValueError(f"{argument.label} must have shape ({shape}), got {tuple(values.shape)}")
    return values.expand(wanted)


class Ring:
    """Ring of the processes of a group, each sending to the next; a single process without a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.rank, self.size = group, 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, own: Tensor) -> Tensor:
        """The tensors of all processes, concatenated in the last dimension."""
        if self.size == 1:
            return own
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    def hand_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Send to the next process and receive from the previous; returns a function that waits for the result."""
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
        """Each chunk's number, keys and values, own chunk first, with the next chunk received in the meantime."""
        for step in range(self.size):
            last = step == self.size - 1
            wait = None if last else self.hand_on(key_value)
            yield (self.rank - step) % self.size, key_value
            if wait is not None:
                key_value = wait()


def _attend_chunk(call: Call, ring: Ring, chunk: int, backend: str | None) -> tuple[Tensor, Tensor] | None:
    """Output and log-sum-exp of the own rows over one chunk of keys; None where they see no key of it.

    call: key and value of the chunk, vectors over keys of the whole sequence.
    """
    ahead, size = chunk - ring.rank, call.key.shape[2]
    is_causal = call.rel_key.shape[-2] == ring.size * size + 1
    if is_causal and ahead > 0:
        return None
    # Distances within the chunk are smaller by n for each chunk between, so rows for n .. -(n - 1) begin further on.
    begin = (ring.size - 1 + ahead) * size
    changes: dict[str, Any] = {name: getattr(call, name) for name in _OF_KEYS}
    changes = {n: None if x is None else x.narrow(-1, chunk * size, size) for n, x in changes.items()}
    changes["rel_key"] = call.rel_key.narrow(-2, begin, size + 1 if is_causal and ahead == 0 else 2 * size)
    if ahead:
        changes["sees_self"] = None  # a row's own key is in its own chunk
    return attend(replace(call, max_distance=size, **changes), backend)


class RingAttention(torch.autograd.Function):
    """Autograd function of ring attention.

    Forward keeps the own chunk, the output and its log-sum-exp; backward recomputes each chunk's part.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, ring: Ring, backend: str | None, *tensors: Tensor | None):
        given = dict(zip(INPUT_NAMES, tensors, strict=False))
        out = lse = None
        for chunk, (key, value) in ring.chunks(torch.stack([call.key, call.value])):
            part = _attend_chunk(replace(call, **given | {"key": key, "value": value}), ring, chunk, backend)
            if part is None:
                continue
            part_out, part_lse = part[0].to(part[1].dtype), part[1]
            # Never None after the loop, because the own chunk always has visible keys.
            if out is None or lse is None:
                out, lse = part_out, part_lse
                continue
            out, lse = merge((out, part_out), (lse, part_lse))
        assert out is not None and lse is not None
        ctx.call, ctx.ring, ctx.backend = _without_leaves(call), ring, backend
        ctx.save_for_backward(*tensors, out, lse)
        return out.to(call.query.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor):
        *tensors, out, lse = ctx.saved_tensors
        ring, wide = ctx.ring, lse.dtype
        given = dict(zip(INPUT_NAMES, tensors, strict=False))
        key, value = given["key"], given["value"]
        grad_out = grad_out.to(wide)
        needs = dict(zip(INPUT_NAMES, ctx.needs_input_grad[3:], strict=False))  # False for None
        totals = {
            name: torch.zeros_like(given[name], dtype=wide)
            for name, need in needs.items()
            if need and name not in ("key", "value")
        }
        travelling = torch.zeros(2, *key.shape, dtype=wide, device=key.device)
        for chunk, (chunk_key, chunk_value) in ring.chunks(torch.stack([key, value])):
            leaves = {
                name: x.detach().requires_grad_(name in totals)
                for name, x in (given | {"key": chunk_key, "value": chunk_value}).items()
                if x is not None
            }
            # Always, because their own process may need these gradients.
            for name in ("key", "value"):
                leaves[name].requires_grad_()
            with torch.enable_grad():
                part = _attend_chunk(replace(ctx.call, **leaves), ring, chunk, ctx.backend)
            if part is not None:
                weight = _weight_of_part(part[1].detach(), lse)
                of_out = weight * grad_out
                # out = sum of weights times parts, and the weights are the softmax of the parts' log-sum-exp
                of_lse = weight[..., 0] * ((grad_out * (part[0].detach() - out)).sum(-1) + grad_lse)
                wanted = ["key", "value", *totals]
                above = of_out.to(part[0].dtype), of_lse
                found = torch.autograd.grad(part, [leaves[n] for n in wanted], above, materialize_grads=True)
                travelling[0] += found[0]
                travelling[1] += found[1]
                for name, gradient in zip(totals, found[2:], strict=True):
                    totals[name] += gradient
            travelling = ring.hand_on(travelling)()  # with their keys; the last step returns them
        gradients: dict[str, Tensor] = {name: total.to(given[name].dtype) for name, total in totals.items()}
        gradients["key"], gradients["value"] = travelling.to(key.dtype)
        return None, None, None, *(gradients.get(name) for name in INPUT_NAMES[:DIFFERENTIABLE])


def _without_leaves(call: Call) -> Call:
    """The call without the tensors kept by autograd."""
    return replace(call, **dict.fromkeys(INPUT_NAMES[:DIFFERENTIABLE]))


def _weight_of_part(lse: Tensor, total: Tensor) -> Tensor:
    """Weight exp(lse - total) (B, H, L, 1) of a part, without the other parts; 0 in fully masked rows."""
    return (lse - total.clamp(min=torch.finfo(total.dtype).min)).exp().unsqueeze(-1)
