// Backward in bfloat16: as backward.h, but for the products. P and dS are rounded, or in parts, once for theirs.
// Gradients that sum over rows are kept transposed, [panel of 16 keys][D][16]: rows of dS are then pairs without being
// transposed.
#pragma once

#include "../backward.h"
#include "../dropout.h"
#include "../ordered_accumulation.h"
#include "../softmax.h"
#include "../sums.h"
#include "../tile_scheduler.h"
#include "../unread.h"
#include "operands.h"
#include "products.h"
#include "scores.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

// P, dS and its band for a tile, in 16 bits: A of products over keys, and the source of products over rows
struct BFloat16Gradients {
  uint16_t *P, *dS, *band;  // rows STRIDE apart, the band's as the tile has them
  uint16_t* pairs;          // one of these three, as pairs across rows
};

// dK, dV and dR of a chunk, and the column sums of dS and of its band, times which the biases are part of dK and dR
struct BFloat16Sums : ParameterSums<float> {
  float *dK, *dV, *dR, *dS_sums, *band_sums;

  void carve(Carver& carver, const BFloat16Sizes& sizes) {
    carver.take(sizes.max_keys * sizes.columns, dK, dV);
    carver.take(sizes.max_window_rows * sizes.columns, dR);
    carver.take(sizes.max_keys, dS_sums);
    carver.take(sizes.max_window_rows, band_sums);
    carve_parameters(carver, sizes.padded_dim);
  }

  void start(const BFloat16Sizes& sizes, int64_t window_rows) const {
    clear(sizes.max_keys * sizes.columns, dK, dV);
    clear(window_rows * sizes.columns, dR);
    clear(sizes.max_keys, dS_sums);
    clear(window_rows, band_sums);
    start_parameters(sizes.padded_dim);
  }

  // Row j of `panels` plus sum[j] * bias, for j from 0 on; add(j, row) for each
  template <typename F>
  static void for_each_row(const float* panels, int64_t count, int64_t columns, const float* sum, const float* bias,
                           float* spare, F add) {
    for (int64_t first = 0; first < count; first += PAIR_COLUMNS, panels += PAIR_COLUMNS * columns) {
      transpose_columns(panels, columns, spare);
      for (int64_t j = first; j < smaller(first + PAIR_COLUMNS, count); ++j) {
        float* row = spare + (j - first) * columns;
        if (bias != nullptr)
          for (int64_t d = 0; d < columns; ++d) row[d] += sum[j] * bias[d];
        add(j, row);
      }
    }
  }

  // [columns][16] -> [16][columns]
  static void transpose_columns(const float* panel, int64_t columns, float* rows) {
    for (int64_t d = 0; d < columns; d += LANES<float>)
      for (int64_t lane = 0; lane < PAIR_COLUMNS; lane += LANES<float>) {
        Vec<float> block[LANES<float>];
        transpose_block(panel + d * PAIR_COLUMNS + lane, PAIR_COLUMNS, block);
        for (int64_t i = 0; i < LANES<float>; ++i) store(rows + (lane + i) * columns + d, block[i]);
      }
  }

  void add_keys(const RelAttentionGradients& g, const Wanted& wanted, const RelAttention& p, const BFloat16Sizes& sizes,
                const Chunk& chunk, const HeadTerms<float>& terms, float* spare) const {
    const auto add = [&](const Tensor4& memory, const Tensor4& current, const float* columns, const float* row_sums,
                         const float* bias, float factor) {
      const KeyGradient gradient{p, chunk, memory, current};
      for_each_row(columns, chunk.keys, sizes.columns, row_sums, bias, spare,
                   [&](int64_t j, const float* row) { gradient.add(j, row, factor); });
      gradient.clear_others<float>();
    };
    const float* bias = p.content_bias == nullptr ? nullptr : terms.content_bias;
    if (wanted.key) add(g.memory.key, g.keys.key, dK, dS_sums, bias, static_cast<float>(p.scale));
    if (wanted.value) add(g.memory.value, g.keys.value, dV, nullptr, nullptr, 1.f);
  }

