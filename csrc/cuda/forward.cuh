// Forward: a block of BLOCK_M query rows goes to the tiles of BLOCK_N keys that one of them sees; a warp has M_TILES
// of 16 rows.
//
//   score = u.k + q.k + shifted band of (q + v).r, then scale, segment term and mask;  online softmax;  out += P v
#pragma once

#include "dispatch.cuh"
#include "dropout.cuh"
#include "forward_load.cuh"
#include "preprocess.cuh"
#include "segments.cuh"
#include "softmax.cuh"
#include "split_keys.cuh"

namespace xlnet_kernels::cuda {

// u.k, which the content and the position term are added to.
template <int M_TILES, int N>
DEVICE void start_scores(float (&score)[M_TILES][N][4], const float* key_bias, int t) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      for (int m = 0; m < M_TILES; ++m) score[m][n][i] = key_bias[8 * n + 2 * t + i % 2];
}

// This lane's rows, two in each tile of 16.
template <typename S>
struct ForwardRows {
  RowLabels labels[S::M_TILES][2];
  uint32_t ranks[S::M_TILES] = {};      // of both rows, as halves
  float different[S::M_TILES][2] = {};  // what segments add for keys of another one
  BandSlices<S::BLOCK_M> slices[S::M_TILES];
  bool consecutive;  // positions of all the warp's rows come one after the other, and one window serves the block
  QuadShift shift;   // then

  DEVICE void find_slices(const RelAttention& p, const ForwardTile<S>& tile) {
    constexpr int LAST = S::M_TILES - 1;
    bool all = tile.span < S::BLOCK_M;
    for (int m = LAST; m >= 0; --m) {
      slices[m].find({tile.shift(p, tile.sorted_row(m)), tile.shift(p, tile.sorted_row(m) + 8)}, tile.lane.id);
      all &=
          slices[m].is_consecutive(tile.lane.id) && slices[m].first.begin == slices[LAST].first.begin + 16 * (LAST - m);
    }
    consecutive = uniform(int(all));
    shift = known_shift(tile.lane.id);
  }
};

// Loads labels and fragments of the rows; leaves in lse what segments give to every key, until the end.
template <typename S>
DEVICE void load_rows(const RelAttention& p, const ForwardTile<S>& tile, float scale, float* lse,
                      QueryFragments<S>& query, ForwardRows<S>& rows, typename S::Softmax& softmax) {
#pragma unroll
  for (int m = 0; m < S::M_TILES; ++m) {
    const int sorted_row = tile.sorted_row(m);
    const QueryRow row[2] = {load_query_row(p, tile.b, sorted_row), load_query_row(p, tile.b, sorted_row + 8)};
    query.load_global(p, tile, m, row);
    float same[2] = {};
    segment_scores<typename S::T>(p, query.q[m], tile.h, tile.lane.t, scale, same, rows.different[m]);
    for (int r = 0; r < 2; ++r) {
      rows.labels[m][r] = row[r];
      rows.ranks[m] |= rank_as_half(row[r].rank) << (16 * r);
      if (!row[r].inside) softmax.row_max[m][r] = 0;  // it would look for its first key in every tile
      if (row[r].inside && tile.lane.t == 0) lse[row[r].index] = same[r];
    }
  }
  if constexpr (!S::QUERY_IN_REGISTERS) sync_warp();
}

// Adds the position term of one window of rel_key to the scores of all the warp's rows; carried: see shift.cuh.
template <typename S, int N>
DEVICE void add_position_of_rows(const Call& call, const ForwardTile<S>& tile, const ForwardRows<S>& rows,
                                 const QueryFragments<S>& query, const typename S::Ring& ring, const float* bias,
                                 int j0, int window_shift, bool is_carried, float (&score)[S::M_TILES][N][4],
                                 float (&carried)[S::M_TILES][2][4]) {
  using T = typename S::T;
  const RelAttention& p = call.p;
  const int window = tile.origin + j0 + window_shift, lane = tile.lane.id;
  if (rows.consecutive) {
    const int column = rows.slices[S::M_TILES - 1].first.begin;
    add_known_position<T, S::HEAD_DIM>(score, carried, is_carried, ring, window + column, bias + column, rows.shift,
                                       call.tf32, lane, [&](int k, int m) { return query(k, m); });
    return;
  }
#pragma unroll
  for (int m = 0; m < S::M_TILES; ++m)
    rows.slices[m].for_each(
        [&](int r) { return tile.shift(p, tile.sorted_row(m) + 8 * r) - window_shift; }, window_shift == 0, lane,
        [&](const BandSlice& slice) {
          add_position<T, S::HEAD_DIM>(score[m], carried[m], is_carried && !rows.slices[m].more, ring, window, bias,
                                       slice, call.tf32, lane, [&](int k) { return query(k, m); });
        });
}

