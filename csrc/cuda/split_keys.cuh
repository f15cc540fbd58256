// Few rows and many keys: several blocks of forward share one tile of rows, each with a part of its keys, and
// merge_kernel makes of what each of them has found what one block would have. The parts are merged in their order.
#pragma once

#include "forward_load.cuh"
#include "softmax.cuh"

namespace xlnet_kernels::cuda {

constexpr int MERGE_THREADS = 128;
static_assert(MOST_SPLITS <= WARP, "merge_kernel has a lane for each");

// A part's values of this kind for all (B, H, L) rows.
DEVICE float* split_values(const Call& call, SplitValue kind, int split) {
  const int64_t all_rows = call.p.batch * call.p.heads * call.p.length;
  return call.workspace.split_rows + (int64_t(kind) * call.splits + split) * all_rows;
}

// A part's output for a row, (B, H, L) counted through: neither divided by its weights nor scaled.
DEVICE float* split_out(const Call& call, int split, int64_t row) {
  const int64_t all_rows = call.p.batch * call.p.heads * call.p.length;
  return call.workspace.split_out + (split * all_rows + row) * call.p.head_dim;
}

// Where a block leaves what segments give to every key, of its head's rows.
template <typename S>
DEVICE float* same_segment_of(const Call& call, const ForwardTile<S>& tile) {
  float* const all = S::SPLITS ? split_values(call, SPLIT_SAME, tile.split) : static_cast<float*>(call.p.lse);
  return all + tile.head * call.p.length;
}

// The epilogue of a block that has a part of the keys. A row that saw none of them has a sum of 0.
template <typename S>
DEVICE void store_part(const Call& call, const ForwardTile<S>& tile, const typename S::Softmax& softmax,
                       const float (&out)[S::M_TILES][S::HEAD_DIM / 8][4]) {
  const RelAttention& p = call.p;
  const int t = tile.lane.t, head_dim = int(p.head_dim);
#pragma unroll
  for (int m = 0; m < S::M_TILES; ++m)
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(softmax.row_sum[m][r]);
      const int sorted_row = tile.sorted_row(m) + 8 * r;
      if (sorted_row >= p.length) continue;
      const int64_t row = tile.head * p.length + row_index(p, tile.b, sorted_row);
      float* const to = split_out(call, tile.split, row);
#pragma unroll
      for (int d = 0; d < S::HEAD_DIM / 8; ++d)
        if (8 * d + 2 * t < head_dim) store_pair(to + 8 * d + 2 * t, out[m][d][2 * r], out[m][d][2 * r + 1]);
      if (t != 0) continue;
      split_values(call, SPLIT_MAX, tile.split)[row] = softmax.base(m, r);
      split_values(call, SPLIT_SUM, tile.split)[row] = sum;
      split_values(call, SPLIT_WEIGHTS, tile.split)[row] = softmax.template sum_of_weights<typename S::T>(m, r, sum);
    }
}

// One row merged from its parts, a lane for each part: sums, and the factor of this lane's part in them.
struct MergedRow {
  float base = 0, sum, weights, factor = 0;

  DEVICE MergedRow(const Call& call, int64_t row, int lane) {
    const bool is_part = lane < call.splits;
    const float own_sum = is_part ? split_values(call, SPLIT_SUM, lane)[row] : 0.f;
    const bool has_seen = own_sum != 0;  // else its base says nothing
    const float own_base = has_seen ? split_values(call, SPLIT_MAX, lane)[row] : -INFINITY;
    const float largest = warp_reduce(own_base, [](float a, float b) { return fmaxf(a, b); });
    if (largest != -INFINITY) base = largest;
    if (has_seen) factor = exp2_approximately(own_base - base);
    sum = warp_sum(has_seen ? factor * own_sum : 0.f);
    weights = warp_sum(has_seen ? factor * split_values(call, SPLIT_WEIGHTS, lane)[row] : 0.f);
  }
};

// A warp for each row, with what forward_epilogue and store_nan_rows do for a block that has all keys.
template <typename T>
KERNEL THREADS_PER_BLOCK(MERGE_THREADS, 1) merge_kernel(Call call) {
  const RelAttention& p = call.p;
  const int length = int(p.length), head_dim = int(p.head_dim), lane = thread_index() % WARP;
  const int item = block_index().x * (MERGE_THREADS / WARP) + thread_index() / WARP;
  const int head = item / length, sorted_row = item - head * length;
  const int b = head / int(p.heads), h = head - b * int(p.heads);
  if (b >= p.batch) return;
  const QueryRow of = load_query_row(p, b, sorted_row);
  const int64_t row = int64_t(head) * length + of.index;
  const MergedRow merged(call, row, lane);
  const bool is_nan = merged.sum == 0 && ballot(RowVisibility(p, of, b, h).sees_any(lane % 4));
  const float scale = is_nan ? NAN : merged.sum != 0 ? float(p.dropout.kept_scale) / merged.weights : 0.f;
  T* const to = rows_of<T>(p.out, b, h)(of.index);
  T* const residual = p.out_residual.data ? rows_of<T>(p.out_residual, b, h)(of.index) : nullptr;
#pragma unroll 1
  for (int first = 0; first < head_dim; first += 2 * WARP) {
    const int column = first + 2 * lane;
    float x[2] = {};
#pragma unroll 8
    for (int split = 0; split < call.splits; ++split) {
      const float factor = shuffle(merged.factor, split);
      if (factor == 0 || column >= head_dim) continue;
      const float* const from = split_out(call, split, row) + column;
      for (int i = 0; i < 2; ++i) x[i] += factor * from[i];
    }
    if (column < head_dim) store_rounded(to, residual, column, x[0] * scale, x[1] * scale);
  }
  if (lane != 0) return;
  const float same = split_values(call, SPLIT_SAME, 0)[row];
  static_cast<float*>(p.lse)[row] = merged.sum != 0 ? (merged.base + log2f(merged.sum) + same) * LN_2 : -INFINITY;
  static_cast<float*>(p.row_max)[row] = merged.base;
  static_cast<float*>(p.row_sum)[row] = is_nan ? NAN : merged.sum;
}

template <typename T>
const char* merge(const Call& call, Stream stream) {
  const int rows = int(call.p.batch * call.p.heads * call.p.length), together = MERGE_THREADS / WARP;
  return launch(merge_kernel<T>, {(rows + together - 1) / together, 1, 1}, MERGE_THREADS, 0, stream, call);
}

}  // namespace xlnet_kernels::cuda
