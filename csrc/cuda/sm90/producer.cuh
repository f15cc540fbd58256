// The producer, a warp: finds the tiles that some row sees, brings their keys, values, labels and rows of rel_key. Its
// warpgroup has three warps more, since registers change hands by warpgroups; they leave at once.
//
// It copies by cp.async, not by TMA: keys of memory and segment, any strides, the table's ends and the labels then take
// one way, and the swizzle is an address. A lane arrives at a barrier when its copies have.
//
// A tile's stage has 64 rows of rel_key, too. For the first 64 rows of the block a tile's window is those and the 64
// before them, for the last 64 the two 64 before them: of the stages before, or of the one that begins a window. Where
// rows have positions the block goes to the keys once for each run of them: mostly it is one run.
#pragma once

#include "../scheduler.cuh"
#include "../shift.cuh"
#include "../unread.cuh"
#include "copies.cuh"

namespace xlnet_kernels::cuda {

// First row of the 192 of rel_key for the tile that begins with key 0: that of a row 64 behind window_position.
DEVICE int first_rel_row(const RelAttention& p, int window_position) {
  return int(p.rel_key.max_distance - p.mem_len) - (window_position + 64);
}

template <typename S>
struct Producer {
  using T = typename S::T;
  const Call& call;
  const WarpgroupMemory<S> memory;
  const int b, h, first_row, keys, lane;
  const KeyRows<const T> key_rows, value_rows;
  const HeadRows<const T> rel_rows;
  const float* const rel_bias;
  StagePlace<S> place;

  DEVICE Producer(const Call& call, const WarpgroupMemory<S>& memory, int b, int h, int first_row)
      : call(call),
        memory(memory),
        b(b),
        h(h),
        first_row(first_row),
        keys(int(call.p.mem_len + call.p.key_len)),
        lane(thread_index() % WARP),
        key_rows(key_rows_of<const T>(call.p, call.p.memory.key, call.p.keys.key, b, h)),
        value_rows(key_rows_of<const T>(call.p, call.p.memory.value, call.p.keys.value, b, h)),
        rel_rows(rows_of<const T>(call.p.rel_key.rows, b, h)),
        rel_bias(rel_bias_of(call, b, h)) {}

  DEVICE void run() {
    RowRun run{first_row, first_row + S::BLOCK_M};
    if constexpr (S::POSITIONS) {
      const int end = smaller(run.end, int(call.p.length));
      for (run.end = end_of_run(run.first, end); run.end < end; run = {run.end, end_of_run(run.end, end)})
        bring_tiles(run, TileInfo::SOME_ROWS);
      bring_tiles(run, run.first > first_row ? TileInfo::SOME_ROWS : 0);
    } else {
      bring_tiles(run, 0);
    }
    announce({TileInfo::ENDS});
    const StagePlace<S> last = place;
    publish();
    memory.stage(last.offset).full().wait(last.parity);  // no lane ends with copies or arrivals under way
  }

  // Where the run of sorted rows ends that begins with `first`; at `end` at the latest.
  DEVICE int end_of_run(int first, int end) const {
    const auto position = [&](int row) { return row_position(call.p, b, row); };
    for (int i = first + 1; i < end; i += WARP) {
      const int row = i + lane, eight = larger(first, row / 8 * 8), last_of_64 = first_row + 63;
      const int window = row <= last_of_64 ? first : larger(first, last_of_64);
      const bool is_far = row < end && (position(row) - position(eight) > 8 || position(row) - position(window) > 64);
      const uint32_t far = ballot(is_far);
      if (far) return i + first_bit(far);
    }
    return end;
  }