// Which of 64 keys from j0 on dropout keeps: 16 bits for each of two rows, for each tile of 16.
template <typename S>
DEVICE void draw_dropout(const RelAttention& p, const ForwardTile<S>& tile, int j0, uint32_t* kept) {
  const Philox philox = load_philox(p.dropout, tile.b, tile.head);
  for (int m = 0; m < S::M_TILES; ++m) {
    uint32_t bits = 0;
    for (int r = 0; r < 2; ++r) {
      const int index = row_index(p, tile.b, smaller(tile.sorted_row(m) + 8 * r, int(p.length) - 1));
      bits |= kept_columns<64>(philox, index, j0 / 64 * 64, tile.lane.t) << (16 * r);
    }
    kept[m * S::THREADS] = bits;
  }
}

// Rows that this window of rel_key does not serve see nothing in it. Rows' numbers are hidden as in hide_pair_by_pair.
template <typename S, int N>
DEVICE void hide_other_windows(const RelAttention& p, const ForwardTile<S>& tile, int window_shift,
                               float (&score)[S::M_TILES][N][4]) {
  if (tile.span < S::BLOCK_M) return;
#pragma unroll
  for (int m = 0; m < S::M_TILES; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int shift = tile.shift(p, kept_in_register(tile.sorted_row(m) + 8 * r)) - window_shift;
      if (shift >= 0 && shift < S::BLOCK_M) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) score[m][n][2 * r] = score[m][n][2 * r + 1] = -INFINITY;
    }
}

// Whatever else decides about pairs. Labels are loaded again, because floors would take registers from the ordinary
// tile. kept_in_register hides rows' numbers from the compiler, to avoid addresses that it would make for every tile.
template <typename S, int N>
DEVICE void hide_pair_by_pair(const RelAttention& p, const ForwardTile<S>& tile, int m, Visibility visibility, int j0,
                              const int32_t* key_rank, float (&score)[N][4]) {
  const int sorted_row = kept_in_register(tile.sorted_row(m));
  const RowLabels labels[2] = {load_query_row(p, tile.b, sorted_row), load_query_row(p, tile.b, sorted_row + 8)};
  apply_mask(score, visibility, p, labels, tile.b, tile.h, sorted_row, j0, key_rank, tile.lane.t);
}

// Segments and mask. All tiles of 16 rows share each branch.
template <typename S, int N>
DEVICE void scale_and_hide(const ForwardPipeline<S>& pipeline, const ForwardTile<S>& tile, const ForwardRows<S>& rows,
                           float scale, int j0, int window_shift, float (&score)[S::M_TILES][N][4]) {
  const RelAttention& p = pipeline.call.p;
  const KeyLabels keys = pipeline.memory.labels(pipeline.stage);
  const Visibility visibility = pipeline.state.visibility;
  if (pipeline.is_one_segment())
#pragma unroll
    for (int m = 0; m < S::M_TILES; ++m)
      add_segment(score[m], scale, keys.segment[0], rows.labels[m], rows.different[m]);
  else
#pragma unroll
    for (int m = 0; m < S::M_TILES; ++m)
      add_segments(score[m], scale, keys.segment, rows.labels[m], rows.different[m], tile.lane.t);
  hide_other_windows(p, tile, window_shift, score);
  if (visibility == Visibility::by_rank && p.rank_mask.query_floor == nullptr)
#pragma unroll
    for (int m = 0; m < S::M_TILES; ++m)
      if constexpr (S::RANK_PAIRS)
        hide_by_rank(score[m], rows.ranks[m], pipeline.memory.rank_pairs(pipeline.stage), tile.lane.t);
      else
        hide_by_rank(score[m], rows.labels[m], keys.rank, tile.lane.t);
  else if (visibility != Visibility::all)
#pragma unroll
    for (int m = 0; m < S::M_TILES; ++m) hide_pair_by_pair(p, tile, m, visibility, j0, keys.rank, score[m]);
}

// Whether a row, of which a quad's exponentials sum to `sum`, sees keys and gives none of them any weight. All lanes of
// a warp ask.
template <typename S>
DEVICE bool sees_without_weight(const RelAttention& p, const ForwardTile<S>& tile, float sum, int sorted_row) {
  if (!ballot(sum == 0)) return false;
  const QueryRow row = load_query_row(p, tile.b, sorted_row);
  const bool sees = sum == 0 && RowVisibility(p, row, tile.b, tile.h).sees_any(tile.lane.t);
  return ballot(sees) >> (tile.lane.id - tile.lane.t) & 15;
}

