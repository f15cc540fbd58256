// Backward: probabilities again from row_max and row_sum; the scores of a tile become dS and, unshifted, its band.
#pragma once

#include "dropout.h"
#include "gemm.h"
#include "ordered_accumulation.h"
#include "pack.h"
#include "rows.h"
#include "scores.h"
#include "shift.h"
#include "softmax.h"
#include "sums.h"
#include "tile_scheduler.h"
#include "unread.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

template <typename T>
struct BackwardScratch {
  HeadTerms<T> terms;
  KeyTerms keys;
  Unread unread;
  T *key_rows, *key_panels, *value_panels, *rel_rows, *rel_panels, *spare;
  T *out, *dO, *dO_panels, *dQ_content, *dQ_position;
  T *scores, *dP, *dropout;
  T* segment_sums;  // SegmentRowSums of a chunk's rows
  ChunkSums<T> sums;

  // Row stride of dP
  static constexpr int64_t STRIDE = BACKWARD_BLOCK_N + PANEL_WIDTH<T> + BAND_MARGIN;

  BackwardScratch(Carver& carver, const Sizes<T>& sizes, int64_t head_dim)
      : terms(carver, sizes), keys(carver, sizes), unread(carver, sizes.max_keys, sizes.max_window_rows) {
    carver.take(sizes.max_keys * sizes.padded_dim, key_rows);
    carver.take(sizes.max_keys * head_dim, key_panels, value_panels);
    carver.take(sizes.max_window_rows * sizes.padded_dim, rel_rows);
    carver.take(sizes.max_window_rows * head_dim, rel_panels);
    carver.take(LANES<T> * sizes.padded_dim, spare);
    carver.take(sizes.padded_dim, out);
    carver.take(RowBlock<T>::elements(sizes), dO, dO_panels);
    carver.take(BLOCK_M * sizes.padded_dim, dQ_content, dQ_position);
    carver.take(Tile<T>::elements(BACKWARD_BLOCK_N), scores);
    carver.take(BLOCK_M * STRIDE, dP);
    carver.take(dropout_elements(BACKWARD_BLOCK_N), dropout);
    carver.take(sizes.chunk_rows * SegmentRowSums<T>::NUMBERS, segment_sums);
    sums.carve(carver, sizes);
  }

  void load(const RelAttention& p, const Sizes<T>& sizes, const Chunk& chunk) const {
    const int64_t b = chunk.b, h = chunk.h, dim = sizes.padded_dim;
    T* const none = nullptr;
    if (sizes.starts_run(b)) {
      terms.load(p, h, dim);
      with_unread_as_zeros(
          window_of(p, chunk.rel_first),
          [&](const RowSequence& sequence) {
            return pack(p, sequence, b, h, chunk.window_rows, dim, rel_rows, spare, rel_panels);
          },
          [&] { return unread.find_rel_rows<T>(p, chunk, sizes.run, chunk.window_rows); });
      sums.start_shared(sizes, chunk);
    }
    keys.load(p, chunk);
    const RowSequence rows = keys_of(p, p.memory.key, p.keys.key, chunk);
    with_unread_as_zeros(
        rows,
        [&](const RowSequence& sequence) {
          return pack(p, sequence, b, h, chunk.padded_keys, dim, key_rows, spare, key_panels);
        },
        [&] { return unread.find_keys<T>(p, chunk, rows, chunk.padded_keys); });
    pack(p, keys_of(p, p.memory.value, p.keys.value, chunk), b, h, chunk.padded_keys, dim, none, spare, value_panels);
    sums.start_keys(sizes, chunk);
  }
};

// One task, for the functions below
template <typename T, typename Scratch = BackwardScratch<T>>
struct BackwardTask {
  const RelAttention& p;
  const RelAttentionGradients& g;
  const Wanted& wanted;
  const Sizes<T>& sizes;
  const Chunk& chunk;
  const Scratch& scratch;
  const Next& next;
  KeyRange range = {};
  int64_t row = 0;  // of the block's first, in the chunk
};

// Per row of a block
template <typename T>
struct RowStatistics {
  SoftmaxRow<T> softmax[MAX_ROWS];
  SegmentRowSums<T> segments;
};

