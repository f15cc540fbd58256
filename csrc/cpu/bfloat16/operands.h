// Operands of 16-bit products: rows as they are stored, padded with zeros, and pairs of their numbers, side by side as
// Product::b has them. Pairs lie along head_dim where a product sums over head_dim, along the rows where it sums over
// rows. An operand is never rounded here: biases come in as a row that products start with.

constexpr int64_t PAIR_COLUMNS = 16;  // columns of a panel of pairs
constexpr int64_t DEPTH_STEP = 32;    // products' depth is whole steps

typedef uint32_t PairVec __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t HalfVec __attribute__((vector_size(VECTOR_BYTES / 2)));

INLINE PairVec load_pairs(const uint16_t* p) {
  typedef uint32_t loose __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
  return *reinterpret_cast<const loose*>(p);
}
INLINE void store_pairs(uint16_t* p, PairVec x) {
  typedef uint32_t loose __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
  *reinterpret_cast<loose*>(p) = x;
}

typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES)));
template <int64_t FIRST, int64_t... LANE>
Indices<(2 * LANE + FIRST)...> every_second(Indices<LANE...>);
using HalfLanes = UpTo<VECTOR_BYTES / 2>;

// LANES numbers, one in the low half of each lane. Vectors of 8 bytes are widened and narrowed by shuffles: GCC takes
// their conversion apart.
INLINE PairVec load_halves(const uint16_t* p) {
  if constexpr (VECTOR_BYTES == 16) {
    uint64_t four;
    memcpy(&four, p, 8);
    typedef uint64_t Two __attribute__((vector_size(VECTOR_BYTES)));
    return (PairVec)shuffle((Halves)Two{four, 0}, Halves{}, decltype(interleaved<0>(HalfLanes()))());
  } else {
    typedef uint16_t loose __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const loose*>(p), PairVec);
  }
}
INLINE void store_halves(uint16_t* p, PairVec x) {
  typedef uint16_t loose __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
  if constexpr (VECTOR_BYTES == 16) {
    const Halves low = shuffle((Halves)x, (Halves)x, decltype(every_second<0>(HalfLanes()))());
    memcpy(p, &low, 8);
  } else {
    *reinterpret_cast<loose*>(p) = __builtin_convertvector(x, HalfVec);
  }
}

// The upper halves of the lanes of two vectors, one after the other
INLINE void store_upper_halves(uint16_t* p, PairVec first, PairVec second) {
  typedef uint16_t loose __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
  *reinterpret_cast<loose*>(p) = shuffle((Halves)first, (Halves)second, decltype(every_second<1>(HalfLanes()))());
}

// Makes what follows the `visible` scores -inf, as far as a second vector beside the last one reaches.
INLINE void end_pairs(float* score, int64_t visible) {
  const int64_t whole = round_up(visible, LANES<float>);
  if (whole % (2 * LANES<float>) != 0) store(score + whole, broadcast(-static_cast<float>(INFINITY)));
}

// x rounded to bfloat16, to the nearest, in the upper half of each lane; the lower half is anything. Ties, one number
// in 65536, go away from zero. NaN stays NaN unless its upper bits are all set, which no arithmetic makes.
INLINE PairVec round_to_bfloat16(Vec<float> x) { return (PairVec)x + 0x8000u; }

#include "emulated.h"

// Row j of a sequence, as stored and padded with zeros
static void copy_row(const RelAttention& p, const RowSequence& sequence, int64_t b, int64_t h, int64_t j, int64_t dim,
                     uint16_t* to) {
  int64_t row, left;
  const Tensor4* tensor = sequence.find(j, row, left);
  clear(dim, to);
  if (tensor == nullptr) return;
  const uint16_t* from = static_cast<const uint16_t*>(tensor->data) + row_start(*tensor, b, h, row);
  if (tensor->stride[3] == 1) {
    memcpy(to, from, static_cast<size_t>(p.head_dim) * 2);
  } else {
    for (int64_t d = 0; d < p.head_dim; ++d) to[d] = from[d * tensor->stride[3]];
  }
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
        prefetch_row(p, sequence, b, h, j + i + 2 * PAIR_COLUMNS, sizeof(uint16_t));
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
