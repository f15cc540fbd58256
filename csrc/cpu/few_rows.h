// Forward of few query rows, as in generation: packing a key would cost more than its products with so few rows.
// Keys, values and rows of rel_key are read once, from where they lie. Terms, mask and softmax are forward.h's.
#pragma once

#include "dropout.h"
#include "forward.h"
#include "pack.h"
#include "rows.h"
#include "scores.h"
#include "softmax.h"
#include "tile_scheduler.h"
#include "unread.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

constexpr int64_t FEW_ROWS = 4;   // query rows that go through the keys together
constexpr int64_t FEW_SPAN = 48;  // largest difference of their positions
constexpr int64_t FEW_KEYS = 48;  // keys whose products are taken together

// Whether packing the keys would take longer than it saves (docs/notebook/cpu.md). Here 16-bit numbers are converted
// again for every FEW_ROWS rows.
static bool has_few_rows(const RelAttention& p) {
  const bool has_16_bits = p.dtype == DType::bfloat16 || p.dtype == DType::float16;
  return p.length <= (!has_16_bits ? 3 * FEW_ROWS : p.mem_len + p.key_len <= 16 ? 2 * FEW_ROWS : FEW_ROWS);
}

// Rows of the work type, whole vectors long
template <typename T>
struct WorkRows {
  const T* row;
  int64_t stride;
};

// Rows j .. j + count - 1 of a sequence: where they lie, or where that is not possible in `copies`
template <typename T>
static WorkRows<T> rows_of(const RelAttention& p, const RowSequence& sequence, int64_t b, int64_t h, int64_t j,
                           int64_t count, int64_t padded, T* copies) {
  constexpr DType same = sizeof(T) == sizeof(double) ? DType::float64 : DType::float32;
  int64_t row, left;
  const Tensor4* tensor = sequence.find(j, row, left);
  if (p.dtype == same && tensor != nullptr && left >= count && tensor->stride[3] == 1 && p.head_dim == padded)
    return {static_cast<const T*>(tensor->data) + row_start(*tensor, b, h, row), tensor->stride[2]};
  for (int64_t i = 0; i < count; ++i) {
    tensor = sequence.find(j + i, row, left);
    if (tensor == nullptr) {
      clear(padded, copies + i * padded);
    } else {
      read_row(p, *tensor, b, h, row, padded, copies + i * padded);
    }
  }
  return {copies, padded};
}

template <typename T>
struct FewRowsScratch {
  static constexpr int64_t STRIDE = FORWARD_BLOCK_N + LANES<T>;
  HeadTerms<T> terms;
  KeyTerms keys;
  Unread unread;
  T *key_copies, *rel_copies, *out, *scores, *dropout;

  FewRowsScratch(Carver& carver, const Sizes<T>& sizes)
      : terms(carver, sizes), keys(carver, sizes), unread(carver, sizes.max_keys, 0) {
    carver.take(FEW_KEYS * sizes.padded_dim, key_copies);
    carver.take((FEW_KEYS + FEW_SPAN) * sizes.padded_dim, rel_copies);
    carver.take(FEW_ROWS * sizes.padded_dim, out);
    carver.take(FEW_ROWS * STRIDE, scores);
    carver.take(dropout_elements(FORWARD_BLOCK_N), dropout);
  }
};

// A few rows against a run of the chunk's keys
template <typename T>
struct FewRowsTile {
  int64_t first, count;
  int64_t first_key;  // `first` among all keys
  T* score[FEW_ROWS];

  FewRowsTile(const Chunk& chunk, int64_t first, int64_t count, T* scores, int64_t stride)
      : first(first), count(count), first_key(chunk.first_key + first) {
    for (int64_t r = 0; r < FEW_ROWS; ++r) score[r] = scores + r * stride;
  }
};

// The rows of rel_key that ROWS rows of a block need: row r of the block takes shift[r] + j for key j.
template <typename T, int ROWS>
struct FewRowsWindow {
  const RelAttention& p;
  const Chunk& chunk;
  RowSequence sequence;
  int64_t low, span;
  int64_t shift[ROWS];

  FewRowsWindow(const RelAttention& p, const RowBlock<T>& block, const Chunk& chunk)
      : p(p),
        chunk(chunk),
        sequence(window_of(p, chunk.rel_first)),
        low(chunk.last_position - block.position[ROWS - 1]),
        span(block.position[ROWS - 1] - block.position[0]) {
    for (int64_t r = 0; r < ROWS; ++r) shift[r] = block.position[ROWS - 1] - block.position[r];
  }

  // Rows of rel_key for the chunk's keys j .. j + count - 1
  WorkRows<T> rows(int64_t j, int64_t count, int64_t padded, T* copies) const {
    return rows_of(p, sequence, chunk.b, chunk.h, low + j, count + span, padded, copies);
  }
};

// score[r][j] = a_r . row_j, with POSITION + b_r . rel_key_(shift[r] + j); rows of `a` and `b` are `dim` apart, those
// of `score` `stride`
template <typename T, int ROWS, bool POSITION>
static __attribute__((noinline)) void few_scores(const T* a, const T* b, int64_t dim, WorkRows<T> rows,
                                                 WorkRows<T> rel_key, const int64_t* shift, int64_t count, T* score,
                                                 int64_t stride) {
  for (int64_t j = 0; j < count; ++j) {
    const T* const row = rows.row + j * rows.stride;
    const T* rel[ROWS];
    for (int r = 0; POSITION && r < ROWS; ++r) rel[r] = rel_key.row + (shift[r] + j) * rel_key.stride;
    Vec<T> sums[ROWS] = {};
    for (int64_t d = 0; d < dim; d += LANES<T>) {
      __builtin_prefetch(row + ROWS_AHEAD * rows.stride + d);
      if (POSITION) __builtin_prefetch(rel[0] + ROWS_AHEAD * rel_key.stride + d);
      const Vec<T> x = load(row + d);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        sums[r] += load(a + r * dim + d) * x;
        if (POSITION) sums[r] += load(b + r * dim + d) * load(rel[r] + d);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) score[r * stride + j] = sum<T>(sums[r]);
  }
}