  // All that a run of rows sees.
  DEVICE void bring_tiles(RowRun run, uint32_t some_rows) {
    const RelAttention& p = call.p;
    RowTile rows = load_row_tile(call, b, first_row, S::BLOCK_M);
    if constexpr (S::POSITIONS) {
      rows.first_position = row_position(p, b, run.first);
      rows.last_position = row_position(p, b, run.end - 1);
    }
    // Empty without positions, because it is unused there and registers are few.
    const RowRun served = S::POSITIONS ? run : RowRun{};
    const int mem_len = int(p.mem_len), position = window_position<S>(p, b, first_row, run);
    TileScheduler scheduler(keys_within_reach(p, rows.first_position + mem_len, rows.last_position + mem_len),
                            S::BLOCK_N);
    int before = -2;  // the tile before
    for (;;) {
      TileState found = Visibility::none;
      const int tile = scheduler.next(
          found, lane, [&](int i) { return rows.visibility_by_pairs(call, b, i * S::BLOCK_N, S::BLOCK_N); });
      if (tile >= scheduler.tiles) break;
      const uint32_t hides =
          TileInfo::hidden_by(rows.with_own_keys(p, found.visibility, tile * S::BLOCK_N, S::BLOCK_N));
      const KeySegment segment = load_key_segment<S::BLOCK_N>(call, b, keys, tile * S::BLOCK_N);
      const int window = first_rel_row(p, position) + tile * S::BLOCK_N;
      if (tile != before + 1) {
        announce({TileInfo::BEGINS, 0, served.first, served.end});
        copy_rel_key(stage().keys(), window);
        copy_rel_key(stage().rel_key(), window + S::BLOCK_N);
        publish();
      }
      announce({hides | (segment.is_only ? TileInfo::ONE_SEGMENT : 0) | some_rows, segment.first, tile * S::BLOCK_N});
      const bool asks_segment = !S::HAS_ONE_SEGMENT_WAY || !segment.is_only;
      copy_keys(tile * S::BLOCK_N, found.visibility, hides & TileInfo::PAIR_BY_PAIR, asks_segment);
      copy_rel_key(stage().rel_key(), window + 2 * S::BLOCK_N);
      publish();
      before = tile;
    }
  }

  DEVICE WarpgroupStage<S> stage() const { return memory.stage(place.offset); }

  DEVICE void announce(TileInfo info) {
    stage().empty().wait(place.parity ^ 1);
    if (lane > 0) return;
    stage().info() = info;
    stage().full().arrive();
  }

  // The stage is full when this lane's copies, and all others', have arrived.
  DEVICE void publish() {
    stage().full().arrive_after_copies();
    place.advance();
  }

  // 64 rows from `from` on, of those that there are: all.begin to all.end - 1
  template <typename Source>
  DEVICE void copy_rows(const Panels<T, S::HEAD_DIM>& to, Source source, int from, Range all) {
    if constexpr (std::is_same_v<Source, HeadRows<const T>>)
      if (from >= all.begin && from + S::BLOCK_N <= all.end) return copy_whole_rows(to, source, from, lane);
    copy_rows_inside(to, source, from, lane, [&](int row) { return row >= all.begin && row < all.end; });
  }

  // Scores of unread keys are hidden, whatever they are: their values alone have to be zeros.
  DEVICE void copy_keys(int j0, Visibility visibility, bool asks_rank, bool asks_segment) {
    const UnreadRows unread = unread_keys(call, b, h);
    const bool has_unread = visibility != Visibility::all && unread_bits<S::BLOCK_N>(unread, j0) != 0;
    if (has_unread)
      copy_rows_inside(stage().values(), value_rows, j0, lane, [&](int j) { return j < keys && !unread.has(j); });
    if (j0 >= key_rows.mem_len || j0 + S::BLOCK_N <= key_rows.mem_len) {
      const bool in_memory = j0 < key_rows.mem_len;
      copy_rows(stage().keys().rows(), in_memory ? key_rows.memory : key_rows.segment, j0, {0, keys});
      if (!has_unread) copy_rows(stage().values(), in_memory ? value_rows.memory : value_rows.segment, j0, {0, keys});
    } else {
      copy_rows(stage().keys().rows(), key_rows, j0, {0, keys});
      if (!has_unread) copy_rows(stage().values(), value_rows, j0, {0, keys});
    }
    copy_key_labels<WARP, S::BLOCK_N>(call, stage().labels(), b, h, j0, lane, asks_rank, asks_segment);
    if (call.workspace.key_bias == nullptr) copy_rel_bias(stage().keys(), 0, {0, 0});  // zeros: v.r may be there
    copy_rank_pairs<S::BLOCK_N>(call, stage().rank_pairs(), b, j0, lane);
  }

  DEVICE void copy_rel_key(const BiasedRows<S>& to, int begin) {
    const Range read = read_rel_rows<S::POSITIONS>(call.p);
    copy_rows(to.rows(), rel_rows, begin, read);
    copy_rel_bias(to, begin, read);
  }
  // v.r of rows from `begin` on; zeros where they are not among all.begin to all.end - 1.
  DEVICE void copy_rel_bias(const BiasedRows<S>& to, int begin, Range all) {
#pragma unroll
    for (int first = 0; first < S::BLOCK_N; first += WARP) {
      const int i = first + lane;
      copy_async<4>(to.bias() + i, rel_bias + begin + i, begin + i >= all.begin && begin + i < all.end);
    }
  }
};

}  // namespace xlnet_kernels::cuda
