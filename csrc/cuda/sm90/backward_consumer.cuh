// A consumer warpgroup of backward: 64 keys, which stay, and tile by tile 64 rows.
#pragma once

#include "../backward_products.cuh"
#include "../dropout.cuh"
#include "../softmax.cuh"
#include "accumulators.cuh"
#include "backward_positions.cuh"

namespace xlnet_kernels::cuda {

template <typename S>
struct BackwardConsumer {
  using T = typename S::T;
  static constexpr int D = S::HEAD_DIM, TILES = S::BLOCK_N / 8;
  // Where there are registers for it: the lower half of a window is the next one's upper half, whose dR is then added
  // to global memory once.
  static constexpr bool QUERY_IN_REGISTERS = D <= 64, KEEPS_REL_KEY = D <= 64 && !S::POSITIONS;
  static constexpr int NO_WINDOW = -2147483647 - 1;
  using Scores = float[TILES][4];

  const Backward& a;
  const KeyTile<S>& tile;
  const BackwardWarpgroupMemory<S> memory;
  const int consumer;
  const Lane lane;  // warp: of this warpgroup
  BackwardShift<S::POSITIONS> shift;
  RingPlace<S::STAGES> stage;
  RingPlace<S::SLOTS> upper;  // of the window's halves; the lower one comes after it
  bool has_run = false;
  int32_t segment;        // of the keys,
  bool has_two_segments;  // unless they have several
  float dK[D / 8][4] = {}, dV[D / 8][4] = {}, key_sum[4] = {};
  Scores kept_dR;
  int kept_window = NO_WINDOW;

  DEVICE BackwardConsumer(const Backward& a, const KeyTile<S>& tile, const BackwardWarpgroupMemory<S>& memory,
                          int consumer, Lane lane)
      : a(a), tile(tile), memory(memory), consumer(consumer), lane(lane), shift(lane.id) {}

  DEVICE RingPlace<S::SLOTS> lower() const { return {upper.passed + 1}; }
  DEVICE KeyLabels labels() const {
    const KeyLabels all = memory.labels();
    return {all.rank + consumer * S::BLOCK_N, all.segment + consumer * S::BLOCK_N, all.bias + consumer * S::BLOCK_N};
  }
  DEVICE int window_half(bool is_upper) const { return (is_upper ? upper : lower()).index(); }

  DEVICE void run() {
    memory.full_keys().wait(0);
    const int32_t* const key_segment = labels().segment;
    segment = key_segment[0];
    has_two_segments = ballot(key_segment[lane.id] != segment || key_segment[lane.id + WARP] != segment);
    while (step()) {
    }
    add_kept_rel_key_gradient();
  }

  // One tile of rows; false if there was no more.
  DEVICE bool step() {
    memory.full_stage(stage.index()).wait(stage.parity());
    const RowTileInfo info = memory.info(stage.index());
    if (info.first_row == NO_ROW) return false;
    if (info.begins_run) begin_run();
    memory.full_slot(upper.index()).wait(upper.parity());
    memory.full_slot(lower().index()).wait(lower().parity());
    const Visibility visibility = consumer ? info.visibility[1] : info.visibility[0];
    if (visibility != Visibility::none) add_gradients(info.first_row, visibility);
    release(memory.empty_slot(upper.index()), lane.id);
    upper.advance();
    release(memory.empty_stage(stage.index()), lane.id);
    stage.advance();
    return true;
  }

  // Slots that this warpgroup has no use for: the last of the run before, the first of this one.
  DEVICE void begin_run() {
    for (int i = has_run ? 0 : 1 + consumer; i < 2; ++i) {
      memory.full_slot(upper.index()).wait(upper.parity());
      release(memory.empty_slot(upper.index()), lane.id);
      upper.advance();
    }
    has_run = true;
  }