// c_r += sum over k of a_r[k] row_k, COLUMNS vectors at a time from `column` on
template <typename T, int ROWS, int COLUMNS>
INLINE void few_rows_tile(const T* a, int64_t a_stride, WorkRows<T> rows, int64_t depth, T* c, int64_t c_stride,
                          int64_t column) {
  Vec<T> sums[ROWS][COLUMNS] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const T* const row = rows.row + k * rows.stride + column;
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < COLUMNS; ++v) sums[r][v] += a[r * a_stride + k] * load(row + v * LANES<T>);
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; ++v) add(c + r * c_stride + column + v * LANES<T>, sums[r][v]);
}

template <typename T, int ROWS>
static __attribute__((noinline)) void few_rows_product(const T* a, int64_t a_stride, WorkRows<T> rows, int64_t width,
                                                       int64_t depth, T* c, int64_t c_stride) {
  int64_t column = 0;
  for (; column + ROW_COLUMNS * LANES<T> <= width; column += ROW_COLUMNS * LANES<T>)
    few_rows_tile<T, ROWS, ROW_COLUMNS>(a, a_stride, rows, depth, c, c_stride, column);
  for (; column < width; column += LANES<T>) few_rows_tile<T, ROWS, 1>(a, a_stride, rows, depth, c, c_stride, column);
}

// False if the output is not finite.
template <typename T, int ROWS>
static bool few_rows_forward(const RelAttention& p, const Sizes<T>& sizes, const RowBlock<T>& block, const Chunk& chunk,
                             const FewRowsScratch<T>& scratch, const RowSequence& values) {
  constexpr int64_t STRIDE = FewRowsScratch<T>::STRIDE;
  const int64_t b = block.b, h = block.h, dim = sizes.padded_dim;
  const RowSequence keys = keys_of(p, p.memory.key, p.keys.key, chunk);
  const FewRowsWindow<T, ROWS> window(p, block, chunk);
  OnlineSoftmax<T> softmax;
  clear(ROWS * dim, scratch.out);

  TileScheduler tiles(p, chunk, scratch.keys.ranks, block.mask, FORWARD_BLOCK_N);
  for (int64_t first, count; tiles.next(first, count);) {
    const FewRowsTile<T> tile(chunk, first, count, scratch.scores, STRIDE);
    for (int64_t j = 0, some; j < count; j += some) {
      some = smaller(FEW_KEYS, count - j);
      few_scores<T, ROWS, true>(block.content_query, block.position_query, dim,
                                rows_of(p, keys, b, h, first + j, some, dim, scratch.key_copies),
                                window.rows(first + j, some, dim, scratch.rel_copies), window.shift, some,
                                scratch.scores + j, STRIDE);
    }
    for (int64_t r = 0; r < ROWS; ++r) {
      const VisibleKeys<T> visible = segments_and_mask(p, scratch.keys, block, r, tile, StoredScores<T>{tile.score[r]});
      softmax.step(r, visible.count, count, visible.max, tile.score[r], scratch.out + r * dim, dim);
      apply_dropout(p, b, h, block.row_index[r], tile.first_key, visible.count, scratch.dropout, tile.score[r]);
    }
    for (int64_t j = 0, some; j < count; j += some) {
      some = smaller(FEW_KEYS, count - j);
      const WorkRows<T> value = rows_of(p, values, b, h, first + j, some, dim, scratch.key_copies);
      few_rows_product<T, ROWS>(scratch.scores + j, STRIDE, value, dim, some, scratch.out, dim);
    }
  }
  store_rows(p, sizes, chunk, scratch.keys.ranks, block, softmax, scratch.out);
  return are_finite(scratch.out, ROWS * dim);
}

template <typename T>
static bool few_rows_forward_as(const RelAttention& p, int64_t threads, Parallel parallel) {
  const Sizes<T> sizes(p, 256);
  Carver measure{nullptr, 0};
  FewRowsScratch<T>(measure, sizes);
  RowBlock<T>(measure, sizes);
  return for_each_chunk(p, sizes, threads, measure.used, parallel, [&](const Chunk& chunk, const Next&, char* memory) {
    Carver carver{memory, 0};
    const FewRowsScratch<T> scratch(carver, sizes);
    RowBlock<T> block(carver, sizes);
    scratch.terms.load(p, chunk.h, sizes.padded_dim);
    scratch.keys.load(p, chunk);
    for (int64_t row = chunk.begin; row < chunk.end; row += block.count) {
      load_queries(p, sizes, scratch.terms, chunk, row, FEW_ROWS, FEW_SPAN, block);
      const auto forward = [&](const RowSequence& sequence) {
        if (block.count == 1) return few_rows_forward<T, 1>(p, sizes, block, chunk, scratch, sequence);
        if (block.count == 2) return few_rows_forward<T, 2>(p, sizes, block, chunk, scratch, sequence);
        if (block.count == 3) return few_rows_forward<T, 3>(p, sizes, block, chunk, scratch, sequence);
        return few_rows_forward<T, 4>(p, sizes, block, chunk, scratch, sequence);
      };
      const RowSequence values = keys_of(p, p.memory.value, p.keys.value, chunk);
      with_unread_as_zeros(values, forward,
                           [&] { return scratch.unread.template find_keys<T>(p, chunk, values, chunk.keys); });
    }
  });
}

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