  // Gradients that sequences share: rel_key and the parameters
  void add_shared(const RelAttentionGradients& g, const Wanted& wanted, const RelAttention& p,
                  const BFloat16Sizes& sizes, const Chunk& chunk, int64_t window_rows, const HeadTerms<float>& terms,
                  float* spare) const {
    const float scale = static_cast<float>(p.scale);
    const float* position_bias = p.position_bias == nullptr ? nullptr : terms.position_bias;
    if (wanted.rel_key) {
      const int64_t count = smaller(window_rows, p.rel_len - chunk.rel_first);
      for_each_row(dR, count, sizes.columns, band_sums, position_bias, spare, [&](int64_t t, const float* row) {
        if (chunk.rel_first + t >= 0) add_row(g.rel_key, chunk.b, chunk.h, chunk.rel_first + t, row, scale, p.head_dim);
      });
    }
    add_parameters(g, p, chunk.h);
  }
};

struct BFloat16BackwardScratch {
  static constexpr int64_t STRIDE = BACKWARD_BLOCK_N + DEPTH_STEP;  // of rows of scores, dP, P and dS
  HeadTerms<float> terms;
  KeyTerms keys;
  Unread unread;
  Operand key, value, rel_key;
  uint16_t *spare, *dO, *dO_columns, *query_columns;
  float *row, *out, *dQ_content, *dQ_position;
  float *scores, *dP, *band, *dropout, *gradient_rows;
  BFloat16Gradients rounded;
  BFloat16Sums sums;

  BFloat16BackwardScratch(Carver& carver, Carver& operands, const BFloat16Sizes& sizes)
      : terms(carver, sizes), keys(carver, sizes), unread(carver, sizes.max_keys, sizes.max_window_rows) {
    const int64_t dim = sizes.padded_dim, band_size = BFloat16Tile::band_elements(BACKWARD_BLOCK_N);
    const auto operand = [&](int64_t rows, bool across) {
      return Operand{operands.take<uint16_t>(rows * dim), across ? operands.take<uint16_t>(rows * dim) : nullptr,
                     carver.take<float>(rows)};
    };
    key = operand(sizes.max_keys, true);
    value = operand(sizes.max_keys, false);
    rel_key = operand(sizes.max_window_rows, true);
    operands.take(PAIR_COLUMNS * dim, spare);
    operands.take(BFLOAT16_ROWS * dim, dO, dO_columns, query_columns);
    carver.take(dim, row, out);
    carver.take(BFLOAT16_ROWS * dim, dQ_content, dQ_position);
    carver.take(BFLOAT16_ROWS * STRIDE, scores, dP);
    carver.take(band_size, band);
    carver.take(dropout_elements(BACKWARD_BLOCK_N), dropout);
    carver.take(PAIR_COLUMNS * dim, gradient_rows);
    operands.take(BFLOAT16_ROWS * STRIDE, rounded.P, rounded.dS);
    operands.take(band_size, rounded.band, rounded.pairs);
    sums.carve(carver, sizes);
  }

  void load(const RelAttention& p, const BFloat16Sizes& sizes, const Chunk& chunk) const {
    const int64_t b = chunk.b, h = chunk.h, dim = sizes.padded_dim, count = sizes.keys(chunk);
    terms.load(p, h, dim);
    keys.load(p, chunk);
    const RowSequence rows = keys_of(p, p.memory.key, p.keys.key, chunk);
    with_unread_as_zeros(
        rows,
        [&](const RowSequence& sequence) {
          return key.load(p, sequence, b, h, count, sizes.max_keys, dim, sizes.to_low,
                          p.content_bias == nullptr ? nullptr : terms.content_bias, spare);
        },
        [&] { return unread.find_keys<float>(p, chunk, rows, count); });
    value.load(p, keys_of(p, p.memory.value, p.keys.value, chunk), b, h, count, sizes.max_keys, dim, sizes.to_low,
               nullptr, spare);
    const int64_t window_rows = sizes.window_rows(p, chunk);
    with_unread_as_zeros(
        window_of(p, chunk.rel_first),
        [&](const RowSequence& sequence) {
          return rel_key.load(p, sequence, b, h, window_rows, sizes.max_window_rows, dim, sizes.to_low,
                              p.position_bias == nullptr ? nullptr : terms.position_bias, spare);
        },
        [&] { return unread.find_rel_rows<float>(p, chunk, 1, window_rows); });
  }
};

// One task, for the functions below
struct BFloat16Task : BackwardTask<float, BFloat16BackwardScratch> {
  const Products& products;
  const BFloat16Sizes& sizes;  // the base's sizes and those of 16-bit operands
};

