// Tiles in shared memory, fragments of the matrix instruction, products of 16 rows.
#pragma once

#include <primitives.cuh>
#include <type_traits>

#include "block_order.h"
#include "tile_sizes.h"

namespace xlnet_kernels::cuda {

// Elements of one type in 16 bytes, and the depth of one matrix instruction.
template <typename T>
constexpr int CHUNK = 16 / sizeof(T);
template <typename T>
constexpr int DEPTH = 2 * CHUNK<T>;

constexpr int WARP = 32;

// A number that is the same in all lanes of a warp, from lane 0: the compiler then knows that it is, keeps what depends
// on it in uniform registers, and has no code for a warp that a branch on it would part.
template <typename T>
DEVICE T uniform(T x) {
  return shuffle(x, 0);
}

// A thread as the matrix instruction has it: it holds row g, and g + 8, of what a warp multiplies, in columns by t.
struct Lane {
  int id, warp, g, t;
};
DEVICE Lane this_lane() {
  const int id = thread_index() % WARP;
  return {id, uniform(thread_index() / WARP), id / 4, id % 4};
}

// The work of the block with this number, the same for all lanes.
DEVICE BlockItem item_of(const BlockOrder& order, int number) {
  const BlockItem item = order.item(number);
  return {uniform(item.tile), uniform(item.b), uniform(item.h)};
}

// This block's; found anew by each who asks, because numbers that the main loop does not need would take its registers.
DEVICE BlockItem own_item(const BlockOrder& order) {
  return item_of(order, int(kept_in_register(block_index().x)));
}

DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }

// Rows of COLUMNS elements, 16 bytes apart, so that eight rows' chunks fall into different banks. ROWS > 0: a ring,
// whose rows may have any number.
template <typename T, int COLUMNS, int ROWS = 0>
struct Tile {
  static constexpr int STRIDE = COLUMNS + CHUNK<T>;
  T* data;

  static_assert(tile_stride(COLUMNS * sizeof(T)) == STRIDE * sizeof(T));
  DEVICE static int place(int row) {
    if constexpr (ROWS == 0) return row;
    constexpr uint32_t SIZE = ROWS ? ROWS : 1, WRAPS = (1u << 31) / SIZE;  // rows before row 0 have places, too
    return int((uint32_t(row) + WRAPS * SIZE) % SIZE);
  }
  DEVICE T* at(int row, int column) const { return data + place(row) * STRIDE + column; }
};

// One lane's part of a 16 x DEPTH matrix a, or of two b of DEPTH x 8, as mma takes them.
struct Fragment {
  uint32_t word[4];
};

// a(m, k) = tile(row + m, column + k)
template <typename T, int C, int R>
DEVICE Fragment load_a(const Tile<T, C, R>& tile, int row, int column, int lane) {
  Fragment a;
  ldmatrix(a.word, tile.at(row + lane % 16, column + lane / 16 * CHUNK<T>));
  return a;
}

// a(m, k) = tile(row + k, column + m)
template <typename T, int C, int R>
DEVICE Fragment load_a_transposed(const Tile<T, C, R>& tile, int row, int column, int lane) {
  Fragment a;
  if constexpr (sizeof(T) == 2) {
    ldmatrix_transposed(a.word, tile.at(row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8));
  } else {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) a.word[i] = bits_of(*tile.at(row + t + i / 2 * 4, column + g + i % 2 * 8));
  }
  return a;
}

// b(k, n) = tile(row + n, column + k), for n < 8 in words 0 and 1, from there on in words 2 and 3
template <typename T, int C, int R>
DEVICE Fragment load_b(const Tile<T, C, R>& tile, int row, int column, int lane) {
  Fragment b;
  ldmatrix(b.word, tile.at(row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * CHUNK<T>));
  return b;
}

// b(k, n) = tile(row + k, column + n). PAIRED: in the order of k that scores in registers have as a fragment.
template <bool PAIRED = false, typename T, int C, int R>
DEVICE Fragment load_b_transposed(const Tile<T, C, R>& tile, int row, int column, int lane) {
  Fragment b;
  if constexpr (sizeof(T) == 2) {
    ldmatrix_transposed(b.word, tile.at(row + lane % 16, column + lane / 16 * 8));
  } else {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = PAIRED ? 2 * t + i % 2 : t + i % 2 * 4;
      b.word[i] = bits_of(*tile.at(row + k, column + g + i / 2 * 8));
    }
  }
  return b;
}

// sum += a and the first or second half of b. float: with float32's error, unless `tf32` allows more.
template <typename T>
DEVICE void multiply(float (&sum)[4], const Fragment& a, const Fragment& b, int half, bool tf32) {
  const uint32_t right[2] = {b.word[2 * half], b.word[2 * half + 1]};
  if constexpr (sizeof(T) == 2) {
    mma<T>(sum, a.word, right);
  } else {
    uint32_t high_a[4], high_b[2], low_a[4], low_b[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) high_a[i] = round_to_tf32(float_of(a.word[i]));
#pragma unroll
    for (int i = 0; i < 2; ++i) high_b[i] = round_to_tf32(float_of(right[i]));
    if (tf32) {
      mma<T>(sum, high_a, high_b);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) low_a[i] = round_to_tf32(float_of(a.word[i]) - float_of(high_a[i]));
#pragma unroll
      for (int i = 0; i < 2; ++i) low_b[i] = round_to_tf32(float_of(right[i]) - float_of(high_b[i]));
      // summed from zero, since mma truncates where it adds: to a long sum a float addition adds without a bias
      float product[4] = {};
      mma<T>(product, low_a, high_b);
      mma<T>(product, high_a, low_b);
      mma<T>(product, high_a, high_b);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += product[i];
    }
  }
}

