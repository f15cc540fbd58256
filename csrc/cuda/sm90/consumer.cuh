// A consumer warpgroup: 64 rows of the block, whose scores never leave registers.
#pragma once

#include "../dropout.cuh"
#include "../forward_load.cuh"
#include "../segments.cuh"
#include "../softmax.cuh"
#include "accumulators.cuh"
#include "memory.cuh"
#include "shift.cuh"

namespace xlnet_kernels::cuda {

template <typename S>
struct Consumer {
  using T = typename S::T;
  static constexpr int D = S::HEAD_DIM, STEPS = D / DEPTH<T>, TILES = S::BLOCK_N / 8;
  using Band = float[TILES][4];              // 64 columns of the window
  static constexpr bool OVERLAPS = D <= 64;  // wide heads have no registers for products under the softmax

  const Call& call;
  const ForwardTile<S>& tile;
  const WarpgroupMemory<S> memory;
  const float scale;
  WarpgroupShift<S::POSITIONS> shift;
  const bool is_second;  // of the block's two warpgroups: its new rows of rel_key are those of the stage before
  StagePlace<S> place;
  int unreleased = S::ALL_STAGES;  // the stage that finish_values releases: at first one that is none
  Fragment q[STEPS];
  RowLabels labels[2];
  uint32_t ranks = 0;       // of both rows, as halves
  float different[2] = {};  // what segments add for keys of another one
  typename S::Softmax softmax;
  float out[1][D / 8][4] = {};
  Fragment weights[TILES / 2] = {};  // of the tile whose values are being multiplied

  DEVICE Consumer(const Call& call, const ForwardTile<S>& tile, const WarpgroupMemory<S>& memory)
      : call(call),
        tile(tile),
        memory(memory),
        scale(float(call.p.scale) * LOG2_E),
        shift(tile.lane.id),
        is_second(tile.lane.warp >= WARPGROUP / WARP) {}

  DEVICE float* lse() const { return static_cast<float*>(call.p.lse) + int64_t(tile.head) * call.p.length; }

  // Also after `run`, because the last tile's stage stays noted when it is released.
  DEVICE bool had_tile() const { return unreleased != S::ALL_STAGES; }

  // Where 64 rows of output may lie after `run`: the stage that announces the end holds no operands. Each consumer has
  // one matrix of it.
  DEVICE Panels<T, D> free_rows() const {
    const WarpgroupStage<S> last = memory.stage(place.offset);
    return last.keys_or_rel_key(!is_second).rows();
  }

  // Leaves in lse what segments give to every key, until the end.
  DEVICE void load_rows() {
    const RelAttention& p = call.p;
    const HeadRows<const T> query = rows_of<const T>(p.rows.query, tile.b, tile.h);
    const int sorted_row = tile.sorted_row(0), t = tile.lane.t;
    const QueryRow row[2] = {load_query_row(p, tile.b, sorted_row), load_query_row(p, tile.b, sorted_row + 8)};
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const T* from = query(row[i % 2].index) + step * DEPTH<T> + 2 * t + i / 2 * CHUNK<T>;
        q[step].word[i] = row[i % 2].inside ? *reinterpret_cast<const uint32_t*>(from) : 0;
      }
    float same[2] = {};
    segment_scores<T>(p, q, tile.h, t, scale, same, different);
    for (int r = 0; r < 2; ++r) {
      labels[r] = row[r];
      ranks |= rank_as_half(row[r].rank) << (16 * r);
      if (!row[r].inside) softmax.row_max[0][r] = 0;  // it would look for its first key in every tile
      if (row[r].inside && t == 0) lse()[row[r].index] = same[r];
    }
  }

  // All windows of rel_key, mostly one. A window's halves change places from tile to tile, so that the upper one is the
  // next tile's lower one.
  DEVICE void run() {
    // Initialised, because ptxas waits after each wgmma with operands that may be unset.
    Band first = {}, second = {};
    while (begin_window(first, second)) {
      while (attend(first, second) && attend(second, first)) {
      }
      if constexpr (OVERLAPS) finish_values();
    }
  }