static void bfloat16_output_gradients(const BFloat16Task& task, const BFloat16Rows& rows,
                                      RowStatistics<float>& statistics) {
  const RelAttention& p = task.p;
  const BFloat16BackwardScratch& scratch = task.scratch;
  const int64_t dim = task.sizes.padded_dim, to_low = task.sizes.to_low,
                head_row = (rows.b * p.heads + rows.h) * p.length;
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t row_index = rows.row_index[r];
    copy_row(p, {{task.g.out, {}}, {p.length, 0}, 0}, rows.b, rows.h, row_index, dim, scratch.dO + r * dim, to_low);
    read_copied(scratch.dO + r * dim, to_low, dim, scratch.row);
    read_unrounded(p, rows.b, rows.h, row_index, dim, scratch.gradient_rows, scratch.out);
    statistics.softmax[r] = SoftmaxRow<float>(p, task.g.lse, head_row + row_index, scratch.out, scratch.row, dim);
    statistics.segments.start(r);
    if (statistics.softmax[r].is_fully_masked()) {  // zero times NaN or infinity would be NaN
      for_each_part(to_low,
                    [&](int64_t part) { clear(dim, scratch.dO + part + r * dim, rows.operand + part + r * dim); });
      clear(dim, rows.segments.query + r * dim);
    }
  }
  for_each_part(to_low, [&](int64_t part) {
    clear((rows.padded() - rows.count) * dim, scratch.dO + part + rows.count * dim);
    for (int64_t r = 0; r < rows.padded(); r += PAIR_COLUMNS) {
      transpose_rows(scratch.dO + part + r * dim, dim, scratch.spare, scratch.dO_columns + part + r, BFLOAT16_ROWS);
      transpose_rows(rows.operand + part + r * dim, dim, scratch.spare, scratch.query_columns + part + r,
                     BFLOAT16_ROWS);
    }
  });
  clear(rows.padded() * dim, scratch.dQ_content, scratch.dQ_position);
}

// Row r of a tile: from scores and dP, rounded, dS, its band and the dropped-out probabilities that dV needs
template <bool TWO_PARTS>
static ROW_LOOP void bfloat16_softmax_backward(const BFloat16Task& task, const BFloat16Rows& rows, int64_t r,
                                               int64_t visible, const BFloat16Tile& tile,
                                               RowStatistics<float>& statistics) {
  const RelAttention& p = task.p;
  const BFloat16BackwardScratch& scratch = task.scratch;
  constexpr int64_t STRIDE = BFloat16BackwardScratch::STRIDE;
  const int64_t to_low = task.sizes.to_low;
  const SoftmaxRow<float> softmax = statistics.softmax[r];
  const SegmentRow<float> segments(p, scratch.keys.segments, tile.first, rows.b, rows.row_index[r],
                                   rows.segments.different[r]);
  float* score = scratch.scores + r * STRIDE;
  const float* dP = scratch.dP + r * STRIDE;
  uint16_t *to_P = scratch.rounded.P + r * STRIDE, *to_dS = scratch.rounded.dS + r * STRIDE;
  uint16_t *band = scratch.rounded.band + r * tile.stride, *to_band = band + tile.shift[r];
  const float* dropout = nullptr;
  if (p.dropout.p > 0 && visible > 0)
    dropout = dropout_factors(p, rows.b, rows.h, rows.row_index[r], tile.first_key, round_up(visible, 2 * LANES<float>),
                              scratch.dropout);
  if (softmax.is_fully_masked()) visible = 0;
  SegmentSums<float> sums;
  int64_t j = 0;
  end_pairs(score, visible);
  for (; j < visible; j += 2 * LANES<float>) {
    PairVec rounded_P[2], rounded_dS[2], low_P[2], low_dS[2];
#pragma GCC unroll 2
    for (int64_t i = 0; i < 2; ++i) {
      const int64_t column = j + i * LANES<float>;
      const Vec<float> s = load(score + column), P = softmax.P(s);
      const Vec<float> kept = dropout == nullptr ? broadcast(1.f) : load(dropout + column);
      const Vec<float> dS = softmax.dS(s, P, kept * load(dP + column));
      rounded_P[i] = round_to_bfloat16(kept * P);
      rounded_dS[i] = round_to_bfloat16(dS);
      if (TWO_PARTS) low_P[i] = low_part(kept * P, rounded_P[i]), low_dS[i] = low_part(dS, rounded_dS[i]);
      if (segments.used) sums.add(segments.differs(column), dS, P);
    }
    store_upper_halves(to_P + j, rounded_P[0], rounded_P[1]);
    store_upper_halves(to_dS + j, rounded_dS[0], rounded_dS[1]);
    store_upper_halves(to_band + j, rounded_dS[0], rounded_dS[1]);
    if (!TWO_PARTS) continue;
    store_upper_halves(to_P + to_low + j, low_P[0], low_P[1]);
    store_upper_halves(to_dS + to_low + j, low_dS[0], low_dS[1]);
    store_upper_halves(to_band + to_low + j, low_dS[0], low_dS[1]);
  }
  for_each_part(to_low, [&](int64_t part) {
    clear(tile.steps - j, to_P + part + j, to_dS + part + j);
    clear(tile.shift[r], band + part);
    clear(tile.width - tile.shift[r] - j, to_band + part + j);
  });
  if (segments.used) statistics.segments.add(r, sums);
}