  DEVICE void add_gradients(int first_row, Visibility visibility) {
    Scores score;
    Fragment dS[TILES / 2];
    uint32_t kept[2];
    if constexpr (S::POSITIONS) shift.move(memory.rows(stage.index()), memory.band(consumer), lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) kept[r] = kept_by_dropout(index(first_row, r));
    fence_shared_memory();
    make_scores(first_row, visibility, score);
    make_score_gradients(first_row, kept, score, dS);
    fence_shared_memory();
    sync_warpgroup(1 + consumer);
    Fragment transposed[4];
    add_key_gradients(transposed);
#pragma unroll
    for (int column = 0; column < D; column += 64) add_query_gradient(first_row, dS, column);
#pragma unroll
    for (int k = 0; k < 4; ++k) pin(transposed[k].word);  // dK's products read them until they are waited for
    if (a.gradients.sums.rel_key) add_rel_key_gradient(first_row);
    sync_warpgroup(1 + consumer);  // no one reads what was stored any more
  }

  // This lane's row r of two; those beyond the last one see nothing. What is known of it is loaded where it is needed:
  // registers are scarce.
  DEVICE int row(int first_row, int r) const { return first_row + 16 * lane.warp + lane.g + 8 * r; }
  // Where it is in the tensors, or -1
  DEVICE int index(int first_row, int r) const {
    if constexpr (S::POSITIONS)
      return memory.rows(stage.index()).index[row(0, r)];
    else
      return row(first_row, r);
  }
  DEVICE bool is_inside(int first_row, int r) const {
    return S::POSITIONS ? index(first_row, r) >= 0 : row(first_row, r) < int(a.call.p.length);
  }
  DEVICE float row_value(RowValue value, int first_row, int r) const {
    return tile.row_values[value * tile.all_rows + index(first_row, r)];
  }
  DEVICE int32_t row_segment(int first_row, int r) const {
    const RelAttention& p = a.call.p;
    return p.segments.query_ids && is_inside(first_row, r)
               ? p.segments.query_ids[tile.b * p.length + index(first_row, r)]
               : 0;
  }

  // Bit 2 n + parity: whether a row keeps column 8 n + 2 t + parity.
  DEVICE uint32_t kept_by_dropout(int row) const {
    if constexpr (S::DROPOUT) {
      const Philox philox = load_philox(a.call.p.dropout, tile.b, tile.head);
      return kept_columns<S::BLOCK_N>(philox, row, tile.j0, lane.t);
    }
    return ~0u;
  }

  // In forward's order of additions: u.k, position, content, scale and segments, mask.
  DEVICE void make_scores(int first_row, Visibility visibility, Scores& score) {
    const auto queries = memory.queries(stage.index());
    Fragment query[QUERY_IN_REGISTERS ? D / 16 : 1];
    if constexpr (QUERY_IN_REGISTERS)
#pragma unroll
      for (int k = 0; k < D / 16; ++k) pin((query[k] = queries.load(16 * lane.warp, 16 * k, lane.id)).word);
    const auto multiply_query = [&](Scores& sum, const Panels<T, D>& right) {
#pragma unroll
      for (int k = 0; k < D; k += 16) {
        if constexpr (QUERY_IN_REGISTERS)
          wgmma<T, 0>(sum, query[k / 16].word, right.columns_from(k));
        else
          wgmma<T, 0, 0>(sum, queries.columns_from(k), right.columns_from(k));
      }
    };
    Scores half;
    typename BackwardShift<S::POSITIONS>::Carried carried = {};
    const auto multiply_half = [&](bool is_upper) {
      start_scores(half, memory.rel_bias(window_half(is_upper)), lane.t);
      pin(half);
      fence_products();
      multiply_query(half, memory.rel_key(window_half(is_upper)));
      finish_products();
      pin(half);
    };
    multiply_half(false);
    shift.template start_scores<false>(score, half, carried, labels().bias, lane);
    multiply_half(true);
    shift.template start_scores<true>(score, half, carried, labels().bias, lane);
    pin(score);
    fence_products();
    multiply_query(score, memory.keys(consumer));
    finish_products();
    pin(score);

    add_segment_term(first_row, score);
    if constexpr (S::POSITIONS)
      if (shift.served & shift.LACKS_ROWS) shift.hide_others(score);
    if (visibility == Visibility::all) return;
    const RelAttention& p = a.call.p;
    const RowLabels row_labels[2] = {load_query_row(p, tile.b, row(first_row, 0)),
                                     load_query_row(p, tile.b, row(first_row, 1))};
    apply_mask(score, visibility, p, row_labels, tile.b, tile.h, row(first_row, 0), tile.j0, labels().rank, lane.t);
  }