  // Both halves of the next tile's window; false if there are no more tiles.
  DEVICE bool begin_window(Band& lower, Band& upper) {
    const int own = place.offset;
    const WarpgroupStage<S> begin = memory.stage(own);
    begin.full().wait(place.parity);
    if (uniform(begin.info().flags) & TileInfo::ENDS) return false;
    if constexpr (S::POSITIONS) find_shift({begin.info().first, begin.info().end});
    place.advance();
    const WarpgroupStage<S> stage = memory.stage(place.offset);
    stage.full().wait(place.parity);
    fence_shared_memory();
    const BiasedRows<S> lower_rows = begin.keys_or_rel_key(is_second);
    const BiasedRows<S> upper_rows = memory.stage(is_second ? own : place.offset).rel_key();
    start_scores(lower, lower_rows.bias(), tile.lane.t);
    start_scores(upper, upper_rows.bias(), tile.lane.t);
    pin(lower), pin(upper);
    fence_products();
    multiply_query(lower, lower_rows);
    multiply_query(upper, upper_rows);
    wait_for_products();
    pin(lower), pin(upper);
    release(begin.empty(), tile.lane.id);
    unreleased = S::ALL_STAGES;
    return true;
  }

  DEVICE void find_shift(RowRun run) {
    const RelAttention& p = call.p;
    const int position = window_position<S>(p, tile.b, tile.first_row, run) + 64 * is_second;
    int shifts[2];
    for (int r = 0; r < 2; ++r) {
      const int row = tile.sorted_row(0) + 8 * r;
      shifts[r] = run.has(row) ? position - row_position(p, tile.b, row) : -1;
    }
    shift.find(shifts, tile.lane.id);
  }

  // One tile of keys. Leaves the new half of the next tile's window where the lower one was; false if the window ends.
  DEVICE bool attend(Band& lower, const Band& upper) {
    if constexpr (OVERLAPS)
      return attend_with_overlap(lower, upper);
    else
      return attend_in_turn(lower, upper);
  }

  // The next half is multiplied under this tile's softmax, the values under the next tile's shift. Products that an
  // earlier turn of the loop began can only be waited for all at once (ptxas C7514).
  DEVICE bool attend_with_overlap(Band& lower, const Band& upper) {
    const int own = place.offset;
    const WarpgroupStage<S> stage = memory.stage(own);
    Band score;
    add_positions(score, lower, upper, stage);
    finish_values();  // the tile before's
    pin(score);
    fence_products();
    multiply_query(score, stage.keys());  // under way while the next stage is waited for
    const NextHalf next = advance_to_next();
    start_scores(lower, next.rows.bias(), tile.lane.t);
    pin(lower);
    fence_products();
    multiply_query(lower, next.rows);
    wait_for_older_products<1>();
    pin(score);

    weigh(score, stage);
    wait_for_products();
    pin(lower);
    unreleased = own;
    begin_values(stage);
    return next.goes_on;
  }

  // The next half is multiplied together with the values, for want of registers.
  DEVICE bool attend_in_turn(Band& lower, const Band& upper) {
    const int own = place.offset;
    const WarpgroupStage<S> stage = memory.stage(own);
    Band score;
    add_positions(score, lower, upper, stage);
    pin(score);
    fence_products();
    multiply_query(score, stage.keys());
    wait_for_products();
    pin(score);

    weigh(score, stage);
    const NextHalf next = advance_to_next();
    start_scores(lower, next.rows.bias(), tile.lane.t);
    pin(lower);
    unreleased = own;
    begin_values(stage);
    if (next.goes_on) {
      fence_products();
      multiply_query(lower, next.rows);
    }
    finish_values();
    pin(lower);
    return next.goes_on;
  }

  // u.k, position, content: in backward's order. Content comes last, since a sum of two needs no register's move to
  // where products are added.
  DEVICE void add_positions(Band& score, Band& lower, const Band& upper, const WarpgroupStage<S>& stage) {
    start_scores(score, stage.keys().bias(), tile.lane.t);
    shift.add_window(score, lower, upper, tile.lane.warp);
    // Both, to avoid that the next half begins in other registers before the shift has read this one.
    pin(score), pin(lower);
  }

  // Rows of rel_key that are new to the next tile's window; where the window ends, rows without use.
  struct NextHalf {
    BiasedRows<S> rows;
    bool goes_on;
  };
  DEVICE NextHalf advance_to_next() {
    const int own = place.offset;
    place.advance();
    const WarpgroupStage<S> next = memory.stage(place.offset);
    next.full().wait(place.parity);
    fence_shared_memory();
    const bool goes_on = !(uniform(next.info().flags) & (TileInfo::ENDS | TileInfo::BEGINS));
    return {memory.stage(is_second || !goes_on ? own : place.offset).rel_key(), goes_on};
  }

