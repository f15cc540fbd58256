// The matrix products of these kernels: C[m][n] (+)= sum_k A(m, k) B[k][n] in register tiles.
//
// Rows of A and C are reached through pointers, so each row of the position band is shifted by its own distance
// (docs/math.md): the relative shift costs nothing but the address. Two layouts of B:
//   panels: [n / LANES][k][LANES], for products over head_dim (K^T, R^T, V^T);
//   rows:   [k][n], for products over keys or query rows (V, K, R, Q, dO).
#pragma once

#include "arithmetic.h"
#include "vector.h"
#ifdef MULTIPLIES_BY_LANE
#include "tile_neon.h"
#endif

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

// Where A(m, k) is: a[m][k], a[k][offset + m], or a[0][k * ROWS + m]
enum class A { rows, columns, panel };

// One step of the depth for a register tile: a row of B times a number of A for each of its rows, ...
template <typename T, int ROWS, int COLUMNS, A LAYOUT>
INLINE void multiply_step(const T* const* a, int64_t offset, const T* b, int64_t column_stride, int64_t k,
                          Vec<T> (*sum)[COLUMNS]) {
  Vec<T> right[COLUMNS];
#pragma GCC unroll 4
  for (int v = 0; v < COLUMNS; ++v) right[v] = load(b + v * column_stride);
  const T* left = LAYOUT == A::columns ? a[k] + offset : a[0] + k * ROWS;
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; ++v) sum[m][v] += (LAYOUT == A::rows ? a[m][k] : left[m]) * right[v];
}

// ... or the numbers of A, of a panel, from lanes of registers
template <typename T, int ROWS, int COLUMNS>
INLINE void multiply_step_by_lane(const T* left, const T* b, int64_t column_stride, Vec<T> (*sum)[COLUMNS]) {
  Vec<T> right[COLUMNS];
#pragma GCC unroll 4
  for (int v = 0; v < COLUMNS; ++v) right[v] = load(b + v * column_stride);
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; m += LANES<T>) {
    const Vec<T> numbers = load(left + m);
#pragma GCC unroll 4
    for (int lane = 0; lane < LANES<T>; ++lane)
#pragma GCC unroll 4
      for (int v = 0; v < COLUMNS; ++v) sum[m + lane][v] += numbers[lane] * right[v];
  }
}

// One register tile of ROWS x COLUMNS vectors, stored in C or, unless FIRST, added to it: a sum that started from C
// would be rounded as C is at each step.
template <typename T, int ROWS, int COLUMNS, A LAYOUT, bool FIRST>
INLINE void tile_product(const T* const* a, int64_t offset, const T* b, int64_t row_stride, int64_t column_stride,
                         int64_t depth, T* const* c, int64_t column) {
#ifdef MULTIPLIES_BY_LANE
  if constexpr (ROWS == 12 && COLUMNS == 2 && sizeof(T) == sizeof(float))
    return multiply_tile<FIRST>(a[0], b, row_stride, column_stride, depth, c, column);
#endif
  Vec<T> sum[ROWS][COLUMNS] = {};
  for (int64_t k = 0; k < depth; ++k) {
    if constexpr (BY_LANE) {
      multiply_step_by_lane<T, ROWS, COLUMNS>(a[0] + k * ROWS, b + k * row_stride, column_stride, sum);
    } else {
      multiply_step<T, ROWS, COLUMNS, LAYOUT>(a, offset, b + k * row_stride, column_stride, k, sum);
    }
  }

#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; ++v) {
      T* const to = c[m] + column + v * LANES<T>;
      FIRST ? store(to, sum[m][v]) : add(to, sum[m][v]);
    }
}

// columns of one register tile over panels
template <typename T>
constexpr int64_t PANEL_WIDTH = PANEL_COLUMNS * LANES<T>;

// C[0 .. PANEL_ROWS)[column .. column + COLUMNS * LANES) (+)= A . B^T, A as a panel [depth][PANEL_ROWS]
template <typename T, bool FIRST, int COLUMNS>
static __attribute__((noinline)) void panel_product(const T* row_panel, const T* panels, int64_t depth, T* const* c,
                                                    int64_t column) {
  tile_product<T, PANEL_ROWS, COLUMNS, A::panel, FIRST>(&row_panel, 0, panels, LANES<T>, depth * LANES<T>, depth, c,
                                                        column);
}

