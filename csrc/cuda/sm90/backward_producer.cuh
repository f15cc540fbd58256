// Backward's producer, a warp: brings a block's keys, then tile by tile the rows that see some of them, and rel_key.
//
// rel_key comes in slots of 64 rows. A tile of rows has three of them: for the block's first 64 keys the two that come
// last, for the others the two that come first; from one tile of rows to the next the window moves down by one slot.
#pragma once

#include "../scheduler.cuh"
#include "../shift.cuh"
#include "../unread.cuh"
#include "backward_memory.cuh"
#include "copies.cuh"

namespace xlnet_kernels::cuda {

template <typename S>
struct BackwardProducer {
  using T = typename S::T;
  const Backward& a;
  const BackwardWarpgroupMemory<S> memory;
  const int b, h, j0;
  CyclicPlace<S::STAGES> stage;
  CyclicPlace<S::SLOTS> slot;
  bool has_unread_rel_rows = false;

  // Asked for where it is needed: else all addresses that depend on it alone would be kept.
  DEVICE static int own_lane() { return kept_in_register(thread_index()); }

  DEVICE void run() {
    const Call& call = a.call;
    const RelAttention& p = call.p;
    copy_keys();
    has_unread_rel_rows = unread_rel_rows(call, b, h).any(int(p.rel_len), own_lane());
    TileScheduler scheduler(rows_within_reach(p, j0, S::KEYS), S::BLOCK_M);
    int before = -2;  // the tile before
    for (;;) {
      TileState found = Visibility::none;
      const int tile = scheduler.next(found, own_lane(), [&](int i) {
        const RowTile rows = load_row_tile(call, b, i * S::BLOCK_M, S::BLOCK_M);
        const bool first = rows.visibility(call, b, j0, S::BLOCK_N) != Visibility::none;
        const bool second = rows.visibility(call, b, j0 + S::BLOCK_N, S::BLOCK_N) != Visibility::none;
        return first || second ? Visibility::some : Visibility::none;
      });
      if (tile >= scheduler.tiles) break;
      if constexpr (S::POSITIONS) {
        bring_runs(tile * S::BLOCK_M);
        continue;
      }
      announce(tile, tile != before + 1);
      copy_query_rows(tile * S::BLOCK_M);
      copy_row_values([&](int i) { return tile * S::BLOCK_M + i < a.call.p.length ? tile * S::BLOCK_M + i : -1; });
      publish();
      copy_window(tile * S::BLOCK_M + S::BLOCK_M - 1, tile == before + 1 ? 1 : 3);
      before = tile;
    }
    announce(RowTileInfo::NO_TILE, false);
    const CyclicPlace<S::STAGES> last = stage;
    publish();
    memory.full_stage(last.index()).wait(last.parity());  // no thread ends with copies or arrivals under way
    for (uint32_t i = slot.passed < S::SLOTS ? 0 : slot.passed - S::SLOTS; i < slot.passed; ++i) {
      const CyclicPlace<S::SLOTS> filled{i};
      memory.full_slot(filled.index()).wait(filled.parity());
    }
    memory.full_keys().wait(0);
  }

  // A tile of 64 sorted rows, once for each run of them that one window serves: eight rows are 8 positions apart at
  // most, all of them 64.
  DEVICE void bring_runs(int first_row) {
    const int end = smaller(first_row + S::BLOCK_M, int(a.call.p.length));
    for (int run_end; first_row < end; first_row = run_end) {
      run_end = end_of_run(first_row, end);
      const int last_position = row_position(a.call.p, b, run_end - 1);
      announce_run(first_row, run_end, last_position);
      copy_run();
      copy_row_values([&](int i) { return memory.rows(stage.index()).index[i]; });
      publish();
      copy_window(last_position, 3);
    }
  }

  DEVICE int end_of_run(int first, int end) const {
    const int lane = own_lane();
    const auto position = [&](int row) { return row_position(a.call.p, b, row); };
    const int eight = smaller(first + lane % 8 * 8, end - 1);
    const int from = position(eight), to = position(smaller(eight + 7, end - 1));
    if (!ballot(to - from > 8) && shuffle(to, 7) - shuffle(from, 0) <= 64) return end;  // as mostly
    for (int i = first + 1; i < end; i += WARP) {
      const int row = i + lane;
      const bool is_far =
          row < end && (position(row) - position(row - (row - first) % 8) > 8 || position(row) - position(first) > 64);
      const uint32_t far = ballot(is_far);
      if (far) return i + first_bit(far);
    }
    return end;
  }

