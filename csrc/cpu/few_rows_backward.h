// Backward of few query rows: as backward.h, with products that read keys, values and rows of rel_key where they lie.
#pragma once

#include "backward.h"
#include "few_rows.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

template <typename T>
struct FewRowsBackwardScratch {
  static constexpr int64_t STRIDE = BACKWARD_BLOCK_N + ROW_ROWS + LANES<T>;  // register tiles of keys are whole ones
  HeadTerms<T> terms;
  KeyTerms keys;
  Unread unread;
  T *key_copies, *rel_copies, *spare, *out, *dO, *dQ_content, *dQ_position, *scores, *dP, *dropout;
  ChunkSums<T> sums;

  FewRowsBackwardScratch(Carver& carver, const Sizes<T>& sizes, int64_t /*head_dim*/)
      : terms(carver, sizes), keys(carver, sizes), unread(carver, sizes.max_keys, sizes.max_window_rows) {
    carver.take(FEW_KEYS * sizes.padded_dim, key_copies);
    carver.take((FEW_KEYS + FEW_SPAN) * sizes.padded_dim, rel_copies);
    carver.take(sizes.padded_dim, spare, out);
    carver.take(FEW_ROWS * sizes.padded_dim, dO, dQ_content, dQ_position);
    carver.take(FEW_ROWS * STRIDE, scores, dP);
    carver.take(dropout_elements(BACKWARD_BLOCK_N), dropout);
    sums.carve(carver, sizes);
  }

  void load(const RelAttention& p, const Sizes<T>& sizes, const Chunk& chunk) const {
    if (sizes.starts_run(chunk.b)) {
      terms.load(p, chunk.h, sizes.padded_dim);
      sums.start_shared(sizes, chunk);
    }
    keys.load(p, chunk);
    sums.start_keys(sizes, chunk);
  }
};

// to_j += A(r, j) row, of one row
template <typename T>
static void add_multiples(const T* factors, const T* row, int64_t dim, int64_t count, T* to) {
  for (int64_t d = 0; d < dim; d += LANES<T>) {
    const Vec<T> x = load(row + d);
    for (int64_t j = 0; j < count; ++j) add(to + j * dim + d, factors[j] * x);
  }
}

// dQ += dS . K and dS . rel_key
template <typename T, int ROWS>
static void few_rows_query_gradients(const BackwardTask<T, FewRowsBackwardScratch<T>>& task, const RowSequence& keys,
                                     const FewRowsWindow<T, ROWS>& window, const FewRowsTile<T>& tile) {
  const auto& [p, g, wanted, sizes, chunk, scratch, next, range, row] = task;
  constexpr int64_t STRIDE = FewRowsBackwardScratch<T>::STRIDE;
  const int64_t dim = sizes.padded_dim;
  for (int64_t j = 0, some; wanted.query && j < tile.count; j += some) {
    some = smaller(FEW_KEYS, tile.count - j);
    const T* const dS = scratch.scores + j;
    const WorkRows<T> key = rows_of(p, keys, chunk.b, chunk.h, tile.first + j, some, dim, scratch.key_copies);
    few_rows_product<T, ROWS>(dS, STRIDE, key, dim, some, scratch.dQ_content, dim);
    const WorkRows<T> rel = window.rows(tile.first + j, some, dim, scratch.rel_copies);
    for (int64_t r = 0; r < ROWS; ++r)
      few_rows_product<T, 1>(dS + r * STRIDE, STRIDE, {rel.row + window.shift[r] * rel.stride, rel.stride}, dim, some,
                             scratch.dQ_position + r * dim, dim);
  }
}

