// Operands of 16-bit products: rows padded with zeros, and pairs of their numbers, side by side as Product::b has them.
// Pairs lie along head_dim where a product sums over head_dim, along the rows where it sums over rows. Rows of float32
// are rounded to bfloat16; biases are not, because they come in as a row that products start with.
#pragma once

#include <type_traits>

#include "../pack.h"
#include "pairs.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

// `count` numbers to bfloat16, as stored or rounded to the nearest
template <typename S>
INLINE void to_bfloat16(const S* from, int64_t stride, int64_t count, uint16_t* to) {
  if constexpr (std::is_same_v<S, float>) {
    for (int64_t d = 0; d < count; ++d) from_work(from[d * stride], reinterpret_cast<BFloat16*>(to) + d);
  } else if (stride == 1) {
    memcpy(to, from, static_cast<size_t>(count) * 2);
  } else {
    for (int64_t d = 0; d < count; ++d) to[d] = from[d * stride];
  }
}

// Row j of a sequence in bfloat16, padded with zeros
static void copy_row(const RelAttention& p, const RowSequence& sequence, int64_t b, int64_t h, int64_t j, int64_t dim,
                     uint16_t* to) {
  int64_t row, left;
  const Tensor4* tensor = sequence.find(j, row, left);
  clear(dim, to);
  if (tensor == nullptr) return;
  const int64_t start = row_start(*tensor, b, h, row), stride = tensor->stride[3];
  if (p.dtype == DType::float32)
    to_bfloat16(static_cast<const float*>(tensor->data) + start, stride, p.head_dim, to);
  else
    to_bfloat16(static_cast<const uint16_t*>(tensor->data) + start, stride, p.head_dim, to);
}

// 16 rows, whole steps long -> one panel of pairs along the row, [dim / 2][16][2]
static void pair_along_row(const uint16_t* rows, int64_t stride, int64_t dim, uint16_t* panel) {
  for (int64_t lane = 0; lane < PAIR_COLUMNS; lane += LANES<float>)
    for (int64_t d = 0; d < dim; d += 2 * LANES<float>) {
      Vec<float> block[LANES<float>];  // bits, which are only moved
      transpose_block(reinterpret_cast<const float*>(rows + lane * stride + d), stride / 2, block);
      for (int64_t i = 0; i < LANES<float>; ++i)
        store_pairs(panel + ((d / 2 + i) * PAIR_COLUMNS + lane) * 2, (PairVec)block[i]);
    }
}

// bias . row for the 16 rows of a panel
static void dot_products(const uint16_t* panel, const float* bias, int64_t dim, float* products) {
  for (int64_t lane = 0; lane < PAIR_COLUMNS; lane += LANES<float>) {
    Vec<float> sum{};
    for (int64_t d = 0; d < dim; d += 2) {
      const PairVec pairs = load_pairs(panel + d * PAIR_COLUMNS + 2 * lane);
      sum += bias[d] * first_of(pairs) + bias[d + 1] * second_of(pairs);
    }
    store(products + lane, sum);
  }
}

// `count` rows -> pairs across rows, [count / 2][16][2] for every 16 columns, panels `panel` apart; adds the columns'
// sums to `sums` unless it is null.
static void pair_across_rows(const uint16_t* rows, int64_t stride, int64_t count, int64_t columns, uint16_t* to,
                             int64_t panel, float* sums) {
  for (int64_t c = 0; c < columns; c += LANES<float>) {
    uint16_t* pairs = to + c / PAIR_COLUMNS * panel + c % PAIR_COLUMNS * 2;
    Vec<float> sum{};
    for (int64_t r = 0; r < count; r += 2, pairs += 2 * PAIR_COLUMNS) {
      const uint16_t* from = rows + r * stride + c;
      const PairVec pair = load_halves(from) | (load_halves(from + stride) << 16);
      store_pairs(pairs, pair);
      if (sums != nullptr) sum += first_of(pair) + second_of(pair);
    }
    if (sums != nullptr) store(sums + c, load(sums + c) + sum);
  }
}

// 16 rows -> columns [dim][stride_to], by way of a panel
static void transpose_rows(const uint16_t* rows, int64_t dim, uint16_t* panel, uint16_t* to, int64_t stride_to) {
  pair_along_row(rows, dim, dim, panel);
  for (int64_t d = 0; d < dim; d += 2)
    for (int64_t lane = 0; lane < PAIR_COLUMNS; lane += LANES<float>) {
      const PairVec pairs = load_pairs(panel + d * PAIR_COLUMNS + 2 * lane);
      store_halves(to + d * stride_to + lane, pairs);
      store_halves(to + (d + 1) * stride_to + lane, pairs >> 16);
    }
}

// Whether all of `count` numbers, whole vectors of pairs, are finite: zero times any other is NaN
INLINE bool are_finite(const uint16_t* x, int64_t count) {
  Vec<float> first{}, second{};
  for (int64_t i = 0; i < count; i += 2 * LANES<float>) {
    const PairVec pairs = load_pairs(x + i);
    first += first_of(pairs) * 0.f;
    second += second_of(pairs) * 0.f;
  }
  return sum<float>(first + second) == 0;
}

// The rows of a sequence as operands: panels of pairs along head_dim, with bias . row, and pairs across the rows
struct Operand {
  uint16_t *along, *across;  // null: not wanted
  float* offsets;            // bias . row; zeros without a bias

  // False if pairs across rows are wanted, and a row is not finite.
  bool load(const RelAttention& p, const RowSequence& sequence, int64_t b, int64_t h, int64_t count, int64_t capacity,
            int64_t dim, const float* bias, uint16_t* spare) const {
    bool finite = true;
    for (int64_t j = 0; j < count; j += PAIR_COLUMNS) {
      for (int64_t i = 0; i < PAIR_COLUMNS; ++i) {
        copy_row(p, sequence, b, h, j + i, dim, spare + i * dim);
        prefetch_row(p, sequence, b, h, j + i + 2 * PAIR_COLUMNS, bytes_of(p.dtype));
      }
      if (along != nullptr) pair_along_row(spare, dim, dim, along + j * dim);
      if (bias != nullptr) dot_products(along + j * dim, bias, dim, offsets + j);
      if (across != nullptr) {
        pair_across_rows(spare, dim, PAIR_COLUMNS, dim, across + j * PAIR_COLUMNS, capacity * PAIR_COLUMNS, nullptr);
        finite = are_finite(spare, PAIR_COLUMNS * dim) && finite;
      }
    }
    if (offsets != nullptr && bias == nullptr) clear(count, offsets);
    return finite;
  }
};

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
