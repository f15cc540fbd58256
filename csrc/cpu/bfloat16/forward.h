// Forward in bfloat16: as forward.h, but for the products, whose operands stay in 16 bits. Between
// products only the probabilities are rounded; the output is divided by the sum of the rounded ones, since it is a
// mean.
#pragma once

#include "../dropout.h"
#include "../forward.h"
#include "../softmax.h"
#include "../tile_scheduler.h"
#include "../unread.h"
#include "operands.h"
#include "products.h"
#include "scores.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

struct BFloat16Softmax : OnlineSoftmax<float> {
  float rounded_sum[MAX_ROWS] = {};
  float kept_scale;  // dropout's factor of kept probabilities

  explicit BFloat16Softmax(const RelAttention& p) : kept_scale(static_cast<float>(p.dropout.kept_scale)) {}

  // As OnlineSoftmax, but probabilities go to `P`, rounded, and zeros as far as `count`. `kept`: dropout's factors, of
  // which only zeros count here, or null.
  template <bool TWO_PARTS>
  ROW_LOOP void step(int64_t r, int64_t visible, int64_t count, float tile_max, float* score, const float* kept,
                     uint16_t* P, int64_t to_low, float* out, int64_t dim) {
    float factor;
    visible = take_max(r, visible, tile_max, score, out, dim, factor);
    const float max = row_max[r];
    Vec<float> sums{}, rounded_sums{};
    int64_t j = 0;
    end_pairs(score, visible);
    for (; j < visible; j += 2 * LANES<float>) {
      PairVec rounded[2], low[2];
#pragma GCC unroll 2
      for (int64_t i = 0; i < 2; ++i) {
        const Vec<float> exact = exp2(load(score + j + i * LANES<float>) - max);
        rounded[i] = round_to_bfloat16(exact);
        sums += exact;
        rounded_sums += second_of(rounded[i]);
        if (TWO_PARTS) rounded_sums += second_of(low[i] = low_part(exact, rounded[i]));
        if (kept == nullptr) continue;
        const auto stays = load(kept + j + i * LANES<float>) != 0;
        rounded[i] = stays ? rounded[i] : PairVec{};
        if (TWO_PARTS) low[i] = stays ? low[i] : PairVec{};
      }
      store_upper_halves(P + j, rounded[0], rounded[1]);
      if (TWO_PARTS) store_upper_halves(P + to_low + j, low[0], low[1]);
    }
    row_sum[r] += sum<float>(sums);
    rounded_sum[r] = rounded_sum[r] * factor + sum<float>(rounded_sums);
    clear(count - j, P + j);
    if (TWO_PARTS) clear(count - j, P + to_low + j);
  }

  void normalize(int64_t r, float* out, int64_t dim) const {
    if (row_sum[r] == 0) return clear(dim, out);
    const float weights = row_sum[r] == row_sum[r] ? rounded_sum[r] : row_sum[r];
    const float factor = kept_scale / weights;
    for (int64_t d = 0; d < dim; d += LANES<float>) store(out + d, load(out + d) * factor);
  }
};

struct BFloat16ForwardScratch {
  static constexpr int64_t STRIDE = FORWARD_BLOCK_N + DEPTH_STEP;
  HeadTerms<float> terms;
  KeyTerms keys;
  Unread unread;
  Operand key, value, rel_key;
  uint16_t *spare, *P;
  float *out, *scores, *band, *dropout;

  BFloat16ForwardScratch(Carver& carver, Carver& operands, const BFloat16Sizes& sizes)
      : terms(carver, sizes), keys(carver, sizes), unread(carver, sizes.max_keys, 0) {
    const int64_t dim = sizes.padded_dim;
    key = {operands.take<uint16_t>(sizes.max_keys * dim), nullptr, carver.take<float>(sizes.max_keys)};
    value = {nullptr, operands.take<uint16_t>(sizes.max_keys * dim), nullptr};
    rel_key = {operands.take<uint16_t>(sizes.max_window_rows * dim), nullptr,
               carver.take<float>(sizes.max_window_rows)};
    operands.take(PAIR_COLUMNS * dim, spare);
    operands.take(BFLOAT16_ROWS * STRIDE, P);
    carver.take(BFLOAT16_ROWS * dim, out);
    carver.take(BFLOAT16_ROWS * STRIDE, scores);
    carver.take(BFloat16Tile::band_elements(FORWARD_BLOCK_N), band);
    carver.take(dropout_elements(FORWARD_BLOCK_N), dropout);
  }