// A row that sees keys, all of whose scores are -inf, is NaN, as softmax has it. Stored over what the epilogue stored:
// before, the output and the main loop have the registers. had_tile(): some row of the block may see some key.
template <typename S, typename HadTile>
DEVICE void store_nan_rows(const RelAttention& p, const ForwardTile<S>& tile, const typename S::Softmax& softmax,
                           HadTile had_tile) {
  using T = typename S::T;
  bool is_empty = false;
#pragma unroll
  for (int m = 0; m < S::M_TILES; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) is_empty |= quad_sum(softmax.row_sum[m][r]) == 0;  // all lanes: no ||
  if (!ballot(is_empty) || !had_tile()) return;
  const auto out_rows = rows_of<T>(p.out, tile.b, tile.h), residual_rows = rows_of<T>(p.out_residual, tile.b, tile.h);
#pragma unroll
  for (int m = 0; m < S::M_TILES; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int sorted_row = tile.sorted_row(m) + 8 * r;
      const bool is_nan = sees_without_weight(p, tile, quad_sum(softmax.row_sum[m][r]), sorted_row);
      if (!is_nan || sorted_row >= p.length) continue;
      const int index = row_index(p, tile.b, sorted_row);
      T *to = out_rows(index), *residual = p.out_residual.data ? residual_rows(index) : nullptr;
#pragma unroll 1
      for (int column = 2 * tile.lane.t; column < int(p.head_dim); column += 8)
        store_rounded(to, residual, column, NAN, NAN);
      if (tile.lane.t == 0) static_cast<float*>(p.row_sum)[int64_t(tile.head) * p.length + index] = NAN;
    }
}

// By what a row's output is multiplied. A fully masked row is zero, even where it has zero times NaN.
struct OutputScale {
  float factor;
  bool is_masked;

  DEVICE float operator()(float x) const {
    const float scaled = x * factor;
    return is_masked ? 0.f : scaled;
  }
};

// Stores the log-sum-exp of row r of tile m, and what backward needs of it. Returns the scale of the row's output. All
// lanes of a warp call it.
template <typename S>
DEVICE OutputScale finish_row(const RelAttention& p, const ForwardTile<S>& tile, const typename S::Softmax& softmax,
                              int m, int r, float* lse) {
  const float sum = quad_sum(softmax.row_sum[m][r]);
  const float weights = softmax.template sum_of_weights<typename S::T>(m, r, sum);
  const OutputScale scale{sum != 0 ? float(p.dropout.kept_scale) / weights : 0.f, sum == 0};
  const int sorted_row = tile.sorted_row(m) + 8 * r;
  if (sorted_row >= p.length || tile.lane.t != 0) return scale;
  const int index = row_index(p, tile.b, sorted_row);
  const int64_t row = int64_t(tile.head) * p.length + index;
  const float log_sum = log2f(sum);
  lse[index] = sum != 0 ? (softmax.base(m, r) + log_sum + lse[index]) * LN_2 : -INFINITY;
  static_cast<float*>(p.row_max)[row] = softmax.base(m, r);
  static_cast<float*>(p.row_sum)[row] = sum;
  return scale;
}

// Scales and stores the output, the log-sum-exp and what backward needs.
template <typename S>
DEVICE void forward_epilogue(const RelAttention& p, const ForwardTile<S>& tile, const typename S::Softmax& softmax,
                             const float (&out)[S::M_TILES][S::HEAD_DIM / 8][4], float* lse) {
  using T = typename S::T;
  const int t = tile.lane.t, head_dim = int(p.head_dim);
  const auto out_rows = rows_of<T>(p.out, tile.b, tile.h), residual_rows = rows_of<T>(p.out_residual, tile.b, tile.h);
#pragma unroll
  for (int m = 0; m < S::M_TILES; ++m)
    for (int r = 0; r < 2; ++r) {
      const OutputScale scale = finish_row(p, tile, softmax, m, r, lse);
      const int sorted_row = tile.sorted_row(m) + 8 * r;
      if (sorted_row >= p.length) continue;
      const int index = row_index(p, tile.b, sorted_row);
      T *to = out_rows(index), *residual = p.out_residual.data ? residual_rows(index) : nullptr;
      const auto store = [&](T* residual) {
#pragma unroll
        for (int d = 0; d < S::HEAD_DIM / 8; ++d)
          if (8 * d + 2 * t < head_dim)
            store_rounded(to, residual, 8 * d + 2 * t, scale(out[m][d][2 * r]), scale(out[m][d][2 * r + 1]));
      };
      if (residual)
        store(residual);
      else
        store(nullptr);
    }
}

