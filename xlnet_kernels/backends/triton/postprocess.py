"""Postprocessing kernel: reduces partial sums to gradients of rel_key, the biases and the segment embeddings."""

from __future__ import annotations

import triton
import triton.language as tl

from .operands import columns


@triton.jit
def _sum_over_tiles(sums, width, batch, heads, h, tiles, c, META):
    """Chunk c (BLOCK_D,) of the sum over all tiles of a head, in all batches; `sums` has `width` numbers for each."""
    d = columns(c, META)
    total = tl.zeros((META.BLOCK_M, META.BLOCK_D), tl.float32)
    for first in range(0, batch * tiles, META.BLOCK_M):
        i = first + tl.arange(0, META.BLOCK_M)
        at = ((i // tiles) * heads + h).to(tl.int64) * tiles + i % tiles
        mask = (i < batch * tiles)[:, None] & (d < META.HEAD_DIM)[None, :]
        total += tl.load(sums + (at[:, None] * width + d[None, :]), mask=mask, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _store(gradient, h, values, c, META):
    """Store chunk c of a head's row of a gradient (H, D)."""
    d = columns(c, META)
    at = gradient + h * META.HEAD_DIM + d
    tl.store(at, values.to(gradient.dtype.element_ty), mask=d < META.HEAD_DIM)


@triton.jit
def _sum_parameters(result, sums, key_sums, batch, heads, part, h, row_tiles, key_tiles, META):
    """Parameters of one head: part 0 content and position bias, 1 and 2 segment embeddings, 3 segment bias."""
    D: tl.constexpr = META.HEAD_DIM
    for c in tl.static_range((D + META.BLOCK_D - 1) // META.BLOCK_D):
        total = _sum_over_tiles(sums + part * D, 4 * D, batch, heads, h, row_tiles, c, META)
        if part == 0:
            content = _sum_over_tiles(key_sums, D, batch, heads, h, key_tiles, c, META)
            if result.content_bias is not None:
                _store(result.content_bias, h, content, c, META)
            if result.position_bias is not None:
                if META.PRECISION != "tf32":  # dQ of the content and of the position term
                    total -= content
                _store(result.position_bias, h, total, c, META)
        elif part < 3:
            if result.segment_embed is not None:
                _store(result.segment_embed, (part - 1) * heads + h, total, c, META)
        elif result.segment_bias is not None:
            _store(result.segment_bias, h, total, c, META)


@triton.jit
def _sum_rel_key(result, grad_rel, scale, copies, groups, group, first, rel_len, room, META):
    """Sum over copies of rows first .. first + BLOCK_M - 1 of a group's gradient of rel_key."""
    row = first + tl.arange(0, META.BLOCK_M)
    for c in tl.static_range((META.HEAD_DIM + META.BLOCK_D - 1) // META.BLOCK_D):
        d = columns(c, META)
        mask = (row < rel_len)[:, None] & (d < META.HEAD_DIM)[None, :]
        offset = row[:, None] * META.HEAD_DIM + d[None, :]
        total = tl.zeros((META.BLOCK_M, META.BLOCK_D), tl.float32)
        for copy in range(copies):
            start = (copy * groups + group).to(tl.int64) * (rel_len + 2 * room) + room
            total += tl.load((grad_rel + start * META.HEAD_DIM) + offset, mask=mask, other=0.0)
        own = result.rel_key + group.to(tl.int64) * rel_len * META.HEAD_DIM
        tl.store(own + offset, (total * scale).to(result.rel_key.dtype.element_ty), mask=mask)


NUMBERS = ["scale", "batch", "heads", "row_tiles", "key_tiles", "rel_len", "copies", "groups", "room", "parts"]


@triton.jit(do_not_specialize=NUMBERS)
def postprocess_kernel(
    result, sums, key_sums, grad_rel,
    scale, batch, heads, row_tiles, key_tiles, rel_len, copies, groups, room, parts, META,
):  # fmt: skip
    """Reduction of the sums in RowGradients and KeyGradients.

    Programs: `parts` of each head (four with segments, else one), then the tiles of each group's gradient of rel_key.
    """
    number = tl.program_id(0)
    if number < parts * heads:
        _sum_parameters(
            result, sums, key_sums, batch, heads, number // heads, number % heads, row_tiles, key_tiles, META
        )  # fmt: skip
    elif result.rel_key is not None:
        tiles = tl.cdiv(rel_len, META.BLOCK_M)
        of_rel = number - parts * heads
        first = of_rel % tiles * META.BLOCK_M
        _sum_rel_key(result, grad_rel, scale, copies, groups, of_rel // tiles, first, rel_len, room, META)
