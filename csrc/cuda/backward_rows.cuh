// Per-row statistics of backward, made once for all of its blocks.
#pragma once

#include "segments.cuh"
#include "softmax.cuh"

namespace xlnet_kernels::cuda {

constexpr int ROW_THREADS = 128;

// Element d of the output before it was rounded; `residual` is null where it was not.
template <typename T>
DEVICE float unrounded(const T* out, const T* residual, int d) {
  if constexpr (sizeof(T) == 2)
    if (residual) return clamp_to_finite<T>(to_float(out[d])) + to_float(residual[d]);
  return to_float(out[d]);
}

// A warp for each row.
template <typename T>
KERNEL THREADS_PER_BLOCK(ROW_THREADS, 1) rows_kernel(Backward a) {
  const RelAttention& p = a.call.p;
  const Gradients& grad = a.gradients;
  const int64_t all_rows = p.batch * p.heads * p.length;
  const int64_t row = int64_t(block_index().x) * (ROW_THREADS / WARP) + thread_index() / WARP;
  if (row >= all_rows) return;
  const int64_t i = row % p.length, head = row / p.length, b = head / p.heads, h = head % p.heads;
  const auto row_of = [&](const Tensor4& of) { return rows_of<const T>(of, int(b), int(h))(int(i)); };
  const T *query = row_of(p.rows.query), *out = row_of(p.out), *grad_out = row_of(grad.out);
  const T* residual = p.out_residual.data ? row_of(p.out_residual) : nullptr;
  const SegmentEmbed<T> embed(p, h);
  const int lane = thread_index() % WARP;
  float delta = 0, same = 0, different = 0;
  for (int d = lane; d < p.head_dim; d += WARP) {
    delta += unrounded(out, residual, d) * to_float(grad_out[d]);
    if (p.segments.embed) embed.add(d, to_float(query[d]), same, different);
  }
  delta = warp_sum(delta);
  same = warp_sum(same);
  different = warp_sum(different);
  if (lane != 0) return;
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

template <typename T>
const char* prepare_rows(const Backward& a, Stream stream) {
  constexpr int PER_BLOCK = ROW_THREADS / WARP;
  const int64_t rows = a.call.p.batch * a.call.p.heads * a.call.p.length;
  return launch(rows_kernel<T>, {int((rows + PER_BLOCK - 1) / PER_BLOCK), 1, 1}, ROW_THREADS, 0, stream, a);
}

}  // namespace xlnet_kernels::cuda
