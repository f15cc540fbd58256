// Operands of a block of backward: its keys, each step's tile of rows and window of rel_key, and the addresses of its
// gradients.
#pragma once

#include "mask.cuh"
#include "scheduler.cuh"
#include "shift.cuh"
#include "unread.cuh"

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

  const typename S::Rows keys{take(S::ROWS_BYTES)}, values{take(S::ROWS_BYTES)}, grad_out{take(S::GRAD_OUT_BYTES)};
  const typename S::Ring ring{take(S::RING_BYTES)};
  const typename S::Scores dS{S::DS_AFTER_DV ? grad_out.data : take(S::OWN_DS_BYTES)};
  const typename S::Band band{take(S::BAND_BYTES)};
  char* const changing = reinterpret_cast<char*>(take(S::QUERY_BYTES + S::PROBABILITY_BYTES));  // query and P
  const KeyLabels labels = key_labels_at(next, S::BLOCK_N);
  float* const different_sums = labels.bias + S::BLOCK_N;                                     // (GROUPS, BLOCK_M)
  int* const shift_bounds = reinterpret_cast<int*>(different_sums + S::GROUPS * S::BLOCK_M);  // (M_TILES, 2)
  int query_place = 0;

  DEVICE explicit BackwardMemory(char* memory) : next(memory) {}
  DEVICE T* take(int bytes) {
    char* const taken = next;
    next += bytes;
    return reinterpret_cast<T*>(taken);
  }
  // Rows of query and P change places from tile to tile.
  DEVICE void change_places() { query_place = S::QUERY_BYTES - query_place; }
  DEVICE typename S::Rows queries() const { return {reinterpret_cast<T*>(changing + query_place)}; }
  DEVICE typename S::Scores probability() const {
    return {reinterpret_cast<T*>(changing + (S::QUERY_BYTES - query_place))};
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

  DEVICE KeyTile(const Backward& a, const BlockItem& item) : b(item.b), h(item.h) {
    const Call& call = a.call;
    const Gradients& grad = a.gradients;
    const RelAttention& p = call.p;
    const int heads = int(p.heads), head_dim = int(p.head_dim);
    head = b * heads + h;
    j0 = item.tile * S::BLOCK_N;
    key_rows = key_rows_of<T>(p, p.memory.key, p.keys.key, b, h);
    value_rows = key_rows_of<T>(p, p.memory.value, p.keys.value, b, h);
    query_rows = rows_of<T>(p.rows.query, b, h);
    grad_out_rows = rows_of<T>(grad.out, b, h);
    rel_rows = rows_of<T>(p.rel_key.rows, b, h);
    rel_bias = rel_bias_of(call, b, h);
    first_rel = (grad.sums.rel_batches == 1 ? h : head) * p.rel_len;
    first_row = head * p.length;
    grad_rel = {grad.sums.rel_key.data + first_rel * head_dim, head_dim};
    grad_query = {grad.sums.query.data + first_row * head_dim, head_dim};
    row_values = grad.row_values + first_row;
    all_rows = p.batch * heads * p.length;
  }

  // Where the window of a row at position 0 begins
  DEVICE int first_window(const RelAttention& p) const { return int(p.rel_key.max_distance - p.mem_len) + j0; }
};

// This lane's two rows: labels, their part of scores, and their shift in the step's window, or -1 where it does not
// serve them.
struct StepRows {
  QueryRow row[2];
  int shift[2];
  float different[2];
};

template <typename S>
DEVICE StepRows load_step_rows(const RelAttention& p, const KeyTile<S>& tile, int sorted_row, int window) {
  StepRows rows{{load_query_row(p, tile.b, sorted_row), load_query_row(p, tile.b, sorted_row + 8)}, {}, {}};
  for (int r = 0; r < 2; ++r) {
    QueryRow& row = rows.row[r];
    rows.shift[r] = tile.first_window(p) - row.position - window;
    row.inside = row.inside && rows.shift[r] >= 0 && rows.shift[r] < S::BLOCK_M;
    if (!row.inside) rows.shift[r] = -1;
    const float* values = tile.row_values + row.index;
    rows.different[r] = values[DIFFERENT * tile.all_rows];
  }
  return rows;
}