template <typename S>
KERNEL THREADS_PER_BLOCK(S::THREADS, S::BLOCKS) forward_kernel(Call call) {
  using T = typename S::T;
  constexpr int D = S::HEAD_DIM, BLOCK_M = S::BLOCK_M, BLOCK_N = S::BLOCK_N, M_TILES = S::M_TILES;
  const RelAttention& p = call.p;
  ForwardTile<S> tile(p, own_item(call.order), S::SPLITS ? call.splits : 1);
  const ForwardMemory<S> memory{shared_memory()};
  for (int stage = 0; stage < 2; ++stage) clear_key_labels<S::THREADS>(memory.labels(stage), BLOCK_N);
  const float scale = float(p.scale) * LOG2_E;
  float* const lse = same_segment_of(call, tile);
  const Lane lane = tile.lane;

  QueryFragments<S> query(memory, tile);
  ForwardRows<S> rows;
  typename S::Softmax softmax;
  load_rows(p, tile, scale, lse, query, rows, softmax);
  tile.locate(p);
  rows.find_slices(p, tile);
  ForwardPipeline<S> pipeline(call, tile, memory);
  float out[M_TILES][D / 8][4] = {}, carried[M_TILES][2][4];
  pipeline.start();
  while (pipeline.has_tile()) {
    const int j0 = pipeline.load(), stage = pipeline.stage;
    const KeyLabels keys = memory.labels(stage);
    // once, but for rows far apart: then once for each window of rel_key, each time with the rows that it serves
    for (int window_shift = 0; window_shift <= tile.span; window_shift += BLOCK_M) {
      float score[M_TILES][BLOCK_N / 8][4];
      Fragment weights[M_TILES][WEIGHTS<T, BLOCK_N / 8>];

      start_scores(score, keys.bias, lane.t);

      // position
      pipeline.wait_for_window(j0, window_shift);
      add_position_of_rows(call, tile, rows, query, memory.ring(), memory.rel_bias(stage), j0, window_shift,
                           pipeline.has_window, score, carried);

      // content, last: products add to a sum of two where it is
      add_product<T, D>(
          score, call.tf32, [&](int k, int m) { return query(k, m); },
          [&](int k, int n) { return load_b(memory.keys(stage), n, k, lane.id); });

      if (p.dropout.threshold && (j0 % 64 == 0 || !pipeline.has_window)) draw_dropout(p, tile, j0, memory.kept());
      scale_and_hide(pipeline, tile, rows, scale, j0, window_shift, score);

      // softmax, dropout
      softmax.template step<T>(score, out, weights);
      if (p.dropout.threshold)
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
          drop<T>(weights[m], memory.kept()[m * S::THREADS] >> uint32_t(j0) % 64 / 4);

      // values
      add_product<T, BLOCK_N>(
          out, call.tf32, [&](int k, int m) { return weights[m][k / DEPTH<T>]; },
          [&](int k, int n) { return load_b_transposed<true>(memory.values(stage), k, n, lane.id); });
    }
    pipeline.advance();
  }
  wait_for_copies<0>();
  if constexpr (S::SPLITS) return store_part(call, tile, softmax, out);
  forward_epilogue(p, tile, softmax, out, lse);
  store_nan_rows(p, tile, softmax, [&] { return pipeline.starts_again(); });
}

template <typename T, int HEAD_DIM, bool SPLITS = false>
std::string launch_forward(Call call, Stream stream) {
  using S = ForwardShape<T, HEAD_DIM, SPLITS>;
  call.order = forward_order(call.p, (call.p.length + S::BLOCK_M - 1) / S::BLOCK_M * call.splits);
  const char* error = preprocess<T>(call, stream);
  if (error) return failure("preprocess", call, 0, error);
  error = launch(forward_kernel<S>, {call.order.blocks(), 1, 1}, S::THREADS, S::SHARED, stream, call);
  if (error) return failure("forward", call, S::SHARED, error);
  error = SPLITS ? merge<T>(call, stream) : nullptr;
  return error ? failure("merge", call, 0, error) : "";
}

template <typename T>
std::string forward_of(const Call& call, Stream stream) {
  return dispatch_head_dim(
      call.p.head_dim,
      [&](auto head_dim) {
        return call.splits > 1 ? launch_forward<T, head_dim, true>(call, stream)
                               : launch_forward<T, head_dim>(call, stream);
      },
      HeadDims());
}

}  // namespace xlnet_kernels::cuda