  // Scales the scores, adds the segment term: one multiply-add where all keys are of one segment.
  DEVICE void add_segment_term(int first_row, Scores& score) {
    const float scale = float(a.call.p.scale) * LOG2_E;
    RowLabels row_labels[2] = {};
    float different[2] = {};
    if (a.call.p.segments.embed) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_labels[r].segment = row_segment(first_row, r);
        different[r] = is_inside(first_row, r) ? row_value(DIFFERENT, first_row, r) : 0.f;
        if (!has_two_segments && row_labels[r].segment == segment) different[r] = 0;
      }
      if (has_two_segments) return add_segments(score, scale, labels().segment, row_labels, different, lane.t);
    }
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] = score[n][i] * scale + different[i / 2];
  }

  // Softmax and dropout: leaves P as the values had it, dS, and its band in shared memory; scores become dS, which
  // `rounded` is as well.
  DEVICE void make_score_gradients(int first_row, const uint32_t (&kept)[2], Scores& score,
                                   Fragment (&rounded)[TILES / 2]) {
    const RelAttention& p = a.call.p;
    const auto grad_out = memory.grad_out(stage.index()), values = memory.values(consumer);
    const float kept_scale = S::DROPOUT ? float(p.dropout.kept_scale) : 1.f;
    float row_max[2], kept_factor[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool inside = is_inside(first_row, r);
      row_max[r] = inside ? row_value(ROW_MAX, first_row, r) : INFINITY;  // exponentials are 0
      kept_factor[r] = inside ? kept_scale * row_value(INVERSE, first_row, r) : 0.f;
      delta[r] = inside ? row_value(DELTA, first_row, r) : 0.f;
    }
    Scores dP;
    fence_products();
    begin_wgmma<T, 0, 0>(dP, grad_out.columns_from(0), values.columns_from(0));
#pragma unroll
    for (int k = 16; k < D; k += 16) wgmma<T, 0, 0>(dP, grad_out.columns_from(k), values.columns_from(k));
    finish_products();
    pin(dP);

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 16 * lane.warp + lane.g + 8 * r;  // of the tile
      T* const to_probability = memory.probability(consumer).at(row, 2 * lane.t);
      T* const to_dS = memory.dS(consumer).at(row, 2 * lane.t);
      T* to_band[2];
#pragma unroll
      for (int parity = 0; parity < 2; ++parity)
        to_band[parity] = memory.band(consumer).at(row, 2 * lane.t + parity + shift.column(r, row));
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        float probability[2];
#pragma unroll
        for (int parity = 0; parity < 2; ++parity) {
          float& of = score[n][2 * r + parity];
          const float factor = !S::DROPOUT || kept[r] >> (2 * n + parity) & 1 ? kept_factor[r] : 0.f;
          of -= row_max[r];
          probability[parity] = softmax_backward(of, dP[n][2 * r + parity], factor, delta[r]);
        }
        const uint32_t word = pack<T>(score[n][2 * r], score[n][2 * r + 1]);
        rounded[n / 2].word[n % 2 * 2 + r] = word;
        *reinterpret_cast<uint32_t*>(to_dS + n * Chunks<T>::STEP) = word;
#pragma unroll
        for (int parity = 0; parity < 2; ++parity)
          (to_band[parity] + n * Chunks<T>::STEP)->bits = uint16_t(word >> (16 * parity));
        store_pair(to_probability + n * Chunks<T>::STEP, probability[0], probability[1]);
      }
    }
    if (p.segments.embed) add_segment_gradient(first_row, score);
  }

  // The sum of dS over keys of another segment.
  DEVICE void add_segment_gradient(int first_row, const Scores& dS) {
    RowLabels row_labels[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) row_labels[r].segment = row_segment(first_row, r);
    if (!has_two_segments && !ballot(row_labels[0].segment != segment || row_labels[1].segment != segment)) return;
    const int32_t* const key_segment = labels().segment;
    float sum[2] = {};
    if (has_two_segments) {
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (is_different(key_segment, row_labels, n, i, lane.t)) sum[i / 2] += dS[n][i];
    } else {
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i / 2] += dS[n][i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float different_sum = quad_sum(sum[r]);
      if (lane.t == 0 && is_inside(first_row, r) && (has_two_segments || row_labels[r].segment != segment))
        add_atomically(a.gradients.sums.different + tile.first_row + index(first_row, r), different_sum);
    }
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
  DEVICE void add_query_gradient(int first_row, Fragment (&dS)[TILES / 2], int column) {
    const auto band = memory.band(consumer);
    const auto rel_key = [&](int k) { return memory.rel_key(window_half(k >= 64)).rows_from(k % 64, column); };
    float dQ[8][4];
#pragma unroll
    for (int k = 0; k < TILES / 2; ++k) pin(dS[k].word);
    fence_products();
    begin_wgmma<T, 0, 1>(dQ, band.columns_from(0), rel_key(0));
#pragma unroll
    for (int k = 16; k < 128; k += 16) wgmma<T, 0, 1>(dQ, band.columns_from(k), rel_key(k));
#pragma unroll
    for (int k = 0; k < 64; k += 16) wgmma<T, 1>(dQ, dS[k / 16].word, memory.keys(consumer).rows_from(k, column));
    commit_products();
    wait_for_products();
    if (column == 0) pin(dV), pin(dK);
    pin(dQ);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (is_inside(first_row, r)) add_row(tile.grad_query(index(first_row, r)) + column + 2 * lane.t, dQ, r);
  }

  // dR = band' Q and colsum(band), 64 rows of the window at a time, added to global memory. band' is read once for
  // both.
  DEVICE void add_rel_key_gradient(int first_row) {
    const RelAttention& p = a.call.p;
    const int last_position = S::POSITIONS ? memory.rows(stage.index()).last_position : first_row + S::BLOCK_M - 1;
    const int window = int(p.rel_key.max_distance - p.mem_len) - last_position + tile.j0;
    Fragment left[4];
    if constexpr (KEEPS_REL_KEY) {
      if (kept_window != window + 64) {
        add_kept_rel_key_gradient();
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) kept_dR[n][i] = 0;
      }
      load_band(left, window, 64);
      pin(kept_dR);
      multiply_band<1>(kept_dR, left, 0);
      add_rel_rows(kept_dR, window + 64, 0);
      load_band(left, window, 0);
      multiply_band<0>(kept_dR, left, 0);
      kept_window = window;
    } else {
#pragma unroll (S::POSITIONS && D <= 64 ? 2 : 1)
      for (int half = 0; half < 128; half += 64) {
        load_band(left, window, half);
#pragma unroll
        for (int column = 0; column < D; column += 64) {
          Scores dR;
          multiply_band<0>(dR, left, column);
          add_rel_rows(dR, window + half, column);
        }
      }
    }
  }

  // Of the lower half of the last window, which no tile has gone on from.
  DEVICE void add_kept_rel_key_gradient() {
    if constexpr (KEEPS_REL_KEY)
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
    if (!a.gradients.sums.rel) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int rel = window + half + 16 * lane.warp + lane.g + 8 * r;
      if (lane.t == 0 && uint32_t(rel) < uint32_t(a.call.p.rel_len))
        add_atomically(a.gradients.sums.rel + tile.first_rel + rel, sum[2 * r]);
    }
  }

  // 64 columns of band' Q for 64 rows of the window; not ADDS: nothing but them.
  template <int ADDS>
  DEVICE void multiply_band(Scores& dR, const Fragment (&left)[4], int column) {
    const auto queries = memory.queries(stage.index());
    fence_products();
    if constexpr (ADDS)
      wgmma<T, 1>(dR, left[0].word, queries.rows_from(0, column));
    else
      begin_wgmma<T, 1>(dR, left[0].word, queries.rows_from(0, column));
#pragma unroll
    for (int k = 1; k < 4; ++k) wgmma<T, 1>(dR, left[k].word, queries.rows_from(16 * k, column));
    finish_products();
    pin(dR);
  }

  // Adds 64 columns of rows of rel_key, from first_rel on.
  DEVICE void add_rel_rows(const Scores& dR, int first_rel, int column) {
    const int rel = first_rel + 16 * lane.warp + lane.g;
    float* const to = tile.grad_rel(rel) + column + 2 * lane.t;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (uint32_t(rel + 8 * r) < uint32_t(a.call.p.rel_len)) add_row(to + 8 * r * D, dR, r);
  }
};

}  // namespace xlnet_kernels::cuda