// sum (M_TILES x 16 x 8 N) += a b over a depth of LENGTH: a(k, m) is the fragment of tile m at depth k, b(k, n) that of
// columns n to n + 15, which all tiles share.
template <typename T, int LENGTH, int M_TILES, int N, typename LoadA, typename LoadB>
DEVICE void add_product(float (&sum)[M_TILES][N][4], bool tf32, LoadA a, LoadB b) {
#pragma unroll
  for (int k = 0; k < LENGTH; k += DEPTH<T>) {
    Fragment left[M_TILES];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) left[m] = a(k, m);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const Fragment right = b(k, 8 * n);
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        multiply<T>(sum[m][n], left[m], right, 0, tf32);
        multiply<T>(sum[m][n + 1], left[m], right, 1, tf32);
      }
    }
  }
}

// The product for one tile of rows: a(k).
template <typename T, int LENGTH, int N, typename LoadA, typename LoadB>
DEVICE void add_product(float (&sum)[N][4], bool tf32, LoadA a, LoadB b) {
  add_product<T, LENGTH>(reinterpret_cast<float (&)[1][N][4]>(sum), tf32, [&](int k, int) { return a(k); }, b);
}

// Scores of 16 x DEPTH as fragment a, rounded to T.
template <typename T>
DEVICE Fragment as_fragment(const float (*score)[4]) {
  Fragment a;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 2) {
      a.word[i] = pack<T>(score[i / 2][i % 2 * 2], score[i / 2][i % 2 * 2 + 1]);
    } else {  // k = t is column 2t, k = t + 4 column 2t + 1: see PAIRED
      a.word[i] = bits_of(score[0][i % 2 * 2 + i / 2]);
    }
  }
  return a;
}

// Neighbours (column, column + 1) of one row, rounded to T.
template <typename T>
DEVICE void store_pair(T* to, float first, float second) {
  if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint32_t*>(to) = pack<T>(first, second);
  } else {
    to[0] = first;
    to[1] = second;
  }
}

template <typename T>
DEVICE void unpack(uint32_t word, float (&values)[4 / sizeof(T)]) {
  if constexpr (sizeof(T) == 2) {
    values[0] = to_float(T{uint16_t(word)});
    values[1] = to_float(T{uint16_t(word >> 16)});
  } else {
    values[0] = float_of(word);
  }
}

// The bits of the largest finite number
template <typename T>
constexpr uint16_t LARGEST = 0x7bff;
template <>
constexpr uint16_t LARGEST<BFloat16> = 0x7f7f;

// Where rounding to 16 bits gives infinity, what it took is counted from the largest finite number.
template <typename T>
DEVICE float clamp_to_finite(float x) {
  const float largest = to_float(T{LARGEST<T>});
  return x > largest ? largest : x < -largest ? -largest : x;
}

// The rounding errors of two numbers in 16 bits, rounded to 16 bits.
template <typename T>
DEVICE uint32_t pack_residual(float first, float second) {
  float rounded[2];
  unpack<T>(pack<T>(first, second), rounded);
  return pack<T>(first - clamp_to_finite<T>(rounded[0]), second - clamp_to_finite<T>(rounded[1]));
}

// Neighbours from `column` on, rounded to T, and what rounding takes from them unless `residual` is null.
template <typename T>
DEVICE void store_rounded(T* to, T* residual, int column, float first, float second) {
  store_pair(to + column, first, second);
  if constexpr (sizeof(T) == 2)
    if (residual) *reinterpret_cast<uint32_t*>(residual + column) = pack_residual<T>(first, second);
}

// One element, rounded to T.
template <typename T>
DEVICE void store_one(T* to, float x) {
  if constexpr (sizeof(T) == 2) {
    to->bits = uint16_t(pack<T>(x, 0.f));
  } else {
    *to = x;
  }
}

// Fragment b of nothing but ones: each column of the product is then the sum of a's rows.
template <typename T>
DEVICE Fragment ones() {
  const uint32_t one = bits_of(1.f);
  if constexpr (sizeof(T) == 2) {
    constexpr uint32_t two = std::is_same_v<T, BFloat16> ? 0x3f803f80 : 0x3c003c00;
    return {{two, two, two, two}};
  } else {
    return {{one, one, one, one}};
  }
}

// 16 bytes
struct alignas(16) Bytes16 {
  uint32_t word[4];
};

DEVICE float quad_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}
DEVICE float quad_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}

// All lanes' values reduced by `merge`.
template <typename Value, typename Merge>
DEVICE Value warp_reduce(Value x, Merge merge) {
  for (int step = 1; step < WARP; step *= 2) x = merge(x, shuffle_xor(x, step));
  return x;
}
DEVICE int warp_min(int x) { return warp_reduce(x, smaller); }
DEVICE int warp_max(int x) { return warp_reduce(x, larger); }
DEVICE float warp_sum(float x) {
  return warp_reduce(x, [](float a, float b) { return a + b; });
}

}  // namespace xlnet_kernels::cuda