// This thread's index, of which addresses are made anew in each step: registers are scarce.
DEVICE int thread_of_step() { return int(kept_in_register(thread_index())); }

// Rows of a tile that this thread copies: where they are in the tensors, or -1 for zeros. Fully masked rows are zeros,
// because zero times NaN would be NaN.
template <typename S>
struct CopiedRows {
  using T = typename S::T;
  int index[S::BLOCK_M * POWER_OF_TWO<S::HEAD_DIM / CHUNK<T>> / S::THREADS];

  template <typename Use>
  DEVICE static void for_each(Use use) {
    int i = 0;
    for_each_chunk<S::THREADS, S::BLOCK_M, T, S::HEAD_DIM>(thread_of_step(),
                                                           [&](int m, int column) { use(i++, m, column); });
  }
  // With masked() of an earlier one for this tile, to avoid loads
  DEVICE CopiedRows(const RelAttention& p, const KeyTile<S>& tile, int first_row, uint32_t masked) {
    find_indices(p, tile, first_row);
    for_each([&](int i, int, int) {
      if (masked >> i & 1) index[i] = -1;
    });
  }
  // Bit i: row i is fully masked, or beyond the last one
  DEVICE uint32_t masked() const {
    uint32_t found = 0;
    for_each([&](int i, int, int) { found |= uint32_t(index[i] < 0) << i; });
    return found;
  }
  DEVICE void find_indices(const RelAttention& p, const KeyTile<S>& tile, int first_row) {
    for_each([&](int i, int m, int) {
      index[i] = row_index(p, tile.b, smaller(first_row + m, int(p.length) - 1));
    });
  }
  DEVICE CopiedRows(const RelAttention& p, const KeyTile<S>& tile, int first_row) {
    const float* const inverse = tile.row_values + INVERSE * tile.all_rows;
    // first all loads of one kind, then all of the next, to wait once for each kind
    find_indices(p, tile, first_row);
    float of_row[sizeof(index) / sizeof(int)];
    for_each([&](int i, int, int) { of_row[i] = inverse[index[i]]; });
    for_each([&](int i, int m, int) {
      if (first_row + m >= p.length || of_row[i] == 0) index[i] = -1;
    });
  }
  // Starts to copy rows of query, or of the output's gradient.
  DEVICE void copy(const typename S::Rows& to, const HeadRows<T>& rows, int head_dim) const {
    for_each([&](int i, int m, int column) {
      copy_async<16>(to.at(m, column), rows(index[i]) + column, index[i] >= 0 && column < head_dim);
    });
  }
};

// One step of a block: a tile of rows and a window of rel_key, with the rows that it serves.
struct Step {
  int row_tile;
  int window;  // first row of rel_key
  int span;    // how far the last row's position is from the first that this window, or a later one, serves
};

// Goes from one step to the next: one for each tile, but where rows are far apart one for each window of rel_key.
template <typename S>
struct BackwardSteps {
  const Call& call;
  const KeyTile<S>& tile;
  TileScheduler<> scheduler;
  const bool has_unread_rel_rows;
  Step step;

  DEVICE BackwardSteps(const Call& call, const KeyTile<S>& tile, int lane)
      : call(call),
        tile(tile),
        scheduler(rows_within_reach(call.p, tile.j0, S::BLOCK_N), S::BLOCK_M),
        has_unread_rel_rows(unread_rel_rows(call, tile.b, tile.h).any(int(call.p.rel_len), lane)) {}

  DEVICE bool is_at_end() const { return step.row_tile >= scheduler.tiles; }
  DEVICE int first_row() const { return step.row_tile * S::BLOCK_M; }
  DEVICE Visibility visibility() const { return scheduler.visibility_of(1u << (step.row_tile - scheduler.first)); }

  DEVICE void find_tile(int lane) {
    const RelAttention& p = call.p;
    TileState found = Visibility::none;
    step.row_tile = scheduler.next(found, lane, [&](int i) {
      const RowTile rows = load_row_tile(call, tile.b, i * S::BLOCK_M, S::BLOCK_M);
      return rows.visibility(call, tile.b, tile.j0, S::BLOCK_N);
    });
    if (is_at_end()) return;
    const int last_position = row_position(p, tile.b, smaller(first_row() + S::BLOCK_M, int(p.length)) - 1);
    step.window = tile.first_window(p) - last_position;
    step.span = last_position - row_position(p, tile.b, first_row());
  }
  DEVICE void advance(int lane) {
    step.window += S::BLOCK_M;
    step.span -= S::BLOCK_M;
    if (step.span < 0) find_tile(lane);
  }