  void load(const RelAttention& p, const BFloat16Sizes& sizes, const Chunk& chunk) const {
    const int64_t b = chunk.b, h = chunk.h, dim = sizes.padded_dim, count = sizes.keys(chunk);
    terms.load(p, h, dim);
    keys.load(p, chunk);
    key.load(p, keys_of(p, p.memory.key, p.keys.key, chunk), b, h, count, sizes.max_keys, dim, sizes.to_low,
             p.content_bias == nullptr ? nullptr : terms.content_bias, spare);
    const RowSequence values = keys_of(p, p.memory.value, p.keys.value, chunk);
    with_unread_as_zeros(
        values,
        [&](const RowSequence& sequence) {
          return value.load(p, sequence, b, h, count, sizes.max_keys, dim, sizes.to_low, nullptr, spare);
        },
        [&] { return unread.find_keys<float>(p, chunk, values, count); });
    rel_key.load(p, window_of(p, chunk.rel_first), b, h, sizes.window_rows(p, chunk), sizes.max_window_rows, dim,
                 sizes.to_low, p.position_bias == nullptr ? nullptr : terms.position_bias, spare);
  }
};

template <bool TWO_PARTS>
static void bfloat16_forward_block(const RelAttention& p, const Products& products, const BFloat16Sizes& sizes,
                                   const BFloat16Rows& rows, const Chunk& chunk, const BFloat16ForwardScratch& scratch,
                                   const Next& next) {
  constexpr int64_t STRIDE = BFloat16ForwardScratch::STRIDE;
  const int64_t dim = sizes.padded_dim;
  BFloat16Softmax softmax(p);
  clear(rows.padded() * dim, scratch.out);
  for_each_part(sizes.to_low, [&](int64_t part) {
    clear((rows.padded() - rows.count) * STRIDE, scratch.P + part + rows.count * STRIDE);
  });

  TileScheduler tiles(p, chunk, scratch.keys.ranks, rows.mask, FORWARD_BLOCK_N);
  for (int64_t first, count; tiles.next(first, count);) {
    const BFloat16Tile tile(rows, chunk, first, count);
    bfloat16_scores(products, sizes, rows, tile, scratch.key, scratch.rel_key, scratch.band, scratch.scores, STRIDE);
    for (int64_t r = 0; r < rows.count; ++r) {
      float* score = scratch.scores + r * STRIDE;
      if (first == 0) prefetch_next(p, next, rows.row_index[r]);
      const VisibleKeys<float> visible =
          bfloat16_segments_and_mask(p, scratch.keys, rows, r, tile, scratch.band, score);
      const float* kept = nullptr;
      if (p.dropout.p > 0 && visible.count > 0)
        kept = dropout_factors(p, rows.b, rows.h, rows.row_index[r], tile.first_key,
                               round_up(visible.count, 2 * LANES<float>), scratch.dropout);
      softmax.step<TWO_PARTS>(r, visible.count, tile.steps, visible.max, score, kept, scratch.P + r * STRIDE,
                              sizes.to_low, scratch.out + r * dim, dim);
    }
    products.multiply({scratch.P, STRIDE, scratch.value.across + first * PAIR_COLUMNS, sizes.max_keys * PAIR_COLUMNS,
                       scratch.out, dim, PAIR_COLUMNS, rows.padded(), sizes.columns, tile.steps, nullptr,
                       sizes.to_low});
  }
  store_rows<float>(p, sizes, chunk, scratch.keys.ranks, rows, softmax, scratch.out);
}

static bool bfloat16_forward(const RelAttention& p, const Products& products, int64_t threads, Parallel parallel) {
  BFloat16Sizes sizes(p, 256);
  Carver measure{nullptr, 0}, measure_operands{nullptr, 0};
  BFloat16ForwardScratch(measure, measure_operands, sizes);
  BFloat16Rows(measure, measure_operands, sizes);
  sizes.place(p, measure_operands.used);
  const Sizes<float>& base = sizes;
  const auto run = [&](const Chunk& chunk, const Next& next, char* memory) {
    Carver operands{memory, 0}, carver{memory, sizes.operand_bytes};
    const BFloat16ForwardScratch scratch(carver, operands, sizes);
    BFloat16Rows rows(carver, operands, sizes);
    scratch.load(p, sizes, chunk);
    TileState state;
    products.enter(&state);
    for (int64_t row = chunk.begin; row < chunk.end; row += rows.count) {
      rows.load(p, sizes, scratch.terms, chunk, row);
      const auto block = sizes.to_low != 0 ? bfloat16_forward_block<true> : bfloat16_forward_block<false>;
      block(p, products, sizes, rows, chunk, scratch, next);
    }
    products.leave(&state);
  };
  return for_each_chunk(p, base, threads, sizes.operand_bytes + measure.used, parallel, run);
}

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
