// A consumer warpgroup of backward: 64 keys, which stay, and tile by tile 64 rows.
#pragma once

#include "../backward_products.cuh"
#include "../bias.cuh"
#include "accumulators.cuh"
#include "backward_positions.cuh"
#include "tile_rows.cuh"

namespace xlnet_kernels::cuda {

template <typename S>
struct BackwardConsumer {
  using T = typename S::T;
  static constexpr int D = S::HEAD_DIM, TILES = S::BLOCK_N / 8, NO_WINDOW = -2147483647 - 1;
  using Scores = float[TILES][4];

  const Backward& a;
  const KeyTile<S>& tile;
  const BackwardWarpgroupMemory<S> memory;
  const int consumer;
  Lane lane;  // warp: of this warpgroup
  BackwardShift<S::POSITIONS> shift;
  CyclicPlace<S::STAGES> stage;
  CyclicPlace<S::SLOTS> upper;  // of the window's halves; the lower one comes after it
  KeySegments segments;
  float key_bias[S::KEEPS_BIAS ? TILES : 1][2];  // of this lane's columns
  float dK[D / 8][4] = {}, dV[D / 8][4] = {}, key_sum[4] = {};
  Scores kept_dR = {};
  int kept_window = NO_WINDOW;

  DEVICE BackwardConsumer(const Backward& a, const KeyTile<S>& tile, const BackwardWarpgroupMemory<S>& memory,
                          int consumer, Lane lane)
      : a(a), tile(tile), memory(memory), consumer(consumer), lane(lane), shift(lane.id) {}

  // Where registers are scarce, what follows from the lane is found again from here on, not kept.
  DEVICE void forget() {
    if constexpr (D > 64) {
      lane.id = kept_in_register(lane.id);
      lane.g = lane.id / 4, lane.t = lane.id % 4;
    }
  }
  DEVICE CyclicPlace<S::SLOTS> lower() const { return {upper.passed + 1}; }
  DEVICE KeyLabels labels() const {
    const KeyLabels all = memory.labels();
    return {all.rank + consumer * S::BLOCK_N, all.segment + consumer * S::BLOCK_N, all.bias + consumer * S::BLOCK_N};
  }
  DEVICE int window_half(bool is_upper) const { return (is_upper ? upper : lower()).index(); }

  DEVICE void run() {
    make_key_biases<T, S::BLOCK_N, 4>(a.call.p, tile.key_rows, tile.h, tile.j0, lane.warp, labels().bias);
    sync_warpgroup(1 + consumer);
    memory.full_keys().wait(0);
    segments = KeySegments(labels().segment, lane.id);
    if constexpr (S::KEEPS_BIAS)
#pragma unroll
      for (int n = 0; n < TILES; ++n)
        for (int parity = 0; parity < 2; ++parity)
          key_bias[n][parity] = float_of(kept_in_register(bits_of(labels().bias[8 * n + 2 * lane.t + parity])));
    while (step()) continue;
    wait_for_turn();
    add_kept_rel_key_gradient();
    tell_that_all_is_added();
  }

  // Nothing of a tile is added to global memory before.
  DEVICE void wait_for_turn() const {
    if constexpr (S::ORDERED) memory.may_add(consumer).wait(stage.passed % 2);
  }
  // All that a tile adds, but for kept_dR: later keys add to its rows of rel_key with later rows of query alone.
  DEVICE void tell_that_all_is_added() const {
    if constexpr (S::ORDERED) release(memory.has_added(consumer), lane.id);
  }

  // One tile of rows; false if there was no more.
  DEVICE bool step() {
    memory.full_stage(stage.index()).wait(stage.parity());
    const RowTileInfo info = memory.info(stage.index());
    if (info.tile() == RowTileInfo::NO_TILE) return false;
    if (info.has(RowTileInfo::BEGINS_RUN)) begin_run();
    memory.full_slot(upper.index()).wait(upper.parity());
    memory.full_slot(lower().index()).wait(lower().parity());
    const PairVisibility visibility = info.visibility(consumer);
    if (visibility.visibility != Visibility::none) {
      add_gradients(info.tile(), visibility);
    } else if (S::ORDERED) {
      wait_for_turn();
      add_kept_rel_key_gradient();
      kept_window = NO_WINDOW;
    }
    tell_that_all_is_added();
    release(memory.empty_slot(upper.index()), lane.id);
    upper.advance();
    release(memory.empty_stage(stage.index()), lane.id);
    stage.advance();
    return true;
  }

  // Slots that this warpgroup has no use for: the last of the run before, the first of this one.
  DEVICE void begin_run() {
    for (int i = upper.passed > 0 ? 0 : 1 + consumer; i < 2; ++i) {
      memory.full_slot(upper.index()).wait(upper.parity());
      release(memory.empty_slot(upper.index()), lane.id);
      upper.advance();
    }
  }