// dO and statistics of the block's rows
template <typename T, typename Scratch>
static void load_output_gradients(const BackwardTask<T, Scratch>& task, const RowBlock<T>& block,
                                  RowStatistics<T>& statistics) {
  const auto& [p, g, wanted, sizes, chunk, scratch, next, range, row] = task;
  const int64_t head_row = (block.b * p.heads + block.h) * p.length;
  for (int64_t r = 0; r < block.count; ++r) {
    const int64_t row_index = block.row_index[r];
    if (r + ROWS_AHEAD < block.count) {
      prefetch_row(p, g.out, block.b, block.h, block.row_index[r + ROWS_AHEAD], bytes_of(p.dtype));
      prefetch_row(p, p.out, block.b, block.h, block.row_index[r + ROWS_AHEAD], bytes_of(p.dtype));
    }
    T* dO = scratch.dO + r * sizes.padded_dim;
    read_row(p, g.out, block.b, block.h, row_index, sizes.padded_dim, dO);
    read_unrounded(p, block.b, block.h, row_index, sizes.padded_dim, scratch.spare, scratch.out);
    statistics.softmax[r] = SoftmaxRow<T>(p, g.lse, head_row + row_index, scratch.out, dO, sizes.padded_dim);
    statistics.segments.start(r);
    if (statistics.softmax[r].is_fully_masked()) {  // zero times NaN or infinity would be NaN
      clear(sizes.padded_dim, dO);
      block.clear_row(r, sizes.padded_dim);
    }
  }
}

// dP = dO . V^T
template <typename T>
static void probability_gradients(const BackwardTask<T>& task, const RowBlock<T>& block, const Tile<T>& tile,
                                  T* const* dP) {
  const int64_t rows = block.padded(PANEL_ROWS), depth = task.p.head_dim;
  for (int64_t column = 0; column < tile.count; column += PANEL_WIDTH<T>)
    for (int64_t r = 0; r < rows; r += PANEL_ROWS)
      panel_product<T, true>(task.scratch.dO_panels + r * depth,
                             task.scratch.value_panels + (tile.first + column) * depth, depth, dP + r, column, 0,
                             tile.count);
}

// Row r of a tile: scores become dS, dP becomes the dropped-out probabilities that dV needs.
template <typename T, typename Scratch, typename Keys>
static ROW_LOOP void softmax_backward(const BackwardTask<T, Scratch>& task, const RowBlock<T>& block, int64_t r,
                                      int64_t visible, const Keys& tile, T* dP, RowStatistics<T>& statistics) {
  const RelAttention& p = task.p;
  const SoftmaxRow<T> softmax = statistics.softmax[r];
  const SegmentRow<T> segments(p, task.scratch.keys.segments, tile.first, block.b, block.row_index[r],
                               block.segments.different[r]);
  T* score = tile.score[r];
  const T* dropout = nullptr;
  if (p.dropout.p > 0 && visible > 0)
    dropout = dropout_factors(p, block.b, block.h, block.row_index[r], tile.first_key, round_up(visible, LANES<T>),
                              task.scratch.dropout);
  if (softmax.is_fully_masked()) visible = 0;
  SegmentSums<T> sums;
  for (int64_t j = 0; j < visible; j += LANES<T>) {
    const Vec<T> s = load(score + j), P = softmax.P(s);
    const Vec<T> kept = dropout == nullptr ? broadcast(T(1)) : load(dropout + j);
    const Vec<T> dS = softmax.dS(s, P, kept * load(dP + j));
    store(score + j, dS);
    store(dP + j, kept * P);
    if (segments.used) sums.add(segments.differs(j), dS, P);
  }
  for (int64_t j = visible; j < tile.count + ROW_ROWS; ++j) dP[j] = score[j] = 0;
  if (segments.used) statistics.segments.add(r, sums);
}

// dQ += dS . K and band(dS) . R, apart since their sums are the gradients of u and v
template <typename T>
static void add_query_gradients(const BackwardTask<T>& task, const RowBlock<T>& block, const Tile<T>& tile) {
  const BackwardScratch<T>& scratch = task.scratch;
  const int64_t dim = task.sizes.padded_dim;
  for (int64_t r = 0; r < block.count; r += ROW_ROWS) {
    row_product<T, A::rows>(tile.score + r, 0, scratch.key_rows + tile.first * dim, dim, tile.count,
                            RowPointers<T>(scratch.dQ_content + r * dim, dim).row);
    const int64_t low = tile.shift[r + ROW_ROWS - 1], high = tile.shift[r] + tile.count;
    T* band[ROW_ROWS];
    for (int64_t m = 0; m < ROW_ROWS; ++m) band[m] = tile.band[r + m] + low;
    row_product<T, A::rows>(band, 0, scratch.rel_rows + (tile.window_start + low) * dim, dim, high - low,
                            RowPointers<T>(scratch.dQ_position + r * dim, dim).row);
  }
}

