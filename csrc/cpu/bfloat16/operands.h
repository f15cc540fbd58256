// Operands of 16-bit products: rows padded with zeros, and pairs of their numbers, side by side as Product::b has them.
// Pairs lie along head_dim where a product sums over head_dim, along the rows where it sums over rows. Rows of float32
// are rounded to bfloat16; biases are not, because they come in as a row that products start with.
//
// In two parts, an operand of float32 is the sum of two bfloat16 numbers. The high part is x rounded, the low part the
// rest, rounded. A low part is `to_low` numbers behind its high part, for all operands of a task. `to_low` is 0 where
// operands have one part.
#pragma once

#include "../pack.h"
#include "pairs.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

// f(0), and f(to_low) where operands have two parts
template <typename F>
INLINE void for_each_part(int64_t to_low, F f) {
  f(int64_t(0));
  if (to_low != 0) f(to_low);
}

INLINE void copy_numbers(const uint16_t* from, int64_t stride, int64_t count, uint16_t* to, int64_t) {
  if (stride == 1)
    memcpy(to, from, static_cast<size_t>(count) * 2);
  else
    for (int64_t d = 0; d < count; ++d) to[d] = from[d * stride];
}

// Rounds numbers or takes them apart. Writes whole vectors, zeros past `count`. Infinity in parts is infinity and NaN.
INLINE void copy_numbers(const float* from, int64_t stride, int64_t count, uint16_t* to, int64_t to_low) {
  constexpr int64_t STEP = 2 * LANES<float>;
  for (int64_t d = 0; d < count; d += STEP) {
    float few[STEP] = {};
    const bool whole = stride == 1 && d + STEP <= count;
    for (int64_t i = 0; !whole && i < smaller(STEP, count - d); ++i) few[i] = from[(d + i) * stride];
    PairVec rounded[2], low[2];
#pragma GCC unroll 2
    for (int64_t i = 0; i < 2; ++i) {
      const Vec<float> x = load((whole ? from + d : few) + i * LANES<float>);
      rounded[i] = x == x ? round_to_bfloat16(x) : (PairVec)x | 0x00400000u;
      low[i] = low_part(x, rounded[i]);
    }
    store_upper_halves(to + d, rounded[0], rounded[1]);
    if (to_low != 0) store_upper_halves(to + to_low + d, low[0], low[1]);
  }
}

// Row j of a sequence in bfloat16, padded with zeros
static void copy_row(const RelAttention& p, const RowSequence& sequence, int64_t b, int64_t h, int64_t j, int64_t dim,
                     uint16_t* to, int64_t to_low) {
  int64_t row, left;
  const Tensor4* tensor = sequence.find(j, row, left);
  for_each_part(to_low, [&](int64_t part) { clear(dim, to + part); });
  if (tensor == nullptr) return;
  const int64_t start = row_start(*tensor, b, h, row), stride = tensor->stride[3];
  if (p.dtype == DType::float32)
    copy_numbers(static_cast<const float*>(tensor->data) + start, stride, p.head_dim, to, to_low);
  else
    copy_numbers(static_cast<const uint16_t*>(tensor->data) + start, stride, p.head_dim, to, to_low);
}

// A row that was copied, as float32
static void read_copied(const uint16_t* row, int64_t to_low, int64_t dim, float* to) {
  const auto* parts = reinterpret_cast<const BFloat16*>(row);
  read_as(parts, dim, to);
  for (int64_t d = 0; to_low != 0 && d < dim; ++d) to[d] += to_work(parts[to_low + d]);
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

// products += bias . row for the 16 rows of a panel
static void add_dot_products(const uint16_t* panel, const float* bias, int64_t dim, float* products) {
  for (int64_t lane = 0; lane < PAIR_COLUMNS; lane += LANES<float>) {
    Vec<float> sum = load(products + lane);
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
            int64_t dim, int64_t to_low, const float* bias, uint16_t* spare) const {
    bool finite = true;
    if (offsets != nullptr) clear(count, offsets);
    for (int64_t j = 0; j < count; j += PAIR_COLUMNS) {
      for (int64_t i = 0; i < PAIR_COLUMNS; ++i) {
        copy_row(p, sequence, b, h, j + i, dim, spare + i * dim, to_low);
        prefetch_row(p, sequence, b, h, j + i + 2 * PAIR_COLUMNS, bytes_of(p.dtype));
      }
      for_each_part(to_low, [&](int64_t part) {
        if (along != nullptr) pair_along_row(spare + part, dim, dim, along + part + j * dim);
        if (bias != nullptr) add_dot_products(along + part + j * dim, bias, dim, offsets + j);
        if (across != nullptr)
          pair_across_rows(spare + part, dim, PAIR_COLUMNS, dim, across + part + j * PAIR_COLUMNS,
                           capacity * PAIR_COLUMNS, nullptr);
      });
      if (across != nullptr) finite = are_finite(spare, PAIR_COLUMNS * dim) && finite;
    }
    return finite;
  }
};

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
