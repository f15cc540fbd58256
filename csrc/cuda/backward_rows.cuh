// Per-row statistics of backward, made once for all of its blocks.
#pragma once

#include "segments.cuh"
#include "softmax.cuh"

namespace xlnet_kernels::cuda {

// A warp's rows: the head, and the first of ROWS_AT_ONCE rows of `count`
struct HeadItem {
  int head, first;
};
DEVICE HeadItem head_item(int64_t item, int count) {
  const int parts = tiles_of(count, ROWS_AT_ONCE), head = int(item) / parts;
  return {head, (int(item) - head * parts) * ROWS_AT_ONCE};
}

// A chunk of the output before it was rounded; `residual` is null where it was not.
template <typename T>
DEVICE void load_unrounded(const T* out, const T* residual, float (&x)[CHUNK<T>]) {
  load_chunk(out, x);
  if constexpr (sizeof(T) == 2) {
    if (residual == nullptr) return;
    float rest[CHUNK<T>];
    load_chunk(residual, rest);
#pragma unroll
    for (int d = 0; d < CHUNK<T>; ++d) x[d] = clamp_to_finite<T>(x[d]) + rest[d];
  }
}

// Of ROWS_AT_ONCE rows of one head from `first` on.
template <typename T>
DEVICE void row_statistics(const Backward& a, int head, int first) {
  const RelAttention& p = a.call.p;
  const Gradients& grad = a.gradients;
  const int b = head / int(p.heads), h = head % int(p.heads);
  const int64_t all_rows = p.batch * p.heads * p.length, first_row = head * p.length;
  const auto queries = rows_of<const T>(p.rows.query, b, h), outs = rows_of<const T>(p.out, b, h);
  const auto residuals = rows_of<const T>(p.out_residual, b, h), grad_outs = rows_of<const T>(grad.out, b, h);
  const RowLanes<T> lanes(int(p.head_dim));
  const bool has_segments = p.segments.embed != nullptr;
  float bias[CHUNK<T>] = {}, difference[CHUNK<T>] = {};
  if (has_segments && lanes.inside) {
    const SegmentEmbed<T> embed(p, h);
    float same[CHUNK<T>];
    load_chunk(embed.same + lanes.column, same);
    load_chunk(embed.different + lanes.column, difference);
    if (embed.bias) load_chunk(embed.bias + lanes.column, bias);
#pragma unroll
    for (int d = 0; d < CHUNK<T>; ++d) difference[d] -= same[d];
  }
  lanes.for_each(first, int(p.length), [&](int i, bool inside) {
    float delta = 0, different = 0;
    if (inside && lanes.inside) {
      float x[CHUNK<T>], grad_out[CHUNK<T>];
      load_unrounded(outs(i) + lanes.column, p.out_residual.data ? residuals(i) + lanes.column : nullptr, x);
      load_chunk(grad_outs(i) + lanes.column, grad_out);
#pragma unroll
      for (int d = 0; d < CHUNK<T>; ++d) delta += x[d] * grad_out[d];
      if (has_segments) {
        load_chunk(queries(i) + lanes.column, x);
#pragma unroll
        for (int d = 0; d < CHUNK<T>; ++d) different += (x[d] + bias[d]) * difference[d];
      }
    }
    delta = lanes.row_sum(delta);
    if (has_segments) different = lanes.row_sum(different);
    if (lanes.column != 0 || !inside) return;
    const int64_t row = first_row + i;
    const float row_sum = static_cast<const float*>(p.row_sum)[row];
    const bool is_masked = row_sum == 0;
    const float inverse = is_masked ? 0.f : 1 / row_sum;
    delta -= grad.lse ? grad.lse[row] : 0.f;
    float* const values = grad.row_values + row;
    values[ROW_MAX * all_rows] = static_cast<const float*>(p.row_max)[row];
    values[INVERSE * all_rows] = inverse;
    values[DELTA * all_rows] = is_masked ? 0.f : delta * inverse;
    values[DIFFERENT * all_rows] = different * float(p.scale) * LOG2_E;
  });
}

}  // namespace xlnet_kernels::cuda
