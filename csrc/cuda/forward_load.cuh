// Operands of forward's main loop: the block's tile of rows, and loads of keys, values and rel_key.
//
// K and V come double-buffered by cp.async. The rows of rel_key lie in a ring: from one tile to the next its window
// moves on by BLOCK_N rows, so each row is fetched once per block.
#pragma once

#include "mask.cuh"
#include "scheduler.cuh"
#include "shift.cuh"
#include "softmax.cuh"
#include "unread.cuh"

namespace xlnet_kernels::cuda {

// SPLITS: blocks share the keys of one tile of rows (split_keys.cuh).
template <typename Element, int HEAD_DIM_, bool SPLITS_ = false>
struct ForwardShape : ForwardSizes<sizeof(Element), HEAD_DIM_> {
  static constexpr bool SPLITS = SPLITS_;
  using T = Element;
  using Sizes = ForwardSizes<sizeof(T), HEAD_DIM_>;
  using Softmax = OnlineSoftmax<Sizes::M_TILES>;
  using Rows = Tile<T, HEAD_DIM_>;
  using Ring = Tile<T, HEAD_DIM_, Sizes::RING>;
  // Ranks by pairs take fewer comparisons and fewer passes through shared memory.
  static constexpr bool RANK_PAIRS = Sizes::BLOCK_N % 32 == 0;
  static_assert(Sizes::WINDOW <= REL_MARGIN && Sizes::THREADS == Sizes::WARPS * WARP);
};

// Shared memory: two stages of keys, values, labels and v.r of the window; the ring of rel_key; float32: the rows of
// query; dropout.
template <typename S>
struct ForwardMemory {
  using T = typename S::T;
  char* data;

  DEVICE typename S::Rows keys(int stage) const { return {reinterpret_cast<T*>(data + stage * S::STAGE)}; }
  DEVICE typename S::Rows values(int stage) const {
    return {reinterpret_cast<T*>(data + stage * S::STAGE + S::KEY_BYTES)};
  }
  DEVICE KeyLabels labels(int stage) const {
    return key_labels_at(data + stage * S::STAGE + 2 * S::KEY_BYTES, S::BLOCK_N);
  }
  DEVICE uint32_t* rank_pairs(int stage) const {
    return reinterpret_cast<uint32_t*>(data + stage * S::STAGE + 2 * S::KEY_BYTES + S::LABELS);
  }
  DEVICE float* rel_bias(int stage) const {  // v.r of the window's rows
    return reinterpret_cast<float*>(data + (stage + 1) * S::STAGE - S::BIAS_BYTES);
  }
  DEVICE typename S::Ring ring() const { return {reinterpret_cast<T*>(data + 2 * S::STAGE)}; }
  DEVICE typename S::Rows queries() const { return {reinterpret_cast<T*>(data + 2 * S::STAGE + S::RING_BYTES)}; }
  // Which of 64 keys dropout keeps for this thread, THREADS words apart for each tile of 16 rows
  DEVICE uint32_t* kept() const {
    return reinterpret_cast<uint32_t*>(data + S::SHARED - S::KEPT_BYTES) + thread_index();
  }
};

// The block's BLOCK_M sorted rows of one head, and how they lie to rel_key.
template <typename S>
struct ForwardTile {
  Lane lane;
  int b, h, head, first_row, split, last_position;
  int span;    // how far the last row's position is from the first's
  int origin;  // first row of rel_key in the window of the last position and key 0

  // One of `splits` parts of it, which are numbered as tiles are
  DEVICE ForwardTile(const RelAttention& p, const BlockItem& part, int splits = 1)
      : lane(this_lane()),
        b(part.b),
        h(part.h),
        head(b * int(p.heads) + h),
        first_row(part.tile / splits * S::BLOCK_M),
        split(part.tile % splits) {}

  DEVICE void locate(const RelAttention& p) {
    last_position = row_position(p, b, smaller(first_row + S::BLOCK_M, int(p.length)) - 1);
    span = last_position - row_position(p, b, first_row);
    origin = int(p.rel_key.max_distance - p.mem_len) - last_position;
  }

  // The key at the first row's position
  DEVICE int first_own(const RelAttention& p) const { return int(p.mem_len) + last_position - span; }