template <typename T, int ROWS>
static void few_rows_backward(const BackwardTask<T, FewRowsBackwardScratch<T>>& task, const RowBlock<T>& block) {
  const auto& [p, g, wanted, sizes, chunk, scratch, next, range, row] = task;
  constexpr int64_t STRIDE = FewRowsBackwardScratch<T>::STRIDE;
  const int64_t b = block.b, h = block.h, dim = sizes.padded_dim;
  RowSequence keys = keys_of(p, p.memory.key, p.keys.key, chunk);
  const RowSequence values = keys_of(p, p.memory.value, p.keys.value, chunk);
  FewRowsWindow<T, ROWS> window(p, block, chunk);
  RowStatistics<T> statistics;
  load_output_gradients(task, block, statistics);
  clear(ROWS * dim, scratch.dQ_content, scratch.dQ_position);

  TileScheduler tiles(p, chunk, scratch.keys.ranks, block.mask, BACKWARD_BLOCK_N);
  for (int64_t first, count; tiles.next(first, count);) {
    const FewRowsTile<T> tile(chunk, first, count, scratch.scores, STRIDE);
    for (int64_t j = 0, some; j < count; j += some) {
      some = smaller(FEW_KEYS, count - j);
      few_scores<T, ROWS, true>(block.content_query, block.position_query, dim,
                                rows_of(p, keys, b, h, first + j, some, dim, scratch.key_copies),
                                window.rows(first + j, some, dim, scratch.rel_copies), window.shift, some,
                                scratch.scores + j, STRIDE);
      few_scores<T, ROWS, false>(scratch.dO, nullptr, dim,
                                 rows_of(p, values, b, h, first + j, some, dim, scratch.key_copies), {}, nullptr, some,
                                 scratch.dP + j, STRIDE);
    }
    for (int64_t r = 0; r < ROWS; ++r) {
      if (first == 0) prefetch_next(p, next, block.row_index[r], g.out);
      const VisibleKeys<T> visible = segments_and_mask(p, scratch.keys, block, r, tile, StoredScores<T>{tile.score[r]});
      softmax_backward(task, block, r, visible.count, tile, scratch.dP + r * STRIDE, statistics);
    }
    few_rows_query_gradients<T, ROWS>(task, keys, window, tile);
    if (!are_finite(scratch.dQ_content, ROWS * dim) || !are_finite(scratch.dQ_position, ROWS * dim)) {
      keys.unread = scratch.unread.template find_keys<T>(p, chunk, keys, chunk.keys);
      window.sequence.unread = scratch.unread.template find_rel_rows<T>(p, chunk, 1, chunk.window_rows);
      clear(ROWS * dim, scratch.dQ_content, scratch.dQ_position);  // sums of this tile, which is the only one
      few_rows_query_gradients<T, ROWS>(task, keys, window, tile);
    }
    const RowPointers<T> P(scratch.dP, STRIDE);
    for (int64_t j = 0; j < count; j += ROW_ROWS) {
      const int64_t start = (first + j) * dim;
      if (wanted.key)
        row_product<T, A::columns>(tile.score, j, block.content_query, dim, ROWS,
                                   RowPointers<T>(scratch.sums.dK + start, dim).row);
      if (wanted.value)
        row_product<T, A::columns>(P.row, j, scratch.dO, dim, ROWS, RowPointers<T>(scratch.sums.dV + start, dim).row);
    }
    for (int64_t r = 0; wanted.rel_key && r < ROWS; ++r)
      add_multiples(tile.score[r], block.position_query + r * dim, dim, count,
                    scratch.sums.dR + (window.low + window.shift[r] + first) * dim);
  }
  store_rows(task, block, statistics);
}

template <typename T>
static void few_rows_backward_chunk(const BackwardTask<T, FewRowsBackwardScratch<T>>& task, RowBlock<T>& block) {
  const Chunk& chunk = task.chunk;
  for (int64_t row = chunk.begin; row < chunk.end; row += block.count) {
    load_queries(task.p, task.sizes, task.scratch.terms, chunk, row, FEW_ROWS, FEW_SPAN, block);
    if (block.count == 1) few_rows_backward<T, 1>(task, block);
    if (block.count == 2) few_rows_backward<T, 2>(task, block);
    if (block.count == 3) few_rows_backward<T, 3>(task, block);
    if (block.count == 4) few_rows_backward<T, 4>(task, block);
  }
}

template <typename T>
static bool few_rows_backward_as(const RelAttention& p, const RelAttentionGradients& g, int64_t threads,
                                 Parallel parallel) {
  using Scratch = FewRowsBackwardScratch<T>;
  return for_each_backward_task<T, Scratch>(
      p, g, threads, parallel,
      [](const BackwardTask<T, Scratch>& task, RowBlock<T>& block) { few_rows_backward_chunk(task, block); });
}

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