  // out += weights v: under way until finish_values.
  DEVICE void begin_values(const WarpgroupStage<S>& stage) {
    pin_values();
    fence_products();
#pragma unroll
    for (int k = 0; k < TILES / 2; ++k) wgmma<T, 1>(out[0], weights[k].word, stage.values().rows_from(k * DEPTH<T>));
    commit_products();
  }

  // Until no product is under way; then the stage before is free.
  DEVICE void finish_values() {
    wait_for_products();
    pin_values();
    release(memory.stage(unreleased).empty(), tile.lane.id);
  }

  DEVICE void pin_values() {
    pin(out[0]);
#pragma unroll
    for (int k = 0; k < TILES / 2; ++k) pin(weights[k].word);
  }

  // sum += q rows'
  DEVICE void multiply_query(Band& sum, const BiasedRows<S>& rows) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) wgmma<T, 0>(sum, q[k].word, rows.rows().columns_from(k * DEPTH<T>));
    commit_products();
  }

  // Segments, mask, softmax, dropout: scores become exponentials, as the product with the values takes them.
  DEVICE void weigh(Band& score, const WarpgroupStage<S>& stage) {
    const uint32_t flags = uniform(stage.info().flags);
    scale_scores(score, stage, flags);
    softmax.template step<T>(0, score, out[0], weights);
    if constexpr (S::DROPOUT) drop_out(stage.info().first);
  }

  // Scale, segments and mask.
  DEVICE void scale_scores(Band& score, const WarpgroupStage<S>& stage, uint32_t flags) {
    const KeyLabels keys = stage.labels();
    if (S::HAS_ONE_SEGMENT_WAY && flags & TileInfo::ONE_SEGMENT)
      add_segment(score, scale, stage.info().segment, labels, different);
    else
      add_segments(score, scale, keys.segment, labels, different, tile.lane.t);
    if (flags & TileInfo::BY_RANK)
      hide_by_rank(score, ranks, stage.rank_pairs(), tile.lane.t);
    else if (flags & TileInfo::OWNS)
      hide_by_rank_but_own(score, ranks, stage.rank_pairs(), call.p, tile.b, tile.sorted_row(0), stage.info().first,
                           tile.lane.t);
    else if (flags & TileInfo::PAIR_BY_PAIR)
      hide_pair_by_pair(score, stage.info().first, keys.rank);
    if constexpr (S::POSITIONS)
      if (flags & TileInfo::SOME_ROWS) shift.hide_others(score);
  }

  // Whatever else decides, found in a loop of its own as bits: small code, which the tiles before need not step over.
  DEVICE void hide_pair_by_pair(float (&score)[TILES][4], int j0, const int32_t* key_rank) {
    const RelAttention& p = call.p;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const QueryRow row = load_query_row(p, tile.b, tile.sorted_row(0) + 8 * r);
      const uint32_t visible = RowVisibility(p, row, tile.b, tile.h).columns<S::BLOCK_N>(j0, key_rank, tile.lane.t);
#pragma unroll
      for (int n = 0; n < TILES; ++n)
        for (int parity = 0; parity < 2; ++parity)
          if (!(visible >> (2 * n + parity) & 1)) score[n][2 * r + parity] = -INFINITY;
    }
  }

  // Zeros for the weights of 64 keys from j0 on that are dropped.
  DEVICE void drop_out(int j0) {
    const Philox philox = load_philox(call.p.dropout, tile.b, tile.head);
    if constexpr (D > 64) {  // no registers for more than a bit of each
      uint32_t bits = 0;
#pragma unroll 1
      for (int r = 0; r < 2; ++r)
        bits |= kept_columns<S::BLOCK_N>(philox, dropout_row(r), j0, tile.lane.t) << (16 * r);
      drop<T>(weights, bits);
      return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t words[4];
      draw_bytes(philox, dropout_row(r), j0, tile.lane.t, words);
      // added to a byte: bit 15 says whether that is not less than the threshold
      const uint32_t carry = (0x8000 - byte_threshold(philox, dropout_row(r), j0)) * 0x10001;
#pragma unroll
      for (int word = 0; word < 4; ++word)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t bytes = __byte_perm(words[word], 0, half ? 0x4342 : 0x4140);
          weights[word].word[2 * half + r] &= signs_of_halves(bytes + carry);
        }
    }
  }
  // The number by which dropout knows this lane's row r.
  DEVICE int dropout_row(int r) const {
    const int index = smaller(tile.sorted_row(0) + 8 * r, int(call.p.length) - 1);
    return S::POSITIONS ? row_index(call.p, tile.b, index) : index;
  }
};

}  // namespace xlnet_kernels::cuda
