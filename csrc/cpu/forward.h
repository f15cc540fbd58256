// Forward: scores of a tile in place of the shifted band, online softmax, the output in the work type until the end.
#pragma once

#include "dropout.h"
#include "gemm.h"
#include "pack.h"
#include "rows.h"
#include "scores.h"
#include "shift.h"
#include "softmax.h"
#include "tile_scheduler.h"
#include "unread.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

template <typename T>
struct ForwardScratch {
  HeadTerms<T> terms;
  KeyTerms keys;
  Unread unread;
  T *key_panels, *rel_panels, *value_rows, *spare;
  T *out, *scores, *dropout;

  ForwardScratch(Carver& carver, const Sizes<T>& sizes, int64_t head_dim)
      : terms(carver, sizes), keys(carver, sizes), unread(carver, sizes.max_keys, 0) {
    carver.take(sizes.max_keys * head_dim, key_panels);
    carver.take(sizes.max_window_rows * head_dim, rel_panels);
    carver.take(sizes.max_keys * sizes.padded_dim, value_rows);
    carver.take(LANES<T> * sizes.padded_dim, spare);
    carver.take(BLOCK_M * sizes.padded_dim, out);
    carver.take(Tile<T>::elements(FORWARD_BLOCK_N), scores);
    carver.take(dropout_elements(FORWARD_BLOCK_N), dropout);
  }

  void load(const RelAttention& p, const Sizes<T>& sizes, const Chunk& chunk) const {
    const int64_t b = chunk.b, h = chunk.h, dim = sizes.padded_dim;
    T* const none = nullptr;
    if (sizes.starts_run(b)) {
      terms.load(p, h, dim);
      pack(p, window_of(p, chunk.rel_first), b, h, chunk.window_rows, dim, none, spare, rel_panels);
    }
    keys.load(p, chunk);
    pack(p, keys_of(p, p.memory.key, p.keys.key, chunk), b, h, chunk.padded_keys, dim, none, spare, key_panels);
    load_values(p, sizes, chunk);
  }

  // Hidden scores are replaced, whatever they are: only values could bring NaN to rows that do not see them.
  void load_values(const RelAttention& p, const Sizes<T>& sizes, const Chunk& chunk) const {
    const RowSequence values = keys_of(p, p.memory.value, p.keys.value, chunk);
    with_unread_as_zeros(
        values,
        [&](const RowSequence& sequence) {
          return pack(p, sequence, chunk.b, chunk.h, chunk.padded_keys, sizes.padded_dim, value_rows, spare,
                      static_cast<T*>(nullptr));
        },
        [&] { return unread.find_keys<T>(p, chunk, values, chunk.padded_keys); });
  }
};

// out += P . V
template <typename T>
static void add_values(const Sizes<T>& sizes, const Tile<T>& tile, int64_t rows, const T* value_rows, T* out) {
  const int64_t dim = sizes.padded_dim;
  for (int64_t r = 0; r < rows; r += ROW_ROWS)
    row_product<T, A::rows>(tile.score + r, 0, value_rows + tile.first * dim, dim, tile.count,
                            RowPointers<T>(out + r * dim, dim).row);
}

template <typename T, typename Softmax>
static void store_rows(const RelAttention& p, const Sizes<T>& sizes, const Chunk& chunk, const KeyRanks& ranks,
                       const BlockRows<T>& block, Softmax& softmax, T* out) {
  const int64_t head_row = (block.b * p.heads + block.h) * p.length;
  for (int64_t r = 0; r < block.count; ++r, out += sizes.padded_dim) {
    const int64_t row_index = block.row_index[r];
    const int64_t index = head_row + row_index;
    static_cast<T*>(p.lse)[index] = softmax.lse(r, block.segments.same[r]);
    // Where all scores that a row sees are -inf it is NaN, as softmax has it.
    if (softmax.row_sum[r] == 0 && sees_any_key<T>(p, chunk, ranks, row_index, block.position[r]))
      softmax.row_sum[r] = NAN;
    softmax.normalize(r, out, sizes.padded_dim);
    write_rounded(p, block.b, block.h, row_index, out);
    static_cast<T*>(p.row_max)[index] = softmax.row_max[r];
    static_cast<T*>(p.row_sum)[index] = softmax.row_sum[r];
  }
}

template <typename T>
static void forward_block(const RelAttention& p, const Sizes<T>& sizes, const RowBlock<T>& block, const Chunk& chunk,
                          const ForwardScratch<T>& scratch, const Next& next) {
  const int64_t rows = block.padded(ROW_ROWS), dim = sizes.padded_dim;
  OnlineSoftmax<T> softmax;
  clear(rows * dim, scratch.out);

  TileScheduler tiles(p, chunk, scratch.keys.ranks, block.mask, FORWARD_BLOCK_N);
  for (int64_t first, count; tiles.next(first, count);) {
    Tile<T> tile(block, chunk, first, count, scratch.scores);
    position_scores(p, block, scratch.rel_panels, tile);
    content_scores(p, block, scratch.key_panels, tile);
    for (int64_t r = 0; r < block.count; ++r) {
      T* score = tile.score[r];
      if (first == 0) prefetch_next(p, next, block.row_index[r]);
      const VisibleKeys<T> visible = segments_and_mask(p, scratch.keys, block, r, tile, StoredScores<T>{tile.score[r]});
      softmax.step(r, visible.count, count, visible.max, score, scratch.out + r * dim, dim);
      apply_dropout(p, block.b, block.h, block.row_index[r], tile.first_key, visible.count, scratch.dropout, score);
    }
    tile.repeat_last_row(block.count, rows);
    add_values(sizes, tile, rows, scratch.value_rows, scratch.out);
  }
  store_rows(p, sizes, chunk, scratch.keys.ranks, block, softmax, scratch.out);
}

template <typename T>
static bool forward_as(const RelAttention& p, int64_t threads, Parallel parallel) {
  const Sizes<T> sizes(p, 256, p.rel_key.rows.stride[0] == 0);
  Carver measure{nullptr, 0};
  ForwardScratch<T>(measure, sizes, p.head_dim);
  RowBlock<T>(measure, sizes);
  const auto run = [&](const Chunk& chunk, const Next& next, char* memory) {
    Carver carver{memory, 0};
    const ForwardScratch<T> scratch(carver, sizes, p.head_dim);
    RowBlock<T> block(carver, sizes);
    scratch.load(p, sizes, chunk);
    for (int64_t row = chunk.begin; row < chunk.end; row += block.count) {
      load_panels(p, sizes, scratch.terms, chunk, row, block);
      forward_block(p, sizes, block, chunk, scratch, next);
    }
  };
  return for_each_chunk(p, sizes, threads, measure.used, parallel, run);
}

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
