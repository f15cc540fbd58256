// Softmax by exponentials to the base 2: forward's online softmax, backward's P and dS. Scores are in units of log 2.
#pragma once

#include "tile.cuh"

namespace xlnet_kernels::cuda {

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Exponentials are taken of scores less row_max, which is raised only when a score has come this far above it: they are
// at most 256. The sum and the output have the same factor, which falls out of their quotient.
constexpr float RESCALE_THRESHOLD = 8;

// The state of a lane's rows, two in each tile of 16. Scores come less row_max: add_segments subtracts it.
template <int M_TILES>
struct OnlineSoftmax {
  float row_max[M_TILES][2] = {};  // of each row's scores, or as much less as RESCALE_THRESHOLD allows
  float row_sum[M_TILES][2] = {};  // of this lane's columns
  uint32_t empty = ~0u;            // a bit for each row: it has seen no key yet, row_max is none

  DEVICE bool grows(int m, int r, float largest) const {
    return largest > (empty >> (2 * m + r) & 1 ? -INFINITY : RESCALE_THRESHOLD);
  }

  // Turns scores into exponentials, and scales sum and output again where a row's maximum grows.
  template <int N, int COLUMNS>
  DEVICE void step(int m, float (&score)[N][4], float (&out)[COLUMNS][4]) {
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], score[n][i]);
    if (ballot(grows(m, 0, largest[0]) || grows(m, 1, largest[1]))) rescale(m, largest, score, out);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[n][i] = exp2_approximately(score[n][i]);
        row_sum[m][i / 2] += score[n][i];
      }
  }

  template <int N, int COLUMNS>
  DEVICE void rescale(int m, float (&largest)[2], float (&score)[N][4], float (&out)[COLUMNS][4]) {
    float grown[2], shrink[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = quad_max(largest[r]);
      const bool is_grown = grows(m, r, largest[r]);
      grown[r] = is_grown ? largest[r] : 0.f;
      shrink[r] = exp2_approximately(-fmaxf(grown[r], 0.f));  // less than 0: nothing is there yet
      if (is_grown) empty &= ~(1u << (2 * m + r));
      row_max[m][r] += grown[r];
      row_sum[m][r] *= shrink[r];
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] -= grown[i / 2];
#pragma unroll
    for (int d = 0; d < COLUMNS; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[d][i] *= shrink[i / 2];
  }
};

// Backward, of one pair: score, less the log-sum-exp, becomes dS; returns P as the values had it. `factor`: 1 / (1 -
// p), or 0 where dropped; dp: the gradient of what the value is multiplied with.
DEVICE float softmax_backward(float& score, float dp, float factor, float delta, float scale) {
  const bool hidden = score == -INFINITY;
  const float exponential = exp2_approximately(score);
  // not times zero: a fully masked row, or one that sees NaN elsewhere, may have NaN for delta or log-sum-exp
  score = hidden ? 0.f : exponential * (dp * factor - delta) * scale;
  return hidden ? 0.f : exponential * factor;
}

}  // namespace xlnet_kernels::cuda