// The product for those vectors of PANEL_WIDTH columns that overlap columns begin .. end - 1. `panels` starts at
// `column`.
template <typename T, bool FIRST>
INLINE void panel_product(const T* row_panel, const T* panels, int64_t depth, T* const* c, int64_t column,
                          int64_t begin, int64_t end) {
  static_assert(PANEL_COLUMNS == 2 || PANEL_COLUMNS == 3, "a register tile is up to three vectors wide");
  const int64_t first = larger(begin - column, 0) / LANES<T>;
  const int64_t last = smaller((end - column + LANES<T> - 1) / LANES<T>, PANEL_COLUMNS);
  panels += first * LANES<T> * depth;
  column += first * LANES<T>;
  if constexpr (PANEL_COLUMNS == 3)
    if (last - first == 3) panel_product<T, FIRST, 3>(row_panel, panels, depth, c, column);
  if (last - first == 2) panel_product<T, FIRST, 2>(row_panel, panels, depth, c, column);
  if (last - first == 1) panel_product<T, FIRST, 1>(row_panel, panels, depth, c, column);
}

// C[0 .. ROW_ROWS)[0 .. width) += A . B, B of `depth` rows of `width` (a multiple of LANES)
template <typename T, A LAYOUT>
INLINE void row_tiles(const T* const* a, int64_t offset, const T* b, int64_t width, int64_t depth, T* const* c) {
  int64_t column = 0;
  for (; column + ROW_COLUMNS * LANES<T> <= width; column += ROW_COLUMNS * LANES<T>)
    tile_product<T, ROW_ROWS, ROW_COLUMNS, LAYOUT, false>(a, offset, b + column, width, LANES<T>, depth, c, column);
  if constexpr (ROW_COLUMNS > 2)
    for (; column + 2 * LANES<T> <= width; column += 2 * LANES<T>)
      tile_product<T, ROW_ROWS, 2, LAYOUT, false>(a, offset, b + column, width, LANES<T>, depth, c, column);
  for (; column < width; column += LANES<T>)
    tile_product<T, ROW_ROWS, 1, LAYOUT, false>(a, offset, b + column, width, LANES<T>, depth, c, column);
}

// A(0 .. ROW_ROWS, first .. first + depth) as a panel, up to LANES - 1 columns more
template <typename T, A LAYOUT>
INLINE void pack_left(const T* const* a, int64_t offset, int64_t first, int64_t depth, T* panel) {
  if constexpr (LAYOUT == A::columns) {
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t m = 0; m < ROW_ROWS; m += LANES<T>) store(panel + k * ROW_ROWS + m, load(a[first + k] + offset + m));
  } else {
    for (int64_t k = 0; k < depth; k += LANES<T>)
      for (int64_t m = 0; m < ROW_ROWS; m += LANES<T>) {
        Vec<T> from[LANES<T>], block[LANES<T>];
        for (int64_t i = 0; i < LANES<T>; ++i) from[i] = load(a[m + i] + first + k);
        transpose<T>(from, block);
        for (int64_t i = 0; i < LANES<T>; ++i) store(panel + (k + i) * ROW_ROWS + m, block[i]);
      }
  }
}

// In pieces of the depth: their rows of B stay in the first cache, beside a panel, and many small sums are rounded less
// than a long one.
template <typename T, A LAYOUT>
static __attribute__((noinline)) void row_product(const T* const* a, int64_t offset, const T* b, int64_t width,
                                                  int64_t depth, T* const* c) {
  constexpr int64_t PIECE = 96;
  for (int64_t first = 0; first < depth; first += PIECE) {
    const int64_t count = depth - first < PIECE ? depth - first : PIECE;
    const T* const right = b + first * width;
    if constexpr (BY_LANE) {
      T panel[PIECE * ROW_ROWS];
      const T* const packed = panel;
      pack_left<T, LAYOUT>(a, offset, first, count, panel);
      row_tiles<T, A::panel>(&packed, 0, right, width, count, c);
    } else if constexpr (LAYOUT == A::rows) {
      const T* rows[ROW_ROWS];
      for (int m = 0; m < ROW_ROWS; ++m) rows[m] = a[m] + first;
      row_tiles<T, LAYOUT>(rows, offset, right, width, count, c);
    } else {
      row_tiles<T, LAYOUT>(a + first, offset, right, width, count, c);
    }
  }
}

// The rows of one register tile of C, `stride` apart
template <typename T>
struct RowPointers {
  T* row[PANEL_ROWS > ROW_ROWS ? PANEL_ROWS : ROW_ROWS];

  RowPointers(T* first, int64_t stride) {
    for (int64_t m = 0; m < static_cast<int64_t>(sizeof(row) / sizeof(row[0])); ++m) row[m] = first + m * stride;
  }
};

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
