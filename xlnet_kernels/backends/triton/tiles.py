"""What the kernels share but for the relative shift: loads of rows and keys, masks, segments, dropout.

Names in kernels: BM query rows by BN keys is a tile, D the head width, BC the columns of a chunk of it (chunks.py).
`row` is a query row's index in the call, `position` where it stands in the segment, `j` a key's index over memory and
segment. Scores are in units of log2, so that exp2 serves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunks import add_bias, load_rows

LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)
BLOCK = tl.constexpr(32)  # keys whose least and largest rank and segment are known
LOG2_E = tl.constexpr(1.4426950408889634)
# Kernel arguments that change from call to call: no variants of a kernel for multiples of 16 and ones among them.
SIZES = ["heads", "rows", "mem_len", "keys", "rel_rows", "max_distance", "threshold"]


@triton.jit
def load_positions(positions, order, tile, rows, BM: tl.constexpr):
    """Of a tile's rows: index in the call, position, whether they exist, and the first and last position.

    `order` and `positions` (rows,) hold the rows sorted by position; None for row i at position i.
    """
    n = tile * BM + tl.arange(0, BM)
    inside = n < rows
    end = tl.minimum(tile * BM + BM, rows) - 1
    if positions is None:
        return n, n, inside, tile * BM, end
    else:
        row = tl.load(order + n, mask=inside, other=0)
        position = tl.load(positions + n, mask=inside, other=0)
        return row, position, inside, tl.load(positions + tile * BM), tl.load(positions + end)


@triton.jit
def widest_tile(positions, begin, end, rows, BM: tl.constexpr):
    """The largest distance between positions of one tile among the tiles of rows [begin, end)."""
    CHUNK: tl.constexpr = 64
    widest = 0
    for chunk in range(begin, end, CHUNK * BM):
        n = chunk + tl.arange(0, CHUNK) * BM
        first = tl.load(positions + n, mask=n < end, other=0)
        last = tl.load(positions + tl.minimum(n + BM, rows) - 1, mask=n < end, other=0)
        widest = tl.maximum(widest, tl.max(last - first, 0))
    return widest


@triton.jit
def load_segment(embed, h, heads, kind: tl.constexpr, c: tl.constexpr, D: tl.constexpr, BC: tl.constexpr):
    """Chunk c of the embedding of "same segment" (kind 0) or "different" (1) in float32."""
    d = c * BC + tl.arange(0, BC)
    return tl.load(embed + (kind * heads + h) * D + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def load_segments(
    query, query_l, segment_embed, segment_bias, query_ids, row, id_row, inside, h, heads, D: tl.constexpr,
    BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a tile's rows: the id, and the score of a key in the same segment and of one in another."""
    ids = load_or(query_ids, id_row, inside, 0)
    same = tl.zeros(row.shape, tl.float32)
    different = same
    if segment_embed is not None:
        kind = tl.arange(0, 16)  # two of them: the least that a matrix product takes
        both = tl.zeros((row.shape[0], 16), tl.float32)
        for c in tl.static_range((D + BC - 1) // BC):
            biased = add_bias(load_rows(query, row, query_l, inside, c, D, BC), segment_bias, h, c, D, BC)
            embed = load_rows(segment_embed + h * D, kind, heads * D, kind < 2, c, D, BC)
            both = tl.dot(biased, tl.trans(embed), acc=both, input_precision=PRECISION)
        same = tl.sum(tl.where((kind == 0)[None, :], both, 0.0), 1)
        different = tl.sum(tl.where((kind == 1)[None, :], both, 0.0), 1)
    return ids, same, different


@triton.jit
def is_same_segment(ids, key_ids, j0, BN: tl.constexpr):
    return ids[:, None] == tl.load((key_ids + j0) + tl.arange(0, BN))[None, :]


@triton.jit
def add_segments(score, ids, same, different, key_ids, id_least, id_largest, j0, BN: tl.constexpr):
    """Scores (BM, BN) plus the segment term, in two parts. Where all keys of the tile are of one segment, id_least to
    id_largest, it is the second part (BM,), the same for all keys of a row."""
    term = tl.zeros(same.shape, tl.float32)
    if key_ids is not None:
        one = id_least == id_largest
        term = tl.where(one, tl.where(ids == id_least, same, different), 0.0)
        if not one:
            score += tl.where(is_same_segment(ids, key_ids, j0, BN), same[:, None], different[:, None])
    return score, term


@triton.jit
def program(tiles):
    """(tile, group) of this program: of a grid's dimensions only the first has room for any number of groups."""
    return tl.program_id(0) % tiles, tl.program_id(0) // tiles


@triton.jit
def load_or(pointer, index, inside, other):
    """`pointer`'s elements where `inside`, `other` elsewhere and where there is no pointer."""
    if pointer is None:
        return tl.full(index.shape, other, tl.int32)
    else:  # code after a return would be compiled
        return tl.load(pointer + index, mask=inside, other=other)


@triton.jit
def load_row_masks(query_rank, query_floor, sees_self, row, inside):
    """The rank, floor and own-key flag of a tile's rows; rows out of range see nothing."""
    rank = load_or(query_rank, row, inside, LOWEST)
    floor = load_or(query_floor, row, inside, HIGHEST)
    return rank, floor, load_or(sees_self, row, inside, 0) != 0


@triton.jit
def range_of(least, largest, j0, BN: tl.constexpr):
    """The least and the largest value among keys j0 .. j0+BN-1, from those of every BLOCK keys; zeros without them."""
    if least is None:
        return 0, 0
    else:
        block = j0 // BLOCK
        low, high = tl.load(least + block), tl.load(largest + block)
        for i in tl.static_range(1, BN // BLOCK):
            low = tl.minimum(low, tl.load(least + block + i))
            high = tl.maximum(high, tl.load(largest + block + i))
        return low, high


@triton.jit
def all_seen(
    first, rank, floor, j0, rank_least, rank_largest, keys, mem_len, key_rank, query_floor, mask, BN: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Whether all rows of a tile see all of its keys: rows with no rank below `rank`, no floor above `floor` and no
    position before `first`, keys with ranks from rank_least to rank_largest."""
    if mask is not None:
        return False
    else:
        if key_rank is None:
            every = j0 + BN <= keys
        else:  # keys that do not exist have the highest rank, and rows that do not the lowest
            every = rank_largest < rank
            if query_floor is not None:
                every = every & (rank_least >= floor)
        if CAUSAL:
            every = every & (j0 + BN <= first + mem_len + 1)
        return every


@triton.jit
def is_near(first, last, j0, mem_len, sees_self, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """Whether keys of a tile may be at or after the rows' own positions, `first` to `last`."""
    if CAUSAL:
        return j0 + BN > first + mem_len
    elif sees_self is not None:
        return (j0 + BN > first + mem_len) & (j0 <= last + mem_len)
    else:
        return False


@triton.jit
def visible(
    row, inside, position, j0, keys, mem_len, rank, floor, own, key_rank, query_floor, sees_self, mask, mask_l, mask_k,
    BN: tl.constexpr, CAUSAL: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Which of its keys each row of a tile (BM, BN) sees; NEAR: as is_near says. `key_rank` and `mask` point at the
    batch's first element."""
    column = tl.arange(0, BN)
    own_column = position + (mem_len - j0)
    if key_rank is not None:  # rows and keys that do not exist have ranks that hide them
        keys_rank = tl.load((key_rank + j0) + column)[None, :]
        seen = keys_rank < rank[:, None]
        if query_floor is not None:
            seen = seen & (keys_rank >= floor[:, None])
        if NEAR and sees_self is not None:
            seen = seen | (column[None, :] == tl.where(own, own_column, -1)[:, None])
    else:
        seen = inside[:, None] & (column < keys - j0)[None, :]
    if NEAR and CAUSAL:
        seen = seen & (column[None, :] <= own_column[:, None])
    if mask is not None:
        offset = row[:, None].to(tl.int64) * mask_l + column[None, :] * mask_k
        seen = seen & (tl.load((mask + tl.cast(j0, tl.int64) * mask_k) + offset, mask=seen, other=0) != 0)
    return seen


@triton.jit
def kept(state, row, head, j0, threshold, BM: tl.constexpr, BN: tl.constexpr):
    """Which probabilities of a tile (BM, BN) at keys j0 .. j0+BN-1 dropout keeps; see xlnet_kernels/dropout.py."""
    seed = tl.load(state)
    offset = tl.load(state + 1)
    low = (offset & 0xFFFFFFFF).to(tl.uint32)
    philox_key = seed ^ (offset >> 32 << 32)
    WORDS: tl.constexpr = 16 if BN < 64 else BN // 4
    first = j0 // 64 * 16 + tl.arange(0, WORDS)[None, :] + tl.zeros((BM, 1), tl.int32)
    zeros = tl.zeros_like(first)
    w0, w1, w2, w3 = tl.philox(
        philox_key, first, zeros + row[:, None], zeros + head, (zeros.to(tl.uint32) + low).to(tl.int32, bitcast=True)
    )
    if BN == 32:  # two words of the four
        upper = (j0 % 64) != 0
        pair = tl.join(tl.where(upper, w2, w0), tl.where(upper, w3, w1))
        words = tl.reshape(tl.permute(pair, (0, 2, 1)), (BM, BN))
    else:
        four = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (BM, WORDS, 2, 2), words in order
        four = tl.reshape(four, (BM, WORDS // 16, 16, 4))
        words = tl.reshape(tl.permute(four, (0, 1, 3, 2)), (BM, BN))
    return words >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def span_of_keys(
    rank, floor, first, last, key_rank, query_floor, sees_self, keys, mem_len, BN: tl.constexpr, CAUSAL: tl.constexpr
):
    """The range [begin, end) of keys outside of which no row of the tile sees any; `begin` is a multiple of BN."""
    begin = 0
    end = keys
    if key_rank is not None:
        CHUNK: tl.constexpr = 256
        highest = tl.max(rank, 0)
        begin = keys
        end = 0
        for chunk in range(0, keys, CHUNK):
            j = chunk + tl.arange(0, CHUNK)
            ranks = tl.load(key_rank + j, mask=j < keys, other=HIGHEST)
            some = ranks < highest
            if query_floor is not None:
                some = some & (ranks >= tl.min(floor, 0))
            begin = tl.minimum(begin, tl.min(tl.where(some, j, keys), 0))
            end = tl.maximum(end, tl.max(tl.where(some, j + 1, 0), 0))
        if sees_self is not None:
            begin = tl.minimum(begin, first + mem_len)
            end = tl.maximum(end, last + mem_len + 1)
    if CAUSAL:
        end = tl.minimum(end, last + mem_len + 1)
    return begin // BN * BN, end


@triton.jit
def span_of_rows(
    query_rank, query_floor, sees_self, positions, order, key_rank, j0, rows, keys, mem_len, BM: tl.constexpr,
    BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The range [begin, end) of rows (sorted by position) outside of which none sees a key of the tile at j0."""
    begin = 0
    end = rows
    if query_rank is not None or CAUSAL:
        CHUNK: tl.constexpr = 256
        begin = rows
        end = 0
        if query_rank is not None:
            j = j0 + tl.arange(0, BN)
            lowest = tl.min(tl.load(key_rank + j, mask=j < keys, other=HIGHEST), 0)
            highest = tl.max(tl.load(key_rank + j, mask=j < keys, other=LOWEST), 0)
        for chunk in range(0, rows, CHUNK):
            n = chunk + tl.arange(0, CHUNK)
            some = n < rows
            row = n
            position = n + mem_len
            if positions is not None:
                row = tl.load(order + n, mask=some, other=0)
                position = tl.load(positions + n, mask=some, other=0) + mem_len
            if query_rank is not None:
                ranked = tl.load(query_rank + row, mask=some, other=LOWEST) > lowest
                if query_floor is not None:
                    ranked = ranked & (tl.load(query_floor + row, mask=some, other=HIGHEST) <= highest)
                if sees_self is not None:
                    own = tl.load(sees_self + row, mask=some, other=0) != 0
                    ranked = ranked | (own & (position >= j0) & (position < j0 + BN))
                some = some & ranked
            if CAUSAL:
                some = some & (position >= j0)
            begin = tl.minimum(begin, tl.min(tl.where(some, n, rows), 0))
            end = tl.maximum(end, tl.max(tl.where(some, n + 1, 0), 0))
    return begin // BM * BM, end


@triton.jit
def score_gradients(
    score, base, delta, grad, scale, kept_scale, state, head, threshold, every, near, row, inside, position, j0, keys,
    mem_len, rank, floor, own, key_rank, query_floor, sees_self, mask, mask_l, mask_k, BM: tl.constexpr,
    BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """(P with dropout, dS) of one tile, both (BM, BN), from the scores and `grad`, dP.

    `base` (BM,) is what is added to scaled scores, and `delta` (BM,) is scaled too.
    """
    if state is not None:
        keep = kept(state, row, head, j0, threshold, BM, BN)
        grad = tl.where(keep, grad * kept_scale, 0.0)
    probability = tl.exp2(score * (scale * LOG2_E) + base[:, None])
    gradient = probability * (grad * scale - delta[:, None])
    # Both are hidden: delta of a row that sees a NaN is NaN, also where the row sees nothing.
    if not every and near:
        seen = visible(
            row, inside, position, j0, keys, mem_len, rank, floor, own, key_rank, query_floor, sees_self, mask, mask_l,
            mask_k, BN, CAUSAL, True,
        )  # fmt: skip
        probability = tl.where(seen, probability, 0.0)
        gradient = tl.where(seen, gradient, 0.0)
    if not every and not near:
        seen = visible(
            row, inside, position, j0, keys, mem_len, rank, floor, own, key_rank, query_floor, sees_self, mask, mask_l,
            mask_k, BN, CAUSAL, False,
        )  # fmt: skip
        probability = tl.where(seen, probability, 0.0)
        gradient = tl.where(seen, gradient, 0.0)
    dropped = probability
    if state is not None:
        dropped = tl.where(keep, probability * kept_scale, 0.0)
    return dropped, gradient
