"""Ordered accumulation of rel_key's gradient: tiles add in a fixed order, without a copy for each program.

A queue is the tiles of rows that share a copy of it. In its loop over keys, each tile adds its blocks from the first
row of rel_key on. It adds a block only after the previous tile of the queue has finished that block. So a queue keeps
as many tiles busy as a tile visits blocks. More copies are made only where processors would be idle (launch_cache.py's
`queues`). A program takes a ticket when it begins, and its tile by the ticket, because CUDA does not promise to start
programs in any order. So it waits only for programs that have begun.

Each tile has a number in memory, its *progress*: the row of rel_key up to which it and all earlier tiles are done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import ROOM

END = tl.constexpr(2**31 - 1)  # beyond any row


class OrderedAccumulation(NamedTuple):
    """Order of the tiles that share a copy: see launch_cache.py's `queues`."""

    groups: Any  # of heads and batches that share rows of rel_key
    run: Any  # consecutive tiles of a group in one copy
    copies: Any  # successive runs are in successive copies


class RelSums(NamedTuple):
    """Gradient of rel_key of one program."""

    data: Any  # float32, of row 0
    progress: Any  # its own
    before: Any  # the progress of the previous tile in the queue
    is_first: Any  # there is no previous tile


@triton.jit
def _rows_of_copy(rel_len, META):
    return (rel_len + 2 * ROOM * tl.maximum(META.BLOCK_M, META.BLOCK_N)).to(tl.int64)


@triton.jit
def _counters(grad_rel, order, rel_len, META):
    """int32 after the copies: the number of programs that have begun, and each tile's progress."""
    counters = grad_rel + order.copies * order.groups * _rows_of_copy(rel_len, META) * META.HEAD_DIM
    return counters.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def take_ticket(grad_rel, order, rel_len, META):
    """Ticket of this program, from 0: how many programs have begun before it."""
    return tl.atomic_add(_counters(grad_rel, order, rel_len, META), 1, sem="relaxed")


@triton.jit
def rel_sums(grad_rel, order, index, number, tiles, rel_len, META):
    """RelSums of tile `number` of the `tiles` of b * heads + h = `index`."""
    room = ROOM * tl.maximum(META.BLOCK_M, META.BLOCK_N)
    rows = _rows_of_copy(rel_len, META)
    group = index % order.groups
    item = index // order.groups * tiles + number
    copy = item // order.run % order.copies
    data = grad_rel + ((copy * order.groups + group) * rows + room) * META.HEAD_DIM
    progress = _counters(grad_rel, order, rel_len, META) + 1
    own = progress + index * tiles + number
    # the previous tile in the same run, or the last of the copy's previous run
    before = item - 1 - tl.where(item % order.run == 0, (order.copies - 1) * order.run, 0)
    before_at = (before // tiles * order.groups + group) * tiles + before % tiles
    return RelSums(data, own, progress + before_at, before < 0)


@triton.jit
def wait(sums, end, META):
    """Wait until the previous tiles are done with all rows below `end`."""
    if META.NEEDS_REL and META.ORDERED:
        # Nested, because Triton 3.6 has no chains of conditions.
        if not sums.is_first:
            while tl.atomic_add(sums.before, 0, sem="acquire") < end:
                pass


@triton.jit
def pass_on(sums, end, META):
    """Signal that this tile and all previous tiles are done with all rows below `end`."""
    if META.NEEDS_REL and META.ORDERED:
        tl.debug_barrier()
        tl.atomic_xchg(sums.progress, end, sem="release")
