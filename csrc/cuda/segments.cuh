// The relative segment term of a row: one score for keys of its own segment, another for all others.
#pragma once

#include "labels.cuh"

namespace xlnet_kernels::cuda {

// Of the two rows whose query is in `q`: (q + b).s[0] scale, and (q + b).(s[1] - s[0]) scale for keys elsewhere.
// Softmax does not see the first, only the log-sum-exp does.
template <typename T, int STEPS>
DEVICE void segment_scores(const RelAttention& p, const Operand (&q)[STEPS], int h, int t, float scale,
                           float (&same)[2], float (&different)[2]) {
  if (p.segments.embed == nullptr) return;
  const int width = int(p.head_dim);
  const T* own = static_cast<const T*>(p.segments.embed) + h * width;
  const T* other = own + p.heads * width;
  const T* bias = static_cast<const T*>(p.segments.bias) + h * width;
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr int EACH = 4 / sizeof(T);
      float values[EACH];
      unpack<T>(q[step].word[i], values);
      for (int e = 0; e < EACH; ++e) {
        const int d = step * DEPTH<T> + t * EACH + i / 2 * CHUNK<T> + e;
        if (d >= width) continue;
        const float x = values[e] + (p.segments.bias ? to_float(bias[d]) : 0.f);
        same[i % 2] += x * to_float(own[d]) * scale;
        different[i % 2] += x * (to_float(other[d]) - to_float(own[d])) * scale;
      }
    }
  for (int r = 0; r < 2; ++r) {
    same[r] = sum_of_quad(same[r]);
    different[r] = sum_of_quad(different[r]);
  }
}

}  // namespace xlnet_kernels::cuda