// dK += dS^T . (Q + u), dV += P^T . dO
template <typename T>
static void add_key_gradients(const BackwardTask<T>& task, const RowBlock<T>& block, const Tile<T>& tile,
                              const T* const* P) {
  const BackwardScratch<T>& scratch = task.scratch;
  const int64_t dim = task.sizes.padded_dim;
  for (int64_t j = 0; j < tile.count; j += ROW_ROWS) {
    const int64_t start = (tile.first + j) * dim;
    if (task.wanted.key)
      row_product<T, A::columns>(tile.score, j, block.content_query, dim, block.count,
                                 RowPointers<T>(scratch.sums.dK + start, dim).row);
    if (task.wanted.value)
      row_product<T, A::columns>(P, j, scratch.dO, dim, block.count, RowPointers<T>(scratch.sums.dV + start, dim).row);
  }
}

// dR += band(dS)^T . (Q + v), over the rows that reach each piece of the window
template <typename T>
static void add_rel_key_gradients(const BackwardTask<T>& task, const RowBlock<T>& block, const Tile<T>& tile) {
  const int64_t dim = task.sizes.padded_dim;
  int64_t begin = block.count, end = block.count;
  for (int64_t t = tile.shift[block.count - 1]; t < tile.shift[0] + tile.count; t += ROW_ROWS) {
    while (begin > 0 && tile.shift[begin - 1] < t + ROW_ROWS) --begin;
    while (end > begin && tile.shift[end - 1] + tile.count <= t) --end;
    row_product<T, A::columns>(tile.band + begin, t, block.position_query + begin * dim, dim, end - begin,
                               RowPointers<T>(task.scratch.sums.dR + (tile.window_start + t) * dim, dim).row);
  }
}

// dQ of the block's rows, and their part of the sums over rows
template <typename T, typename Scratch>
static void store_rows(const BackwardTask<T, Scratch>& task, const BlockRows<T>& block,
                       const RowStatistics<T>& statistics) {
  const auto& [p, g, wanted, sizes, chunk, scratch, next, range, row] = task;
  const auto& sums = scratch.sums;
  const SegmentTerms<T>& terms = scratch.terms.segments;
  const T scale = static_cast<T>(p.scale), unscale = static_cast<T>(LN2);
  for (int64_t r = 0; r < block.count; ++r) {
    T *content = scratch.dQ_content + r * sizes.padded_dim, *position = scratch.dQ_position + r * sizes.padded_dim;
    const T* segment_query = block.segments.query + r * sizes.padded_dim;
    if (statistics.softmax[r].is_fully_masked()) clear(sizes.padded_dim, content, position);  // keys may be NaN
    const T total = statistics.softmax[r].grad_lse, different = statistics.segments.different(r, total);
    for (int64_t d = 0; d < sizes.padded_dim; d += LANES<T>) {
      const Vec<T> content_part = load(content + d), position_part = load(position + d);
      add(sums.grad_content_bias + d, scale * content_part);
      add(sums.grad_position_bias + d, scale * position_part);
      Vec<T> all = content_part + position_part;
      if (p.segments.embed != nullptr && range.is_last) {
        const Vec<T> segment = different * load(terms.different + d) + total * load(terms.same + d);
        const Vec<T> q = unscale * load(segment_query + d);
        add(sums.grad_segment_bias + d, scale * segment);
        add(sums.grad_same + d, (total - different) * q);
        add(sums.grad_different + d, different * q);
        all += segment;
      }
      store(content + d, scale * all);
    }
    if (g.query.data != nullptr) {
      T* to = static_cast<T*>(g.query.data) + row_start(g.query, block.b, block.h, block.row_index[r]);
      const int64_t stride = g.query.stride[3];
      int64_t d = 0;
      if (stride == 1)
        for (; d + LANES<T> <= p.head_dim; d += LANES<T>)
          store(to + d, range.is_first ? load(content + d) : load(to + d) + load(content + d));
      for (; d < p.head_dim; ++d) to[d * stride] = (range.is_first ? T(0) : to[d * stride]) + content[d];
    }
  }
}