  DEVICE TileRows<S> tile_rows(int tile) const {
    return {a.call.p, memory.rows(stage.index()), memory.row_values(stage.index()), tile, lane};
  }

  DEVICE void add_gradients(int row_tile, PairVisibility visibility) {
    Scores score;
    Fragment dS[TILES / 2];
    forget();
    if constexpr (S::POSITIONS) shift.move(memory.rows(stage.index()), memory.band(consumer), lane);
    const uint32_t kept = S::DROPOUT ? draw_dropout(tile, tile_rows(row_tile), lane.t) : 0;
    fence_shared_memory();
    make_scores(score);
    forget();
    const TileRows<S> rows = tile_rows(row_tile);
    make_score_gradients(rows, visibility, kept, score, dS);
    fence_shared_memory();
    sync_warpgroup(1 + consumer);
    forget();
    Fragment transposed[4];
    add_key_gradients(transposed);
#pragma unroll
    for (int column = 0; column < D; column += 64) add_query_gradient(rows, dS, transposed, column);
    if (a.gradients.sums.rel_key.data) add_rel_key_gradient(row_tile);
    sync_warpgroup(1 + consumer);  // all warps have read the stored tile
  }

  // In forward's order of additions: u.k, position, content.
  DEVICE void make_scores(Scores& score) {
    const auto queries = memory.queries(stage.index());
    Fragment query[S::QUERY_IN_REGISTERS ? D / 16 : 1];
    if constexpr (S::QUERY_IN_REGISTERS)
#pragma unroll
      for (int k = 0; k < D / 16; ++k) pin((query[k] = queries.load(16 * lane.warp, 16 * k, lane.id)).word);
    const auto multiply_query = [&](Scores& sum, const Panels<T, D>& right) {
#pragma unroll
      for (int k = 0; k < D; k += 16) {
        if constexpr (S::QUERY_IN_REGISTERS)
          wgmma<T, 0>(sum, query[k / 16].word, right.columns_from(k));
        else
          wgmma<T, 0, 0>(sum, queries.columns_from(k), right.columns_from(k));
      }
    };
    Scores half;
    Offered carried[2];
    const auto multiply_half = [&](bool is_upper) {
      shift.start_half(half, memory.rel_bias(window_half(is_upper)), is_upper, lane);
      pin(half);
      fence_products();
      multiply_query(half, memory.rel_key(window_half(is_upper)));
      finish_products();
      pin(half);
    };
    const auto bias = [&](int n, int i) {
      if constexpr (S::KEEPS_BIAS)
        return key_bias[n][i % 2];
      else
        return labels().bias[8 * n + 2 * lane.t + i % 2];
    };
    multiply_half(false);
    shift.take_lower(score, half, carried, bias, lane.warp);
    multiply_half(true);
    shift.take_upper(score, half, carried, bias, lane.warp);
    pin(score);
    fence_products();
    multiply_query(score, memory.keys(consumer));
    finish_products();
    pin(score);
  }

