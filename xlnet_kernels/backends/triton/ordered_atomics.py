"""Additions to the gradient of rel_key in a fixed order, without a copy for each program.

A chain is the tiles of rows that share a copy of it. Each adds its blocks from the first row of rel_key on, as it walks
over keys, and only once the tile before it in the chain is done with a block. So a chain has as many tiles at work as
one visits blocks, and there are copies only where all of these would leave processors idle (launch_cache.py's
`chains`). A program waits for programs of lower numbers alone, which are started first: NVIDIA's GPUs do so, CUDA does
not promise it.

Each tile has a number in memory, its *mark*: up to which row of rel_key it and all before it are done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import ROOM

END = tl.constexpr(2**31 - 1)  # beyond any row


class Chains(NamedTuple):
    """How tiles take turns: see launch_cache.py's `chains`."""

    groups: Any  # of heads and batches that share rows of rel_key
    run: Any  # tiles of a group that follow one another in one copy
    copies: Any  # the next run is in the next of them


class RelSums(NamedTuple):
    """A program's gradient of rel_key."""

    data: Any  # float32, of row 0
    mark: Any  # its own
    before: Any  # the mark of the tile before in the chain
    is_first: Any  # there is none


@triton.jit
def rel_sums(grad_rel, chains, index, number, tiles, rel_len, META):
    """The sums of tile `number` of the `tiles` of b * heads + h = `index`; the marks lie behind the copies."""
    room = ROOM * tl.maximum(META.BLOCK_M, META.BLOCK_N)
    rows = (rel_len + 2 * room).to(tl.int64)
    group = index % chains.groups
    item = index // chains.groups * tiles + number
    copy = item // chains.run % chains.copies
    data = grad_rel + ((copy * chains.groups + group) * rows + room) * META.HEAD_DIM
    marks = grad_rel + chains.copies * chains.groups * rows * META.HEAD_DIM
    marks = marks.to(tl.pointer_type(tl.int32), bitcast=True)
    mark = marks + index * tiles + number
    # the tile before in the same run, or the last of the copy's run before
    before = item - 1 - tl.where(item % chains.run == 0, (chains.copies - 1) * chains.run, 0)
    before_at = (before // tiles * chains.groups + group) * tiles + before % tiles
    return RelSums(data, mark, marks + before_at, before < 0)


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
        tl.atomic_xchg(sums.mark, end, sem="release")