template <typename T>
static void backward_block(const BackwardTask<T>& task, const RowBlock<T>& block) {
  const auto& [p, g, wanted, sizes, chunk, scratch, next, range, row] = task;
  RowStatistics<T> statistics;
  T* dP[BLOCK_M];
  for (int64_t r = 0; r < BLOCK_M; ++r) dP[r] = scratch.dP + r * BackwardScratch<T>::STRIDE;
  load_output_gradients(task, block, statistics);
  for (int64_t r = 0; !range.is_first && r < block.count; ++r)
    statistics.segments.resume(r, scratch.segment_sums + (row + r) * SegmentRowSums<T>::NUMBERS);
  transpose_row_panels(scratch.dO, block.count, sizes.padded_dim, p.head_dim, Panels<T>{scratch.dO_panels});
  clear(block.padded(ROW_ROWS) * sizes.padded_dim, scratch.dQ_content, scratch.dQ_position);

  TileScheduler tiles(p, chunk, scratch.keys.ranks, block.mask, BACKWARD_BLOCK_N, range);
  for (int64_t first, count; tiles.next(first, count);) {
    Tile<T> tile(block, chunk, first, count, scratch.scores);
    position_scores(p, block, scratch.rel_panels, tile);
    content_scores(p, block, scratch.key_panels, tile);
    probability_gradients(task, block, tile, dP);
    for (int64_t r = 0; r < block.count; ++r) {
      if (first == 0) prefetch_next(p, next, block.row_index[r], g.out);
      const VisibleKeys<T> visible = segments_and_mask(p, scratch.keys, block, r, tile, StoredScores<T>{tile.score[r]});
      softmax_backward(task, block, r, visible.count, tile, dP[r], statistics);
    }
    tile.clear_corners(block.count);
    tile.repeat_last_row(block.count, block.padded(ROW_ROWS));
    if (wanted.query) add_query_gradients(task, block, tile);
    if (wanted.key || wanted.value) add_key_gradients(task, block, tile, dP);
    if (wanted.rel_key) add_rel_key_gradients(task, block, tile);
  }
  store_rows(task, block, statistics);
  for (int64_t r = 0; !range.is_last && r < block.count; ++r)
    statistics.segments.keep(r, scratch.segment_sums + (row + r) * SegmentRowSums<T>::NUMBERS);
}

// Calls body(task, block) for each chunk, then adds the chunk's sums over rows to the results.
template <typename T, typename Scratch, typename F>
static bool for_each_backward_task(const RelAttention& p, const RelAttentionGradients& g, int64_t threads,
                                   Parallel parallel, F body) {
  const Sizes<T> sizes(p, 512, p.rel_key.rows.stride[0] == 0 && g.rel_key.stride[0] == 0);
  const Wanted wanted(g);
  Carver measure{nullptr, 0};
  Scratch(measure, sizes, p.head_dim);
  RowBlock<T>(measure, sizes);
  const OrderedAccumulation order(p.heads);
  if (order.next_ticket == nullptr) return false;
  const auto run = [&](const Chunk& chunk, const Next& next, char* memory) {
    Carver carver{memory, 0};
    const Scratch scratch(carver, sizes, p.head_dim);
    RowBlock<T> block(carver, sizes);
    scratch.load(p, sizes, chunk);
    body(BackwardTask<T, Scratch>{p, g, wanted, sizes, chunk, scratch, next}, block);
    if (chunk.index == 0) scratch.sums.add_keys(g, wanted, p, sizes, chunk);  // the first that has them needs no order
    if (!sizes.ends_run(chunk.b, p.batch)) return;
    const int64_t ticket = chunk.index * p.batch + chunk.b;
    order.wait(chunk.h, ticket - chunk.b % sizes.run);
    if (chunk.index > 0) scratch.sums.add_keys(g, wanted, p, sizes, chunk);
    scratch.sums.add_shared(g, wanted, p, sizes, chunk);
    order.pass(chunk.h, ticket);
  };
  return for_each_chunk(p, sizes, threads, measure.used, parallel, run);
}

// All rows of a chunk, range by range of its keys
template <typename T>
static void backward_chunk(const BackwardTask<T>& task, RowBlock<T>& block) {
  const auto& [p, g, wanted, sizes, chunk, scratch, next, range, row] = task;
  // Where rel_key has no row for most pairs, rows in the order of their positions see no more than a range anyway.
  const bool is_long = p.rel_len > RANGE_GROUPS * KEY_GROUP;
  const int64_t groups = chunk.key_groups;
  const int64_t ranges = is_long ? larger((groups + RANGE_GROUPS - 1) / RANGE_GROUPS, 1) : 1;
  for (int64_t i = 0; i < ranges; ++i) {
    const KeyRange some{groups * i / ranges, groups * (i + 1) / ranges, i == 0, i == ranges - 1};
    for (int64_t begin = chunk.begin; begin < chunk.end; begin += block.count) {
      load_rows(p, sizes, scratch.terms, chunk, begin, block);
      backward_block({p, g, wanted, sizes, chunk, scratch, next, some, begin - chunk.begin}, block);
    }
  }
}

template <typename T>
static bool backward_as(const RelAttention& p, const RelAttentionGradients& g, int64_t threads, Parallel parallel) {
  return for_each_backward_task<T, BackwardScratch<T>>(
      p, g, threads, parallel, [](const BackwardTask<T>& task, RowBlock<T>& block) { backward_chunk(task, block); });
}

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