  // Announces sorted rows first .. end - 1; those that are fully masked see nothing.
  DEVICE void announce_run(int first, int end, int last_position) {
    memory.empty_stage(stage.index()).wait(stage.parity() ^ 1);
    const RelAttention& p = a.call.p;
    const int lane = own_lane();
    const float* const inverse = inverse_row_sums();
    SortedRows& to = memory.rows(stage.index());
#pragma unroll 1
    for (int i = lane; i < S::BLOCK_M; i += WARP) {
      const int row = first + i, shift = row < end ? last_position - row_position(p, b, row) : -1;
      // Where positions do not ascend, a shift may be any: such a row is left out, because the band has no column for
      // it.
      const bool is_served = shift >= 0 && shift <= 64;
      const int index = is_served ? row_index(p, b, row) : -1;
      to.index[i] = index >= 0 && inverse[index] != 0 ? index : -1;
      to.shift[i] = is_served ? int8_t(shift) : int8_t(-1);
    }
    sync_warp();  // the others read it in copy_run, the consumers when the stage is full
    if (lane > 0) return;
    to.first = first;
    to.last_position = last_position;
    RowTile rows = load_row_tile(a.call, b, first / S::BLOCK_M * S::BLOCK_M, S::BLOCK_M);
    rows.first_position = row_position(p, b, first);
    rows.last_position = last_position;
    RowTileInfo info = RowTileInfo::of(first / S::BLOCK_M);
    info.word |= RowTileInfo::BEGINS_RUN;
    add_visibility(info, rows);
    announce(info);
  }

  DEVICE void announce(uint32_t tile, bool begins_run) {
    memory.empty_stage(stage.index()).wait(stage.parity() ^ 1);
    if (own_lane() > 0) return;
    RowTileInfo info = RowTileInfo::of(tile);
    if (begins_run) info.word |= RowTileInfo::BEGINS_RUN;
    if (tile != RowTileInfo::NO_TILE) add_visibility(info, load_row_tile(a.call, b, tile * S::BLOCK_M, S::BLOCK_M));
    announce(info);
  }
  DEVICE void announce(RowTileInfo info) {
    memory.info(stage.index()) = info;
    memory.full_stage(stage.index()).arrive();
  }
  DEVICE void add_visibility(RowTileInfo& info, const RowTile& rows) const {
    for (int i = 0; i < S::CONSUMERS; ++i) {
      const int first_key = j0 + i * S::BLOCK_N;
      const Visibility visibility = rows.visibility_by_pairs(a.call, b, first_key, S::BLOCK_N);
      info.add(i, rows.with_own_keys(a.call.p, visibility, first_key, S::BLOCK_N));
    }
  }

  // The stage is full when this lane's copies, and all others', have arrived.
  DEVICE void publish() {
    memory.full_stage(stage.index()).arrive_after_copies();
    stage.advance();
  }

  DEVICE void copy_keys() {
    const RelAttention& p = a.call.p;
    const int keys = int(p.mem_len + p.key_len);
    const auto key_rows = key_rows_of<const T>(p, p.memory.key, p.keys.key, b, h);
    const auto value_rows = key_rows_of<const T>(p, p.memory.value, p.keys.value, b, h);
    const UnreadRows unread = unread_keys(a.call, b, h);
    const auto is_inside = [&](int j) { return j < keys; };
    const int lane = own_lane();
#pragma unroll 1
    for (int i = 0; i < S::CONSUMERS; ++i) {
      copy_rows_inside(memory.keys(i), key_rows, j0 + i * S::BLOCK_N, lane,
                       [&](int j) { return j < keys && !unread.has(j); });
      copy_rows_inside(memory.values(i), value_rows, j0 + i * S::BLOCK_N, lane, is_inside);
      if constexpr (S::HAS_RANK_PAIRS)
        if (is_inside(j0 + i * S::BLOCK_N))
          copy_rank_pairs<S::BLOCK_N>(a.call, memory.rank_pairs(i), b, j0 + i * S::BLOCK_N, lane);
    }
    copy_key_labels<WARP, S::KEYS>(a.call, memory.labels(), b, h, j0, lane);
    memory.full_keys().arrive_after_copies();
  }

