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
  using Band = float[TILES][4];  // 64 columns of the window

  const Call& call;
  const ForwardTile<S>& tile;
  const WarpgroupMemory<S> memory;
  const float scale;
  WarpgroupShift<S::POSITIONS> shift;
  const bool is_second;  // of the block's two warpgroups: its rows of rel_key are those of the stage before
  StagePlace<S> place;
  int before = S::ALL_STAGES;  // the stage before: at first one that is none
  Fragment q[STEPS];
  RowLabels labels[2];
  uint32_t ranks = 0;       // of both rows, as halves
  float different[2] = {};  // what segments add for keys of another one
  typename S::Softmax softmax;
  float out[1][D / 8][4] = {};

  DEVICE Consumer(const Call& call, const ForwardTile<S>& tile, const WarpgroupMemory<S>& memory)
      : call(call),
        tile(tile),
        memory(memory),
        scale(float(call.p.scale) * LOG2_E),
        shift(tile.lane.id),
        is_second(tile.lane.warp >= WARPGROUP / WARP) {}

  DEVICE float* lse() const { return static_cast<float*>(call.p.lse) + int64_t(tile.head) * call.p.length; }

  DEVICE bool had_tile() const { return before != S::ALL_STAGES; }

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

  // All tiles; the window's halves change places, so that the upper one is the next tile's lower one.
  DEVICE void run() {
    // Initialised, because ptxas waits after each wgmma with operands that may be unset.
    Band first = {}, second;
    while (step(first, second) && step(second, first)) {
    }
  }

  // One stage; false if there was no more.
  DEVICE bool step(const Band& lower, Band& upper) {
    const WarpgroupStage<S> stage = memory.stage(place.offset);
    const int last_read = is_second ? before : place.offset;
    stage.full().wait(place.parity);
    const uint32_t flags = stage.info().flags;
    BiasedRows<S> rel_key = memory.stage(last_read).rel_key();
    if (flags & (TileInfo::ENDS | TileInfo::BEGINS)) {
      if (flags & TileInfo::ENDS) return false;
      if constexpr (S::POSITIONS) find_shift({stage.info().first, stage.info().end});
      if (is_second) rel_key = stage.keys();
    }
    multiply_rel_key(upper, rel_key);
    if (!(flags & TileInfo::BEGINS)) attend(lower, upper, stage, flags);
    release(memory.stage(last_read).empty(), tile.lane.id);  // the stage that this warpgroup reads last is free
    before = place.offset;
    place.advance();
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

  DEVICE void attend(const Band& lower, const Band& upper, const WarpgroupStage<S>& stage, uint32_t flags) {
    float score[TILES][4];
    // u.k, position, content: in backward's order. Content comes last, since a sum of two needs no register's move to
    // where products are added.
    start_scores(score, stage.keys().bias(), tile.lane.t);
    shift.add_window(score, lower, upper, tile.lane.warp);
    add_product<0>(
        score, [&](int k) { return q[k]; },
        [&](int k) { return stage.keys().rows().columns_from(k * DEPTH<T>); });

    Fragment weights[TILES / 2];
    weigh(score, stage, flags, weights);
    if constexpr (S::DROPOUT) drop_out(weights, stage.info().first);

    // values
    add_product<1>(
        out[0], [&](int k) { return weights[k]; },
        [&](int k) { return stage.values().rows_from(k * DEPTH<T>); });
  }

  // Segments, mask, softmax: scores become exponentials, as the product with the values takes them.
  DEVICE void weigh(float (&score)[TILES][4], const WarpgroupStage<S>& stage, uint32_t flags,
                    Fragment (&weights)[TILES / 2]) {
    if constexpr (S::KEEPS_SCORES) {
      softmax.template step<T>(0, score, out[0], weights, [&](float (&of)[TILES][4], const float (&base)[2]) {
        scale_scores(of, stage, flags, base);
      });
    } else {
      scale_scores(score, stage, flags, {});
      softmax.template step<T>(0, score, out[0], weights);
    }
  }

  // Scale, segments and mask; less `base` of each row.
  DEVICE void scale_scores(float (&score)[TILES][4], const WarpgroupStage<S>& stage, uint32_t flags,
                           const float (&base)[2]) {
    const KeyLabels keys = stage.labels();
    if (S::HAS_ONE_SEGMENT_WAY && flags & TileInfo::ONE_SEGMENT)
      add_segment(score, scale, stage.info().segment, labels, different, base);
    else
      add_segments(score, scale, keys.segment, labels, different, tile.lane.t, base);
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
  DEVICE void drop_out(Fragment (&weights)[TILES / 2], int j0) const {
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

  // (q + v).r of 64 rows of rel_key
  DEVICE void multiply_rel_key(Band& band, const BiasedRows<S>& rel_key) {
    fence_shared_memory();  // for the products of this step's stage, too
    start_scores(band, rel_key.bias(), tile.lane.t);
    add_product<0>(
        band, [&](int k) { return q[k]; }, [&](int k) { return rel_key.rows().columns_from(k * DEPTH<T>); });
  }

  // sum += a b, a(k) and b(k) at depth 16 k. As deep as b has rows, or columns if they are not transposed.
  template <int TRANSPOSED, int N, typename A, typename B>
  DEVICE static void add_product(float (&sum)[N][4], A a, B b) {
    constexpr int DEPTHS = (TRANSPOSED ? S::BLOCK_N : D) / DEPTH<T>;
    Fragment left[DEPTHS];
#pragma unroll
    for (int k = 0; k < DEPTHS; ++k) pin((left[k] = a(k)).word);
    pin(sum);
    fence_products();
#pragma unroll
    for (int k = 0; k < DEPTHS; ++k) wgmma<T, TRANSPOSED>(sum, left[k].word, b(k));
    finish_products();
    pin(sum);
  }
};

}  // namespace xlnet_kernels::cuda