// dQ += dS . K and band(dS) . R, apart since their sums are the gradients of u and v
static void bfloat16_query_gradients(const BFloat16Task& task, const BFloat16Rows& rows, const BFloat16Tile& tile) {
  const BFloat16BackwardScratch& scratch = task.scratch;
  const BFloat16Sizes& sizes = task.sizes;
  const int64_t dim = sizes.padded_dim;
  task.products.multiply({scratch.rounded.dS, BFloat16BackwardScratch::STRIDE,
                          scratch.key.across + tile.first * PAIR_COLUMNS, sizes.max_keys * PAIR_COLUMNS,
                          scratch.dQ_content, dim, PAIR_COLUMNS, rows.padded(), sizes.columns, tile.steps, nullptr,
                          sizes.to_low});
  for (int64_t r = 0; r < rows.padded(); r += DEPTH_STEP) {
    const int64_t begin = tile.shift[r + DEPTH_STEP - 1] / DEPTH_STEP * DEPTH_STEP;
    const int64_t end = round_up(tile.shift[r] + tile.count, DEPTH_STEP);
    task.products.multiply({scratch.rounded.band + r * tile.stride + begin, tile.stride,
                            scratch.rel_key.across + (tile.window_start + begin) * PAIR_COLUMNS,
                            sizes.max_window_rows * PAIR_COLUMNS, scratch.dQ_position + r * dim, dim, PAIR_COLUMNS,
                            DEPTH_STEP, sizes.columns, end - begin, nullptr, sizes.to_low});
  }
}

// to += columns . rows, the columns being [D][BFLOAT16_ROWS]; `to` is [panel of 16 columns][D][16]
static void bfloat16_sum_over_rows(const BFloat16Task& task, int64_t count, const uint16_t* columns,
                                   const uint16_t* rows, int64_t stride, int64_t width, float* to, float* row_sums) {
  const int64_t panel = count * PAIR_COLUMNS, dim = task.sizes.columns, to_low = task.sizes.to_low;
  for_each_part(to_low, [&](int64_t part) {
    pair_across_rows(rows + part, stride, count, width, task.scratch.rounded.pairs + part, panel, row_sums);
  });
  task.products.multiply({columns, BFLOAT16_ROWS, task.scratch.rounded.pairs, panel, to, PAIR_COLUMNS,
                          dim * PAIR_COLUMNS, dim, width, count, nullptr, to_low});
}

// dK^T += Q^T . dS, dV^T += dO^T . P, dR^T += Q^T . band
static void bfloat16_shared_gradients(const BFloat16Task& task, const BFloat16Rows& rows, const BFloat16Tile& tile) {
  const BFloat16BackwardScratch& scratch = task.scratch;
  const BFloat16Sums& sums = scratch.sums;
  constexpr int64_t STRIDE = BFloat16BackwardScratch::STRIDE;
  const int64_t count = rows.padded(), dim = task.sizes.columns;
  if (task.wanted.key)
    bfloat16_sum_over_rows(task, count, scratch.query_columns, scratch.rounded.dS, STRIDE, tile.steps,
                           sums.dK + tile.first * dim,
                           task.p.content_bias == nullptr ? nullptr : sums.dS_sums + tile.first);
  if (task.wanted.value)
    bfloat16_sum_over_rows(task, count, scratch.dO_columns, scratch.rounded.P, STRIDE, tile.steps,
                           sums.dV + tile.first * dim, nullptr);
  if (task.wanted.rel_key)
    bfloat16_sum_over_rows(task, count, scratch.query_columns, scratch.rounded.band, tile.stride, tile.width,
                           sums.dR + tile.window_start * dim,
                           task.p.position_bias == nullptr ? nullptr : sums.band_sums + tile.window_start);
}

