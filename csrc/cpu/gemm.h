// The matrix products of these kernels: C[m][n] (+)= sum_k A(m, k) B[k][n] in register tiles.
//
// Rows of A and C are reached through pointers, so each row of the position band is shifted by its own distance
// (docs/math.md): the relative shift costs nothing but the address. Two layouts of B:
//   panels: [n / LANES][k][LANES], for products over head_dim (K^T, R^T, V^T);
//   rows:   [k][n], for products over keys or query rows (V, K, R, Q, dO).

// Where A(m, k) is: a[m][k], a[k][offset + m], or a[0][k * ROWS + m]
enum class A { rows, columns, panel };

// One register tile of ROWS x COLUMNS vectors. FIRST: C starts at zero, else it is added to.
template <typename T, int ROWS, int COLUMNS, A LAYOUT, bool FIRST>
INLINE void tile_product(const T* const* a, int64_t offset, const T* b, int64_t row_stride, int64_t column_stride,
                         int64_t depth, T* const* c, int64_t column) {
  Vec<T> sum[ROWS][COLUMNS];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; ++v) sum[m][v] = FIRST ? Vec<T>{} : load(c[m] + column + v * LANES<T>);

  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> right[COLUMNS];
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; ++v) right[v] = load(b + k * row_stride + v * column_stride);
    const T* left = LAYOUT == A::columns ? a[k] + offset : a[0] + k * ROWS;
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < COLUMNS; ++v) sum[m][v] += (LAYOUT == A::rows ? a[m][k] : left[m]) * right[v];
  }

#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; ++v) store(c[m] + column + v * LANES<T>, sum[m][v]);
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

// The same of those of PANEL_WIDTH columns that hold something of columns begin .. end - 1, by whole vectors. `panels`
// starts at `column`.
template <typename T, bool FIRST>
INLINE void panel_product(const T* row_panel, const T* panels, int64_t depth, T* const* c, int64_t column,
                          int64_t begin, int64_t end) {
  static_assert(PANEL_COLUMNS == 2, "a register tile is two vectors wide, or one");
  const int64_t middle = column + LANES<T>;
  const bool left = begin < middle && end > column, right = begin < column + PANEL_WIDTH<T> && end > middle;
  if (left && right) {
    panel_product<T, FIRST, 2>(row_panel, panels, depth, c, column);
  } else if (left) {
    panel_product<T, FIRST, 1>(row_panel, panels, depth, c, column);
  } else if (right) {
    panel_product<T, FIRST, 1>(row_panel, panels + LANES<T> * depth, depth, c, middle);
  }
}

// C[0 .. ROW_ROWS)[0 .. width) += A . B, B of `depth` rows of `width` (a multiple of LANES)
template <typename T, A LAYOUT>
static __attribute__((noinline)) void row_product(const T* const* a, int64_t offset, const T* b, int64_t width,
                                                  int64_t depth, T* const* c) {
  const T* rows[ROW_ROWS];  // an array of this function's own: the stores through `c` cannot change it
  if (LAYOUT == A::rows) {
    for (int m = 0; m < ROW_ROWS; ++m) rows[m] = a[m];
    a = rows;
  }
  int64_t column = 0;
  for (; column + ROW_COLUMNS * LANES<T> <= width; column += ROW_COLUMNS * LANES<T>)
    tile_product<T, ROW_ROWS, ROW_COLUMNS, LAYOUT, false>(a, offset, b + column, width, LANES<T>, depth, c, column);
  for (; column + 2 * LANES<T> <= width; column += 2 * LANES<T>)
    tile_product<T, ROW_ROWS, 2, LAYOUT, false>(a, offset, b + column, width, LANES<T>, depth, c, column);
  for (; column < width; column += LANES<T>)
    tile_product<T, ROW_ROWS, 1, LAYOUT, false>(a, offset, b + column, width, LANES<T>, depth, c, column);
}

// The rows of one register tile of C, `stride` apart
template <typename T>
struct RowPointers {
  T* row[PANEL_ROWS > ROW_ROWS ? PANEL_ROWS : ROW_ROWS];

  RowPointers(T* first, int64_t stride) {
    for (int64_t m = 0; m < static_cast<int64_t>(sizeof(row) / sizeof(row[0])); ++m) row[m] = first + m * stride;
  }
};