  // This lane's rows of tile m of 16: this one and the eighth from it
  DEVICE int sorted_row(int m) const { return first_row + 16 * (S::M_TILES * lane.warp + m) + lane.g; }
  // A row's shift in the band, or -1 beyond the last row
  DEVICE int shift(const RelAttention& p, int sorted_row) const {
    const QueryRow row = load_query_row(p, b, sorted_row);
    return row.inside ? last_position - row.position : -1;
  }
};

// The rows of query: in registers, or in float32 in shared memory.
template <typename S>
struct QueryFragments {
  using T = typename S::T;
  static constexpr int STEPS = S::HEAD_DIM / DEPTH<T>;
  typename S::Rows tile;
  Lane lane;
  Fragment q[S::M_TILES][STEPS];

  DEVICE QueryFragments(const ForwardMemory<S>& memory, const ForwardTile<S>& of)
      : tile(memory.queries()), lane(of.lane) {}

  DEVICE int first_row(int m) const { return 16 * (S::M_TILES * lane.warp + m); }

  DEVICE void load_global(const RelAttention& p, const ForwardTile<S>& of, int m, const QueryRow (&rows)[2]) {
    const HeadRows<const T> query = rows_of<const T>(p.rows.query, of.b, of.h);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int d = step * DEPTH<T> + lane.t * (4 / int(sizeof(T))) + i / 2 * CHUNK<T>;
        const QueryRow& row = rows[i % 2];
        uint32_t& word = q[m][step].word[i];
        word = d < int(p.head_dim) && row.inside ? *reinterpret_cast<const uint32_t*>(query(row.index) + d) : 0;
        if constexpr (!S::QUERY_IN_REGISTERS)
          *tile.at(first_row(m) + lane.g + i % 2 * 8, step * DEPTH<T> + lane.t + i / 2 * CHUNK<T>) = float_of(word);
      }
  }

  // The fragment of tile m of 16 rows at depth k
  DEVICE Fragment operator()(int k, int m) const {
    if constexpr (S::QUERY_IN_REGISTERS)
      return q[m][k / DEPTH<T>];
    else
      return load_a(tile, first_row(m), k, lane.id);
  }
};

// Brings one tile of keys after the other, the next while one is worked on, and the window of rel_key with it.
template <typename S>
struct ForwardPipeline {
  using T = typename S::T;
  const Call& call;
  const ForwardTile<S>& rows;
  const ForwardMemory<S> memory;
  const int keys, head_dim;
  const KeyRows<const T> key_rows, value_rows;
  const HeadRows<const T> rel_rows;
  enum TileFlag { HAS_UNREAD, IS_ONE_SEGMENT, TILE_FLAGS };
  TileScheduler<TILE_FLAGS> scheduler;
  TileState state = Visibility::none, next_state = Visibility::none;  // of the tile, of the one after it
  int tile, next, stage = 0;
  bool has_window = false;  // the ring holds the tile's window
  bool keeps_window;        // and will hold that of the next

  DEVICE ForwardPipeline(const Call& call, const ForwardTile<S>& rows, const ForwardMemory<S>& memory)
      : call(call),
        rows(rows),
        memory(memory),
        keys(int(call.p.mem_len + call.p.key_len)),
        head_dim(int(call.p.head_dim)),
        key_rows(key_rows_of<const T>(call.p, call.p.memory.key, call.p.keys.key, rows.b, rows.h)),
        value_rows(key_rows_of<const T>(call.p, call.p.memory.value, call.p.keys.value, rows.b, rows.h)),
        rel_rows(rows_of<const T>(call.p.rel_key.rows, rows.b, rows.h).kept()),
        scheduler(all_tiles()) {}

  DEVICE TileScheduler<TILE_FLAGS> all_tiles() const {
    const int first = rows.first_own(call.p);
    const Range reach = keys_within_reach(call.p, first, first + rows.span);
    return {S::SPLITS ? part_of(reach, S::BLOCK_N, rows.split, call.splits) : reach, S::BLOCK_N};
  }

  DEVICE bool has_tile() const { return tile < scheduler.tiles; }

  DEVICE int next_tile(TileState& found) {
    return scheduler.next(found, rows.lane.id, [&](int i) {
      const RowTile row_tile = load_row_tile(call, rows.b, rows.first_row, S::BLOCK_M);
      const int j0 = i * S::BLOCK_N;
      const Visibility visibility = S::RANK_PAIRS ? row_tile.visibility_by_pairs(call, rows.b, j0, S::BLOCK_N)
                                                  : row_tile.visibility(call, rows.b, j0, S::BLOCK_N);
      const bool has_unread = visibility != Visibility::all && unread_in(j0, unread_keys(call, rows.b, rows.h)) != 0;
      const bool is_one = load_key_segment<S::BLOCK_N>(call, rows.b, keys, j0).is_only;
      return TileState(visibility, uint32_t(has_unread) << HAS_UNREAD | uint32_t(is_one) << IS_ONE_SEGMENT);
    });
  }
  DEVICE auto unread_in(int j0, UnreadRows all) const { return unread_bits<S::BLOCK_N>(all, j0); }
  DEVICE bool is_one_segment() const { return state.flags >> IS_ONE_SEGMENT & 1; }