template <bool TWO_PARTS>
static void bfloat16_backward_block(const BFloat16Task& task, const BFloat16Rows& rows) {
  const RelAttention& p = task.p;
  const BFloat16Sizes& sizes = task.sizes;
  const BFloat16BackwardScratch& scratch = task.scratch;
  constexpr int64_t STRIDE = BFloat16BackwardScratch::STRIDE;
  const int64_t dim = sizes.padded_dim, padding = rows.padded() - rows.count;
  RowStatistics<float> statistics;
  bfloat16_output_gradients(task, rows, statistics);
  const BFloat16Gradients& rounded = scratch.rounded;
  for_each_part(sizes.to_low, [&](int64_t part) {
    clear(padding * STRIDE, rounded.P + part + rows.count * STRIDE, rounded.dS + part + rows.count * STRIDE);
  });

  TileScheduler tiles(p, task.chunk, scratch.keys.ranks, rows.mask, BACKWARD_BLOCK_N);
  for (int64_t first, count; tiles.next(first, count);) {
    const BFloat16Tile tile(rows, task.chunk, first, count);
    bfloat16_scores(task.products, sizes, rows, tile, scratch.key, scratch.rel_key, scratch.band, scratch.scores,
                    STRIDE);
    task.products.multiply({scratch.dO, dim, scratch.value.along + first * dim, PAIR_COLUMNS * dim, scratch.dP, STRIDE,
                            PAIR_COLUMNS, rows.padded(), round_up(count, PAIR_COLUMNS), dim,
                            scratch.value.offsets + first, sizes.to_low});
    for (int64_t r = 0; r < rows.count; ++r) {
      if (first == 0) prefetch_next(p, task.next, rows.row_index[r], task.g.out);
      const VisibleKeys<float> visible =
          bfloat16_segments_and_mask(p, scratch.keys, rows, r, tile, scratch.band, scratch.scores + r * STRIDE);
      bfloat16_softmax_backward<TWO_PARTS>(task, rows, r, visible.count, tile, statistics);
    }
    for_each_part(sizes.to_low,
                  [&](int64_t part) { clear(padding * tile.stride, rounded.band + part + rows.count * tile.stride); });
    if (task.wanted.query) bfloat16_query_gradients(task, rows, tile);
    bfloat16_shared_gradients(task, rows, tile);
  }
  store_rows(task, rows, statistics);
}

static bool bfloat16_backward(const RelAttention& p, const RelAttentionGradients& g, const Products& products,
                              int64_t threads, Parallel parallel) {
  BFloat16Sizes sizes(p, 512);
  const Sizes<float>& base = sizes;
  const Wanted wanted(g);
  Carver measure{nullptr, 0}, measure_operands{nullptr, 0};
  BFloat16BackwardScratch(measure, measure_operands, sizes);
  BFloat16Rows(measure, measure_operands, sizes);
  sizes.place(p, measure_operands.used);
  const OrderedAccumulation order(p.heads);
  if (order.next_ticket == nullptr) return false;
  const auto run = [&](const Chunk& chunk, const Next& next, char* memory) {
    Carver operands{memory, 0}, carver{memory, sizes.operand_bytes};
    const BFloat16BackwardScratch scratch(carver, operands, sizes);
    BFloat16Rows rows(carver, operands, sizes);
    const int64_t window_rows = sizes.window_rows(p, chunk);
    scratch.load(p, sizes, chunk);
    scratch.sums.start(sizes, window_rows);
    TileState state;
    products.enter(&state);
    for (int64_t row = chunk.begin; row < chunk.end; row += rows.count) {
      rows.load(p, sizes, scratch.terms, chunk, row);
      const auto block = sizes.to_low != 0 ? bfloat16_backward_block<true> : bfloat16_backward_block<false>;
      block({{p, g, wanted, base, chunk, scratch, next}, products, sizes}, rows);
    }
    products.leave(&state);
    const int64_t ticket = chunk.index * p.batch + chunk.b;
    const auto add_keys = [&] {
      scratch.sums.add_keys(g, wanted, p, sizes, chunk, scratch.terms, scratch.gradient_rows);
    };
    if (chunk.index == 0) add_keys();  // the first that has them needs no order
    order.wait(chunk.h, ticket);
    if (chunk.index > 0) add_keys();
    scratch.sums.add_shared(g, wanted, p, sizes, chunk, window_rows, scratch.terms, scratch.gradient_rows);
    order.pass(chunk.h, ticket);
  };
  return for_each_chunk(p, base, threads, sizes.operand_bytes + measure.used, parallel, run);
}

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