  // Starts to copy operands of the step, without dO if DS_AFTER_DV: `sorted`, where its tile is a new one, and its
  // window of rel_key, of which the ring may have the upper half. in_ring: the window that is there, or LOWEST.
  DEVICE void copy(BackwardMemory<S>& memory, const CopiedRows<S>& sorted, bool is_new, int in_ring) const {
    const int head_dim = int(call.p.head_dim);
    if (is_new) {
      if (S::QUERY_AHEAD) {
        memory.change_places();
        sorted.copy(memory.queries(), tile.query_rows, head_dim);
      }
      if (!S::DS_AFTER_DV) sorted.copy(memory.grad_out, tile.grad_out_rows, head_dim);
    }
    const auto copy_half_window = [&](int begin) {
      const int rel_len = int(call.p.rel_len);
      if (!has_unread_rel_rows)
        return copy_rows<S::THREADS, S::BLOCK_M>(memory.ring, begin, tile.rel_rows, begin, rel_len, head_dim,
                                                 thread_of_step());
      const UnreadRows unread = unread_rel_rows(call, tile.b, tile.h);
      copy_rows_inside<S::THREADS, S::BLOCK_M>(
          memory.ring, begin, tile.rel_rows, begin, head_dim, thread_of_step(),
          [&](int row) { return uint32_t(row) < uint32_t(rel_len) && !unread.has(row); });
    };
    copy_half_window(step.window);
    // rows of later positions: the window moves down
    if (step.window + S::BLOCK_M != in_ring) copy_half_window(step.window + S::BLOCK_M);
  }
};

// Zeros, before the shifts of a step's rows are others than those of the step before.
template <typename S>
DEVICE void clear_band(const BackwardMemory<S>& memory) {
  for (int i = thread_index(); i < S::BAND_BYTES / 16; i += S::THREADS)
    reinterpret_cast<Bytes16*>(memory.band.data)[i] = {};
}

// Adds 8 rows of a product, 8 N columns wide from the tensor's column `first` on: row r of this lane's two, which goes
// to `row` of the tensor, or nowhere if that is -1. Lane t of a quad has columns 2 t and 2 t + 1 of each eight. All
// lanes of a warp call it.
//
// Each instruction adds eight neighbouring columns of a row, a sector of 32 bytes where rows are aligned to it. Where
// an instruction adds one number of a lane, neighbouring quads exchange their odd columns: the first instruction has
// the even rows then, the second the odd ones.
template <int N>
DEVICE void add_rows(const HeadRows<float>& to, const float (&product)[N][4], int r, int row, int first, int head_dim,
                     const Lane& lane) {
  const int columns = head_dim - first;
  const auto add = [&](int to_row, int column, auto add_to) {
    if (to_row < 0) return;
    float* const at = to(to_row) + first + column;
    // Whole rows have no tests, and so one address for all additions, whose offsets are part of the instructions.
    const auto add_all = [&](bool is_whole) {
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (is_whole || 8 * n + column < columns) add_to(at + 8 * n, n);
    };
    columns >= 8 * N ? add_all(true) : add_all(false);
  };
  if constexpr (HAS_VECTOR_RED) {
    add(row, 2 * lane.t, [&](float* at, int n) { add_atomically(at, product[n][2 * r], product[n][2 * r + 1]); });
  } else {
    const bool is_odd = lane.g % 2;
    const int other_row = shuffle_xor(row, 4);
    float even_row[N], odd_row[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float own = product[n][2 * r], given = shuffle_xor(product[n][2 * r + 1], 4);
      even_row[n] = is_odd ? given : own;
      odd_row[n] = is_odd ? own : given;
    }
    add(is_odd ? other_row : row, 2 * lane.t + is_odd, [&](float* at, int n) { add_atomically(at, even_row[n]); });
    add(is_odd ? row : other_row, 2 * lane.t + 1 - is_odd,
        [&](float* at, int n) { add_atomically(at, odd_row[n]); });
  }
}

}  // namespace xlnet_kernels::cuda
