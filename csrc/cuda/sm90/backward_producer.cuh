// Backward's producer warpgroup: brings a block's keys, then tile by tile the rows that see some of them, and rel_key.
//
// rel_key comes in slots of 64 rows. A tile of rows has three of them: for the block's first 64 keys the two that come
// last, for the others the two that come first; from one tile of rows to the next the window moves down by one slot.
#pragma once

#include "../scheduler.cuh"
#include "backward_memory.cuh"

namespace xlnet_kernels::cuda {

template <typename S>
struct BackwardProducer {
  using T = typename S::T;
  const Backward& a;
  const BackwardWarpgroupMemory<S> memory;
  const int b, h, j0;
  RingPlace<S::STAGES> stage;
  RingPlace<S::SLOTS> slot;

  DEVICE void run() {
    const Call& call = a.call;
    const RelAttention& p = call.p;
    const int lane = thread_index() % WARP;
    copy_keys();
    TileScheduler scheduler(rows_within_reach(p, j0, S::KEYS), S::BLOCK_M);
    int before = -2;  // the tile before
    for (;;) {
      Visibility visibility = Visibility::none;
      const int tile = scheduler.next(visibility, lane, [&](int i) {
        const RowTile rows = load_row_tile(call, b, i * S::BLOCK_M, S::BLOCK_M);
        const bool first = tile_visibility(call, rows, b, j0, S::BLOCK_N) != Visibility::none;
        const bool second = tile_visibility(call, rows, b, j0 + S::BLOCK_N, S::BLOCK_N) != Visibility::none;
        return first || second ? Visibility::some : Visibility::none;
      });
      if (tile >= scheduler.tiles) break;
      if constexpr (S::POSITIONS) {
        bring_runs(tile * S::BLOCK_M);
        continue;
      }
      announce(tile * S::BLOCK_M, tile != before + 1);
      copy_query_rows(tile * S::BLOCK_M, int(p.length));
      publish();
      const int window = int(p.rel_key.max_distance - p.mem_len) - (tile * S::BLOCK_M + S::BLOCK_M - 1) + j0;
      if (tile != before + 1)
        for (int i = 2; i > 0; --i) copy_rel_key(window + i * 64);
      copy_rel_key(window);
      before = tile;
    }
    announce(NO_ROW, false);
    const RingPlace<S::STAGES> last = stage;
    publish();
    memory.full_stage(last.index()).wait(last.parity());  // no thread ends with copies or arrivals under way
    for (uint32_t i = slot.passed < S::SLOTS ? 0 : slot.passed - S::SLOTS; i < slot.passed; ++i) {
      const RingPlace<S::SLOTS> filled{i};
      memory.full_slot(filled.index()).wait(filled.parity());
    }
    memory.full_keys().wait(0);
  }

  // A tile of 64 sorted rows, once for each run of them that one window serves: eight rows are 8 positions apart at
  // most, all of them 64.
  DEVICE void bring_runs(int first_row) {
    const RelAttention& p = a.call.p;
    const int end = smaller(first_row + S::BLOCK_M, int(p.length));
    for (int run_end; first_row < end; first_row = run_end) {
      run_end = end_of_run(first_row, end);
      announce_run({first_row, run_end});
      copy_query_rows(first_row, run_end);
      publish();
      const int window = int(p.rel_key.max_distance - p.mem_len) - row_position(p, b, run_end - 1) + j0;
#pragma unroll 1
      for (int i = 2; i >= 0; --i) copy_rel_key(window + i * 64);
    }
  }