  // Whether there was any tile: some row may see some key.
  DEVICE bool starts_again() {
    scheduler = all_tiles();
    return next_tile(state) < scheduler.tiles;
  }

  DEVICE void start() {
    tile = next_tile(state);
    sync_block();  // labels are cleared
    if (has_tile()) copy_keys(tile * S::BLOCK_N, 0, state);
    commit_copies();
  }

  // Waits for the tile, starts to copy the next; returns the tile's first key.
  DEVICE int load() {
    const int j0 = tile * S::BLOCK_N;
    next = next_tile(next_state);
    wait_for_copies<0>();
    sync_block();  // this tile is loaded, and all warps have read the last one
    if (!has_window) {
      copy_window(rows.origin + j0);
      commit_copies();
    }
    keeps_window = next == tile + 1 && next < scheduler.tiles && rows.span < S::BLOCK_M;
    if (keeps_window) copy_rel_key(rows.origin + j0 + S::WINDOW);
    if (next < scheduler.tiles) copy_keys(next * S::BLOCK_N, 1 - stage, next_state);
    commit_copies();
    return j0;
  }

  // Until the window of rel_key at this shift is in the ring.
  DEVICE void wait_for_window(int j0, int window_shift) {
    if (window_shift > 0) {
      sync_block();
      copy_window(rows.origin + j0 + window_shift);
      copy_rel_bias(rows.origin + j0 + window_shift, stage);
      commit_copies();
      wait_for_copies<0>();
      sync_block();
    } else if (!has_window) {
      wait_for_copies<1>();
      sync_block();
    }
  }

  DEVICE void advance() {
    has_window = keeps_window;
    tile = next;
    state = next_state;
    stage = 1 - stage;
  }

  // Scores of unread keys are hidden, whatever they are: their values alone have to be zeros.
  DEVICE void copy_keys(int j0, int to, const TileState& of) {
    const bool has_unread = of.flags >> HAS_UNREAD & 1;
    const auto unread = unread_in(j0, has_unread ? unread_keys(call, rows.b, rows.h) : UnreadRows{nullptr});
    copy_rel_bias(rows.origin + j0, to);
    const auto copy = [&](auto key_rows, auto value_rows) {
      copy_rows<S::THREADS, S::BLOCK_N>(memory.keys(to), 0, key_rows, j0, keys, head_dim);
      copy_rows_inside<S::THREADS, S::BLOCK_N>(memory.values(to), 0, value_rows, j0, head_dim, thread_index(),
                                               [&](int j) { return j < keys && !(unread >> (j - j0) & 1); });
    };
    if (j0 >= key_rows.mem_len)
      copy(key_rows.segment, value_rows.segment);
    else
      copy(key_rows, value_rows);
    if (rows.lane.warp * WARP >= S::BLOCK_N) return;
    copy_key_labels<S::THREADS, S::BLOCK_N>(call, memory.labels(to), rows.b, rows.h, j0);
    if constexpr (S::RANK_PAIRS) copy_rank_pairs<S::BLOCK_N>(call, memory.rank_pairs(to), rows.b, j0, thread_index());
  }
  DEVICE void copy_rel_bias(int begin, int to) {
    const float* const from = rel_bias_of(call, rows.b, rows.h) + clamped_window(begin, int(call.p.rel_len));
#pragma unroll
    for (int first = 0; first < S::WINDOW; first += S::THREADS) {
      const int i = first + thread_index();
      if (first + S::THREADS <= S::WINDOW || i < S::WINDOW) copy_async<4>(memory.rel_bias(to) + i, from + i, true);
    }
  }
  DEVICE void copy_rel_key(int begin) {
    copy_rows<S::THREADS, S::BLOCK_N>(memory.ring(), begin, rel_rows, begin, int(call.p.rel_len), head_dim);
  }
  DEVICE void copy_window(int begin) {
#pragma unroll 1
    for (int i = 0; i < S::WINDOW; i += S::BLOCK_N) copy_rel_key(begin + i);
  }
};

}  // namespace xlnet_kernels::cuda
