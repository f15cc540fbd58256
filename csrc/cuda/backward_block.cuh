// What a block of backward works on: its keys, the tile of rows and the window of rel_key of each step, and where its
// gradients go.
#pragma once

#include "scheduler.cuh"
#include "shift.cuh"

namespace xlnet_kernels::cuda {

template <typename Element, int HEAD_DIM_>
struct BackwardShape : BackwardSizes<sizeof(Element), HEAD_DIM_> {
  using T = Element;
  using Sizes = BackwardSizes<sizeof(T), HEAD_DIM_>;
  using Rows = Tile<T, HEAD_DIM_>;
  using Ring = Tile<T, HEAD_DIM_, Sizes::WINDOW>;
  using Scores = Tile<T, Sizes::BLOCK_N>;
  using Band = Tile<T, Sizes::WINDOW>;
  static_assert(Sizes::WINDOW <= REL_MARGIN && Sizes::THREADS == Sizes::WARPS * WARP);
};

template <typename S>
struct BackwardMemory {
  using T = typename S::T;
  char* next;  // while the members below take what they need, in their order

  const typename S::Rows keys{take(S::ROWS_BYTES)}, values{take(S::ROWS_BYTES)};
  const typename S::Rows queries{take(S::ROWS_BYTES)}, grad_out{take(S::ROWS_BYTES)};
  const typename S::Ring ring{take(S::RING_BYTES)};
  const typename S::Scores probability{take(S::SCORES_BYTES)}, dS{take(S::SCORES_BYTES)};
  const typename S::Band band{take(S::BAND_BYTES)};
  const KeyLabels labels = key_labels_at(next, S::BLOCK_N);
  float* const different_sums = labels.bias + S::BLOCK_N;                                     // (GROUPS, BLOCK_M)
  int* const shift_bounds = reinterpret_cast<int*>(different_sums + S::GROUPS * S::BLOCK_M);  // (M_TILES, 2)

  DEVICE explicit BackwardMemory(char* memory) : next(memory) {}
  DEVICE T* take(int bytes) {
    char* const taken = next;
    next += bytes;
    return reinterpret_cast<T*>(taken);
  }
};

// BLOCK_N keys of one head.
template <typename S>
struct KeyTile {
  using T = typename S::T;
  int b, h, head, j0;
  KeyRows<T> key_rows, value_rows;
  HeadRows<T> query_rows, grad_out_rows, rel_rows;
  const float* rel_bias;
  int64_t first_rel, first_row;  // of this head in the sums for rel_key and for query
  HeadRows<float> grad_rel, grad_query;
  const float* row_values;
  int64_t all_rows;

  DEVICE KeyTile(const Backward& a, int tile, int b, int h) : b(b), h(h) {
    const Call& call = a.call;
    const Gradients& grad = a.gradients;
    const RelAttention& p = call.p;
    const int heads = int(p.heads), head_dim = int(p.head_dim);
    head = b * heads + h;
    j0 = tile * S::BLOCK_N;
    key_rows = key_rows_of<T>(p, p.memory.key, p.keys.key, b, h);
    value_rows = key_rows_of<T>(p, p.memory.value, p.keys.value, b, h);
    query_rows = rows_of<T>(p.rows.query, b, h);
    grad_out_rows = rows_of<T>(grad.out, b, h);
    rel_rows = rows_of<T>(p.rel_key.rows, b, h);
    rel_bias = rel_bias_of(call, b, h);
    first_rel = (grad.sums.rel_batches == 1 ? h : head) * p.rel_len;
    first_row = head * p.length;
    grad_rel = {grad.sums.rel_key + first_rel * head_dim, head_dim};
    grad_query = {grad.sums.query + first_row * head_dim, head_dim};
    row_values = grad.row_values + first_row;
    all_rows = p.batch * heads * p.length;
  }
};

// Of this lane's two rows: what they add to scores, and their shift in the step's window, or -1 where it does not serve
// them.
struct StepRows {
  QueryRow row[2];
  int shift[2];
  float different[2];
};

template <typename S>
DEVICE StepRows load_step_rows(const RelAttention& p, const KeyTile<S>& tile, int sorted_row, int last_position,
                               int window_shift) {
  StepRows rows{{load_query_row(p, tile.b, sorted_row), load_query_row(p, tile.b, sorted_row + 8)}, {}, {}};
  for (int r = 0; r < 2; ++r) {
    QueryRow& row = rows.row[r];
    rows.shift[r] = last_position - row.position - window_shift;
    row.inside = row.inside && rows.shift[r] >= 0 && rows.shift[r] < S::BLOCK_M;
    if (!row.inside) rows.shift[r] = -1;
    const float* values = tile.row_values + row.index;
    rows.different[r] = values[DIFFERENT * tile.all_rows];
  }
  return rows;
}

// Starts to copy BLOCK_M sorted rows of query, or of the output's gradient.
template <typename S>
DEVICE void copy_sorted_rows(const RelAttention& p, const typename S::Rows& to, const HeadRows<typename S::T>& rows,
                             int b, int first_row) {
  const int head_dim = int(p.head_dim);
  if (p.rows.order == nullptr) {
    copy_rows<S::THREADS, S::BLOCK_M>(to, 0, rows, first_row, int(p.length), head_dim);
  } else {
    const auto sorted = [&](int m) { return rows(row_index(p, b, smaller(m, int(p.length) - 1))); };
    copy_rows<S::THREADS, S::BLOCK_M>(to, 0, sorted, first_row, int(p.length), head_dim);
  }
}

// Zeros for fully masked rows among those that this thread has copied: zero times NaN would be NaN.
template <typename S>
DEVICE void clear_masked_rows(const RelAttention& p, const KeyTile<S>& tile, const BackwardMemory<S>& memory,
                              int first_row) {
  const float* const inverse = tile.row_values + INVERSE * tile.all_rows;
  for_each_chunk<S::THREADS, S::BLOCK_M, typename S::T, S::HEAD_DIM>([&](int row, int column) {
    const int sorted_row = smaller(first_row + row, int(p.length) - 1);
    if (inverse[row_index(p, tile.b, sorted_row)] != 0) return;
    *reinterpret_cast<Bytes16*>(memory.queries.at(row, column)) = {};
    *reinterpret_cast<Bytes16*>(memory.grad_out.at(row, column)) = {};
  });
}

// Adds row r of a product's two, 8 N columns wide, of which this lane has two in eight, from `column` on.
template <int N>
DEVICE void add_row(float* to, const float (&product)[N][4], int r, int column, int head_dim) {
  to += column;
  const int columns = head_dim - column;  // compared with constants: sums with `column` would each take a register
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (8 * n < columns) add_atomically(to + 8 * n, product[n][2 * r], product[n][2 * r + 1]);
}

}  // namespace xlnet_kernels::cuda
