"""Ordered accumulation: tiles add to the gradient of rel_key in a fixed order, without a copy for each program.

A queue is the tiles of rows that share a copy of it. Each adds its blocks from the first row of rel_key on, as it walks
over keys, and only once the tile before it in the queue is done with a block. So a queue has as many tiles at work as
one visits blocks, and there are copies only where all of these would leave processors idle (launch_cache.py's
`queues`). A program waits for programs of lower numbers alone, which are started first: NVIDIA's GPUs do so, CUDA does
not promise it.

Each tile has a number in memory, its *progress*: up to which row of rel_key it and all before it are done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import ROOM

END = tl.constexpr(2**31 - 1)  # beyond any row


class OrderedAccumulation(NamedTuple):
    """Which tiles share a copy, and in which order: see launch_cache.py's `queues`."""

    groups: Any  # of heads and batches that share rows of rel_key
    run: Any  # tiles of a group that follow one another in one copy
    copies: Any  # the next run is in the next of them


class RelSums(NamedTuple):
    """A program's gradient of rel_key."""

    data: Any  # float32, of row 0
    progress: Any  # its own
    before: Any  # the progress of the tile before in the queue
    is_first: Any  # there is none


@triton.jit
def rel_sums(grad_rel, order, index, number, tiles, rel_len, META):
    """The sums of tile `number` of the `tiles` of b * heads + h = `index`; their progress lies behind the copies."""
    room = ROOM * tl.maximum(META.BLOCK_M, META.BLOCK_N)
    rows = (rel_len + 2 * room).to(tl.int64)
    group = index % order.groups
    item = index // order.groups * tiles + number
    copy = item // order.run % order.copies
    data = grad_rel + ((copy * order.groups + group) * rows + room) * META.HEAD_DIM
    progress = grad_rel + order.copies * order.groups * rows * META.HEAD_DIM
    progress = progress.to(tl.pointer_type(tl.int32), bitcast=True)
    own = progress + index * tiles + number
    # the tile before in the same run, or the last of the copy's run before
    before = item - 1 - tl.where(item % order.run == 0, (order.copies - 1) * order.run, 0)
    before_at = (before // tiles * order.groups + group) * tiles + before % tiles
    return RelSums(data, own, progress + before_at, before < 0)


@triton.jit
def wait(sums, end, META):
    """Until the tiles before are done with all rows below `end`."""
    if META.NEEDS_REL and META.ORDERED:
        if not sums.is_first:  # Triton 3.6 takes no chain of conditions
            while tl.atomic_add(sums.before, 0, sem="acquire") < end:
                pass


@triton.jit
def pass_on(sums, end, META):
    """All rows below `end` are done with, by the tiles before too."""
    if META.NEEDS_REL and META.ORDERED:
        tl.debug_barrier()
        tl.atomic_xchg(sums.progress, end, sem="release")