  DEVICE int end_of_run(int first, int end) const {
    const int lane = thread_index() % WARP;
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

  // The first warp writes what the consumers ask of a run of rows.
  DEVICE void announce_run(RowRun run) {
    memory.empty_stage(stage.index()).wait(stage.parity() ^ 1);
    if (thread_index() >= WARP) return;
    const RelAttention& p = a.call.p;
    const int last_position = row_position(p, b, run.end - 1);
    SortedRows& to = memory.rows(stage.index());
#pragma unroll 1
    for (int i = thread_index(); i < S::BLOCK_M; i += WARP) {
      const int row = run.first + i;
      to.index[i] = run.has(row) ? row_index(p, b, row) : -1;
      to.shift[i] = run.has(row) ? int8_t(last_position - row_position(p, b, row)) : int8_t(-1);
    }
    sync_warp();
    if (thread_index() > 0) return;
    to.last_position = last_position;
    RowTile rows = load_row_tile(a.call, b, run.first / S::BLOCK_M * S::BLOCK_M, S::BLOCK_M);
    rows.first_position = row_position(p, b, run.first);
    rows.last_position = last_position;
    RowTileInfo info{run.first, {}, true};
    for (int i = 0; i < S::CONSUMERS; ++i)
      info.visibility[i] = tile_visibility(a.call, rows, b, j0 + i * S::BLOCK_N, S::BLOCK_N);
    memory.info(stage.index()) = info;
    memory.full_stage(stage.index()).arrive();
  }

  DEVICE void announce(int first_row, bool begins_run) {
    memory.empty_stage(stage.index()).wait(stage.parity() ^ 1);
    if (thread_index() > 0) return;
    RowTileInfo info{first_row, {}, begins_run};
    if (first_row != NO_ROW) {
      const RowTile rows = load_row_tile(a.call, b, first_row, S::BLOCK_M);
      for (int i = 0; i < S::CONSUMERS; ++i)
        info.visibility[i] = tile_visibility(a.call, rows, b, j0 + i * S::BLOCK_N, S::BLOCK_N);
    }
    memory.info(stage.index()) = info;
    memory.full_stage(stage.index()).arrive();
  }

  // The stage is full when this thread's copies have arrived.
  DEVICE void publish() {
    memory.full_stage(stage.index()).arrive_after_copies();
    stage.advance();
  }

  // use(row, column) of every chunk of a matrix that is this thread's to copy
  template <typename Use>
  DEVICE static void for_each_chunk(Use use) {
    constexpr int CHUNKS = S::HEAD_DIM / CHUNK<T>;
#pragma unroll 1
    for (int row = thread_index() / CHUNKS; row < 64; row += WARPGROUP / CHUNKS)
      use(row, thread_index() % CHUNKS * CHUNK<T>);
  }

  DEVICE void copy_keys() {
    const RelAttention& p = a.call.p;
    const int keys = int(p.mem_len + p.key_len);
    const auto key_rows = key_rows_of<const T>(p, p.memory.key, p.keys.key, b, h);
    const auto value_rows = key_rows_of<const T>(p, p.memory.value, p.keys.value, b, h);
    for (int i = 0; i < S::CONSUMERS; ++i)
      for_each_chunk([&](int row, int column) {
        const int j = j0 + i * S::BLOCK_N + row;
        copy_async<16>(memory.keys(i).at(row, column), key_rows(j) + column, j < keys);
        copy_async<16>(memory.values(i).at(row, column), value_rows(j) + column, j < keys);
      });
    copy_key_labels<WARPGROUP, S::KEYS>(a.call, memory.labels(), b, h, j0);
    memory.full_keys().arrive_after_copies();
  }

  // Rows of query and of the output's gradient; zeros for fully masked rows: zero times NaN would be NaN.
  DEVICE void copy_query_rows(int first_row, int end) {
    const RelAttention& p = a.call.p;
    const auto query_rows = rows_of<const T>(p.rows.query, b, h),
               grad_out_rows = rows_of<const T>(a.gradients.out, b, h);
    const int64_t all_rows = p.batch * p.heads * p.length;
    const float* const inverse = a.gradients.row_values + INVERSE * all_rows + (b * p.heads + h) * p.length;
    const auto queries = memory.queries(stage.index()), grad_out = memory.grad_out(stage.index());
    const int32_t* const order = S::POSITIONS && p.rows.order ? p.rows.order + b * p.length : nullptr;
    for_each_chunk([&](int row, int column) {
      const int sorted_row = first_row + row;
      const int i = order && sorted_row < end ? order[sorted_row] : sorted_row;
      const bool inside = sorted_row < end && inverse[i] != 0;
      copy_async<16>(queries.at(row, column), query_rows(i) + column, inside);
      copy_async<16>(grad_out.at(row, column), grad_out_rows(i) + column, inside);
    });
  }

  DEVICE void copy_rel_key(int begin) {
    memory.empty_slot(slot.index()).wait(slot.parity() ^ 1);
    const RelAttention& p = a.call.p;
    // Rows that no pair reads count as outside: the tile's rows beyond the last would read them, and NaN stays NaN.
    const int first =
                  max(0, int(p.rel_key.max_distance - p.mem_len - (S::POSITIONS ? p.key_len : p.length) + 1)),
              read = min(int(p.rel_len), int(p.rel_key.max_distance + p.key_len)) - first, i = thread_index();
    const auto rel_rows = rows_of<const T>(p.rel_key.rows, b, h);
    const auto rel_key = memory.rel_key(slot.index());
    if (S::POSITIONS && begin >= first && begin - first + 64 <= read) {  // as mostly: nothing to ask
      constexpr int CHUNKS = S::HEAD_DIM / CHUNK<T>, STEP = WARPGROUP / CHUNKS, TOGETHER = S::HEAD_DIM > 64 ? 1 : 4;
      const int row = i / CHUNKS, column = i % CHUNKS * CHUNK<T>;
      uint32_t to = shared_address(rel_key.at(row, column));  // every eighth row has the same swizzle
      const T* from = rel_rows(begin + row) + column;
#pragma unroll TOGETHER
      for (int more = 0; more < 64; more += STEP, to += STEP * rel_key.ROW, from += int64_t(STEP) * rel_rows.stride)
        copy_whole(to, from);
    } else {
      for_each_chunk([&](int row, int column) {
        copy_async<16>(rel_key.at(row, column), rel_rows(begin + row) + column,
                       uint32_t(begin + row - first) < uint32_t(max(read, 0)));
      });
    }
    if (i < 64)
      copy_async<4>(memory.rel_bias(slot.index()) + i, rel_bias_of(a.call, b, h) + begin + i,
                    uint32_t(begin + i - first) < uint32_t(max(read, 0)));
    memory.full_slot(slot.index()).arrive_after_copies();
    slot.advance();
  }
};

}  // namespace xlnet_kernels::cuda