  // Softmax and dropout: leaves P as the values had it, dS, and its band in shared memory; dS is `rounded` as well.
  DEVICE void make_score_gradients(const TileRows<S>& rows, PairVisibility visibility, uint32_t kept, Scores& score,
                                   Fragment (&rounded)[TILES / 2]) {
    const auto grad_out = memory.grad_out(stage.index()), values = memory.values(consumer);
    const float kept_scale = float(a.call.p.dropout.kept_scale);
    const RowStatistics statistics(tile, rows);
    make_exponents(score, tile, rows, statistics, segments, labels().segment, lane.t);
    Scores dP;
    fence_products();
    begin_wgmma<T, 0, 0>(dP, grad_out.columns_from(0), values.columns_from(0));
#pragma unroll
    for (int k = 16; k < D; k += 16) wgmma<T, 0, 0>(dP, grad_out.columns_from(k), values.columns_from(k));
    finish_products();
    pin(dP);
    const uint32_t matrix_row = shared_address(
        memory.probability(consumer).at(16 * lane.warp + lane.id % 8, lane.id / 8 * 8));  // this lane's of four
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t rank = row_rank(tile, rows, r, visibility);
      uint32_t key_ranks[4], probability[4], to_band[2];
      const int row = 16 * lane.warp + lane.g + 8 * r;  // of the tile
#pragma unroll
      for (int parity = 0; parity < 2; ++parity)
        to_band[parity] = shared_address(memory.band(consumer).at(row, 2 * lane.t + parity + shift.column(r, row)));
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        if (n % 4 == 0)
          load_key_ranks(key_ranks, a.call, tile, tile.j0 + 8 * n, rows, r, visibility, labels().rank + 8 * n,
                         memory.rank_pairs(consumer) + 4 * n, lane.t);
        float weight[2], gradient[2];
#pragma unroll
        for (int parity = 0; parity < 2; ++parity) {
          const float exponential = exp2_approximately(score[n][2 * r + parity]);
          weight[parity] = exponential;
          gradient[parity] = dP[n][2 * r + parity];
          if constexpr (S::DROPOUT) {
            const float factor = kept >> (16 * r + 2 * n + parity) & 1 ? kept_scale : 0.f;
            weight[parity] *= factor;
            gradient[parity] *= factor;
          }
          gradient[parity] = exponential * (gradient[parity] - statistics.delta[r]);
        }
        // not by a product, for what is not visible may be NaN
        const uint32_t visible = where_less(key_ranks[n % 4], rank);
        probability[n % 4] = pack<T>(weight[0], weight[1]) & visible;
        const uint32_t word = pack<T>(gradient[0], gradient[1]) & visible;
        rounded[n / 2].word[n % 2 * 2 + r] = word;
        store_lower_half(to_band[0] + n * Chunks<T>::EIGHT_COLUMNS, word);
        store_lower_half(to_band[1] + n * Chunks<T>::EIGHT_COLUMNS, word >> 16);
        if (n % 4 < 3) continue;
        const auto store_last = [&](int offset, auto word) {
          store_matrices(matrix_row + r * Chunks<T>::EIGHT_ROWS + (n - 3) * Chunks<T>::EIGHT_COLUMNS + offset,
                         word(n - 3), word(n - 2), word(n - 1), word(n));
        };
        store_last(0, [&](int n) { return probability[n % 4]; });
        store_last(S::SCORES, [&](int n) { return rounded[n / 2].word[n % 2 * 2 + r]; });
      }
    }
    wait_for_turn();
    if (a.call.p.segments.embed)
      add_segment_gradient<T>(a.gradients.sums.different.data, tile, rows, segments, labels().segment, rounded, lane.t);
  }

  // dV += P' dO;  dK += dS' Q: under way until add_query_gradient has waited for them. transposed: dS', which is read
  // once for its product and for its sums.
  DEVICE void add_key_gradients(Fragment (&transposed)[4]) {
    const auto probability = memory.probability(consumer), dS = memory.dS(consumer);
    const auto queries = memory.queries(stage.index()), grad_out = memory.grad_out(stage.index());
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      transposed[k] = dS.load_transposed(16 * k, 16 * lane.warp, lane.id);
      multiply<T>(key_sum, transposed[k], ones<T>(), 0, false);
      pin(transposed[k].word);
    }
    pin(dV), pin(dK);
    fence_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<T, 1, 1>(dV, probability.rows_from(16 * k, 0), grad_out.rows_from(16 * k));
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<T, 1>(dK, transposed[k].word, queries.rows_from(16 * k));
    commit_products();
  }

  // dQ = dS K + band R, 64 columns of it, added to global memory.
  DEVICE void add_query_gradient(const TileRows<S>& rows, Fragment (&dS)[TILES / 2], Fragment (&transposed)[4],
                                 int column) {
    const auto band = memory.band(consumer);
    const auto rel_key = [&](int k) { return memory.rel_key(window_half(k >= 64)).rows_from(k % 64, column); };
    float dQ[8][4];
#pragma unroll
    for (int k = 0; k < TILES / 2; ++k) pin(dS[k].word);
    fence_products();
    // of the band's 16 columns k a warp's rows have zeros in three of eight; k = 3 and 4 have none
    const auto is_shared = [](int k) { return !S::BAND_IN_REGISTERS || k == 3 || k == 4; };
    begin_wgmma<T, 0, 1>(dQ, band.columns_from(48), rel_key(48));
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (is_shared(k) && k != 3) wgmma<T, 0, 1>(dQ, band.columns_from(16 * k), rel_key(16 * k));
#pragma unroll
    for (int k = 0; k < 64; k += 16) wgmma<T, 1>(dQ, dS[k / 16].word, memory.keys(consumer).rows_from(k, column));
    commit_products();
    if (column == 0) {
      if (S::BAND_IN_REGISTERS)
        wait_for_older_products<1>();
      else
        wait_for_products();
      pin(dV), pin(dK);
#pragma unroll
      for (int k = 0; k < 4; ++k) pin(transposed[k].word);  // dK's products have read them until here
    }
    if constexpr (S::BAND_IN_REGISTERS) {
      Fragment left[8];
      const uint32_t zero = zero_made_here();
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (is_shared(k)) continue;
        left[k] = {{zero, zero, zero, zero}};
        if (k >= 3 - lane.warp && k <= 7 - lane.warp) left[k] = band.load(16 * lane.warp, 16 * k, lane.id);
        pin(left[k].word);
      }
      fence_products();
#pragma unroll
      for (int k = 0; k < 8; ++k)
        if (!is_shared(k)) wgmma<T, 1>(dQ, left[k].word, rel_key(16 * k));
      commit_products();
    }
    wait_for_products();
    pin(dQ);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (rows.inside(r)) {
        if constexpr (S::POSITIONS)
          add_row(tile.grad_query(rows.index(r)) + 2 * lane.t + column, dQ, r);
        else
          add_row(lane_row(tile.grad_query, rows.first_of_tile) + 8 * r * D + column, dQ, r);
      }
  }

  // dR = band' Q and colsum(band), 64 rows of the window at a time, added to global memory: both from one read.
  DEVICE void add_rel_key_gradient(int row_tile) {
    const RelAttention& p = a.call.p;
    const int last_position =
        S::POSITIONS ? memory.rows(stage.index()).last_position : row_tile * S::BLOCK_M + S::BLOCK_M - 1;
    const int window = int(p.rel_key.max_distance - p.mem_len) - last_position + tile.j0;
    Fragment left[4];
    if constexpr (S::KEEPS_REL_KEY) {
      const bool goes_on = kept_window == window + 64;
      if (!goes_on) add_kept_rel_key_gradient();
      load_band(left, window, 64);
      multiply_band(kept_dR, left, 0, goes_on);
      add_rel_rows(kept_dR, window + 64, 0);
      load_band(left, window, 0);
      multiply_band(kept_dR, left, 0, false);
      kept_window = window;
    } else {
#pragma unroll (S::POSITIONS && D <= 64 ? 2 : 1)
      for (int half = 0; half < 128; half += 64) {
        load_band(left, window, half);
#pragma unroll
        for (int column = 0; column < D; column += 64) {
          Scores dR;
          multiply_band(dR, left, column, false);
          add_rel_rows(dR, window + half, column);
        }
      }
    }
  }

  // Adds dR of the lower half of the last window, from which no tile has gone on.
  DEVICE void add_kept_rel_key_gradient() {
    if constexpr (S::KEEPS_REL_KEY)
      if (kept_window != NO_WINDOW) add_rel_rows(kept_dR, kept_window, 0);
  }

  // band' of this warp's 16 rows of a half of the window; adds their colsum(band) to global memory.
  DEVICE void load_band(Fragment (&left)[4], int window, int half) {
    const auto band = memory.band(consumer);
    float sum[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      left[k] = {};
      if (shift.has_dS(half, 16 * lane.warp, k)) {  // elsewhere the band has zeros
        left[k] = band.load_transposed(16 * k, half + 16 * lane.warp, lane.id);
        multiply<T>(sum, left[k], ones<T>(), 0, false);
      }
      pin(left[k].word);
    }
    if (!a.gradients.sums.rel.data) return;
    const int rel = window + half + 16 * lane.warp + lane.g;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (lane.t == 0 && uint32_t(rel + 8 * r) < uint32_t(a.call.p.rel_len))
        add_atomically(a.gradients.sums.rel.data + tile.first_rel + rel + 8 * r, sum[2 * r]);
  }

  // 64 columns of band' Q for 64 rows of the window; added to dR, or all of it.
  DEVICE void multiply_band(Scores& dR, const Fragment (&left)[4], int column, bool adds) {
    const auto queries = memory.queries(stage.index());
    pin(dR);
    fence_products();
    wgmma_or_begin<T, 1>(dR, left[0].word, queries.rows_from(0, column), adds);
#pragma unroll
    for (int k = 1; k < 4; ++k) wgmma<T, 1>(dR, left[k].word, queries.rows_from(16 * k, column));
    finish_products();
    pin(dR);
  }

  // This lane's first one of 64 rows from `first` on, from its first column on.
  DEVICE float* lane_row(const HeadRows<float>& rows, int first) const {
    return rows.first + int64_t(first + 16 * lane.warp + lane.g) * D + 2 * lane.t;
  }

  // Adds 64 columns of rows of rel_key, from first_rel on.
  DEVICE void add_rel_rows(const Scores& dR, int first_rel, int column) {
    const int rel = first_rel + 16 * lane.warp + lane.g;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (uint32_t(rel + 8 * r) < uint32_t(a.call.p.rel_len))
        add_row(lane_row(tile.grad_rel, first_rel) + 8 * r * D + column, dR, r);
  }
};

}  // namespace xlnet_kernels::cuda
