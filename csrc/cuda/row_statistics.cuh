// Per-row statistics of backward, made once for all of its blocks.
#pragma once

#include "segments.cuh"
#include "softmax.cuh"

namespace xlnet_kernels::cuda {

// A warp's rows: the head, and the first of ROWS_AT_ONCE rows of `count`
struct HeadItem {
  int head, first;
};
DEVICE HeadItem head_item(int item, int count) {
  const int parts = tiles_of(count, ROWS_AT_ONCE), head = item / parts;
  return {head, (item - head * parts) * ROWS_AT_ONCE};
}

// A chunk of the output before it was rounded, of what it was rounded to and what that took.
template <typename T>
DEVICE void unround(float (&x)[CHUNK<T>], const float (&residual)[CHUNK<T>]) {
  bool is_infinite = false;
#pragma unroll
  for (int d = 0; d < CHUNK<T>; ++d) is_infinite |= fabsf(x[d]) == INFINITY;
  if (is_infinite)
    for (int d = 0; d < CHUNK<T>; ++d) x[d] = clamp_to_finite<T>(x[d]);
#pragma unroll
  for (int d = 0; d < CHUNK<T>; ++d) x[d] += residual[d];
}

// Statistics of ROWS_AT_ONCE rows of one head from `first` on.
template <typename T>
DEVICE void row_statistics(const Backward& a, int head, int first) {
  const RelAttention& p = a.call.p;
  const Gradients& grad = a.gradients;
  const int b = head / int(p.heads), h = head % int(p.heads);
  const int64_t all_rows = p.batch * p.heads * p.length, first_row = head * p.length;
  constexpr int PASSES = 2;
  const RowLanes<CHUNK<T>, PASSES> lanes(int(p.head_dim));
  const auto walk = [&](const Tensor4& of) { return RowWalk<const T>(rows_of<const T>(of, b, h), first, lanes); };
  RowWalk<const T> queries = walk(p.rows.query), outs = walk(p.out), residuals = walk(p.out_residual),
                   grad_outs = walk(grad.out);
  const bool has_segments = p.segments.embed != nullptr, has_residual = p.out_residual.data != nullptr;
  float difference[CHUNK<T>] = {}, of_bias = 0;  // s[1] - s[0], and this lane's part of b.(s[1] - s[0])
  if (has_segments && lanes.inside) {
    const SegmentEmbed<T> embed(p, h);
    float same[CHUNK<T>], bias[CHUNK<T>] = {};
    load_chunk(embed.same + lanes.column, same);
    load_chunk(embed.different + lanes.column, difference);
    if (embed.bias) load_chunk(embed.bias + lanes.column, bias);
#pragma unroll
    for (int d = 0; d < CHUNK<T>; ++d) {
      difference[d] -= same[d];
      of_bias += bias[d] * difference[d];
    }
  }
  float delta = 0, different = 0;  // each lane's row's, of the ROWS_AT_ONCE
  lanes.for_each([&](int base) {
    Bytes16 query[PASSES] = {}, out[PASSES] = {}, residual[PASSES] = {}, grad_out[PASSES] = {};
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      const auto load = [&](Bytes16& to, RowWalk<const T>& from, bool is_there) {
        const T* const row = from.next();
        if (is_there) to = *reinterpret_cast<const Bytes16*>(row);
      };
      const bool inside = first + base + i * lanes.rows + lanes.row < p.length && lanes.inside;
      load(out[i], outs, inside);
      load(residual[i], residuals, inside && has_residual);
      load(grad_out[i], grad_outs, inside);
      load(query[i], queries, inside && has_segments);
    }
    float sums[2 * PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      float x[CHUNK<T>], y[CHUNK<T>];
      unpack_chunk<T>(out[i], x);
      if constexpr (sizeof(T) == 2) {
        unpack_chunk<T>(residual[i], y);
        if (has_residual) unround<T>(x, y);
      }
      unpack_chunk<T>(grad_out[i], y);
      float &delta = sums[2 * i] = 0, &different = sums[2 * i + 1] = of_bias;
#pragma unroll
      for (int d = 0; d < CHUNK<T>; ++d) delta += x[d] * y[d];
      unpack_chunk<T>(query[i], x);
#pragma unroll
      for (int d = 0; d < CHUNK<T>; ++d) different += x[d] * difference[d];
    }
    lanes.add_up(sums);
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      lanes.keep_own(delta, sums[2 * i], base + i * lanes.rows);
      lanes.keep_own(different, sums[2 * i + 1], base + i * lanes.rows);
    }
  });
  if (first + lanes.lane >= p.length) return;
  const int64_t row = first_row + first + lanes.lane;
  const float row_sum = static_cast<const float*>(p.row_sum)[row];
  const bool is_masked = row_sum == 0;
  const float inverse = is_masked ? 0.f : 1 / row_sum;
  delta -= grad.lse ? grad.lse[row] : 0.f;
  float* const values = grad.row_values + row;
  values[ROW_MAX * all_rows] = static_cast<const float*>(p.row_max)[row];
  values[INVERSE * all_rows] = inverse;
  values[DELTA * all_rows] = is_masked ? 0.f : delta * inverse;
  values[DIFFERENT * all_rows] = different * float(p.scale) * LOG2_E;
}

}  // namespace xlnet_kernels::cuda