  // Rows of query and of the output's gradient; zeros for fully masked rows: zero times NaN would be NaN.
  DEVICE void copy_query_rows(int first_row) {
    const RelAttention& p = a.call.p;
    const int lane = own_lane();
    const auto query_rows = rows_of<const T>(p.rows.query, b, h),
               grad_out_rows = rows_of<const T>(a.gradients.out, b, h);
    const float* const inverse = inverse_row_sums();
    const auto queries = memory.queries(stage.index()), grad_out = memory.grad_out(stage.index());
    const auto is_read = [&](int i) { return i < p.length && inverse[i] != 0; };
    if (ballot(!is_read(first_row + lane) || !is_read(first_row + WARP + lane))) {
      copy_rows_inside(queries, query_rows, first_row, lane, is_read);
      copy_rows_inside(grad_out, grad_out_rows, first_row, lane, is_read);
    } else {
      copy_whole_rows(queries, query_rows, first_row, lane);
      copy_whole_rows(grad_out, grad_out_rows, first_row, lane);
    }
  }

  // Rows of query and of the output's gradient for the run that was announced.
  DEVICE void copy_run() {
    const int lane = own_lane();
    const auto query_rows = rows_of<const T>(a.call.p.rows.query, b, h),
               grad_out_rows = rows_of<const T>(a.gradients.out, b, h);
    const int* const index = memory.rows(stage.index()).index;
    const auto is_read = [&](int i) { return index[i] >= 0; };
    copy_rows_inside(memory.queries(stage.index()), [&](int i) { return query_rows(index[i]); }, 0, lane, is_read);
    copy_rows_inside(memory.grad_out(stage.index()), [&](int i) { return grad_out_rows(index[i]); }, 0, lane, is_read);
  }

  // Statistics, segments and ranks of rows; index(i): place of row i of the stage in the tensors, negative for none.
  template <typename Index>
  DEVICE void copy_row_values(Index index) {
    if constexpr (S::HAS_ROW_VALUES) {
      const RelAttention& p = a.call.p;
      StageRows& to = memory.row_values(stage.index());
      const int64_t all_rows = p.batch * p.heads * p.length, first = (b * p.heads + h) * p.length;
#pragma unroll 1
      for (int i = own_lane(); i < S::BLOCK_M; i += WARP) {
        const int row = index(i);
        const float* from = a.gradients.row_values + first + row;
#pragma unroll 1
        for (int value = 0; value < ROW_VALUES; ++value, from += all_rows)
          copy_async<4>(&to.value[value][i], from, row >= 0);
        if (p.segments.query_ids) copy_async<4>(&to.segment[i], p.segments.query_ids + b * p.length + row, row >= 0);
        if (p.rank_mask.query_rank) copy_async<4>(&to.rank[i], p.rank_mask.query_rank + b * p.length + row, row >= 0);
      }
    }
  }

  // 1 / row_sum of this head's rows; 0 for those that are fully masked.
  DEVICE const float* inverse_row_sums() const {
    const RelAttention& p = a.call.p;
    return a.gradients.row_values + INVERSE * (p.batch * p.heads * p.length) + (b * p.heads + h) * p.length;
  }

  // The last `count` slots of the window of rows of which the last one is there.
  DEVICE void copy_window(int last_position, int count) {
    const int window = int(a.call.p.rel_key.max_distance - a.call.p.mem_len) - last_position + j0;
#pragma unroll 1
    for (int i = count - 1; i >= 0; --i) copy_rel_key(window + i * 64);
  }

  DEVICE void copy_rel_key(int begin) {
    memory.empty_slot(slot.index()).wait(slot.parity() ^ 1);
    const RelAttention& p = a.call.p;
    const int lane = own_lane();
    const Range read = read_rel_rows<S::POSITIONS>(p);
    const UnreadRows unread = unread_rel_rows(a.call, b, h);
    const auto is_read = [&](int row) {
      return row >= read.begin && row < read.end && !(has_unread_rel_rows && unread.has(row));
    };
    const auto rel_rows = rows_of<const T>(p.rel_key.rows, b, h);
    const auto rel_key = memory.rel_key(slot.index());
    if (begin >= read.begin && begin + 64 <= read.end && !has_unread_rel_rows)
      copy_whole_rows(rel_key, rel_rows, begin, lane);
    else
      copy_rows_inside(rel_key, rel_rows, begin, lane, is_read);
    for (int i = lane; i < 64; i += WARP)
      copy_async<4>(memory.rel_bias(slot.index()) + i, rel_bias_of(a.call, b, h) + begin + i, is_read(begin + i));
    memory.full_slot(slot.index()).arrive_after_copies();
    slot.advance();
  }
};

}  // namespace xlnet_kernels::cuda
