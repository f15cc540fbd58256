// Softmax by exponentials to the base 2: forward's online softmax, backward's P and dS. Scores are in units of log 2.
#pragma once

#include "tile.cuh"

namespace xlnet_kernels::cuda {

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Exponentials are taken of scores less row_max, which is raised only when a score has come this far above it: they are
// at most 256. The sum and the output have the same factor, which falls out of their quotient.
constexpr float RESCALE_THRESHOLD = 8;

// The state of a lane's rows, two in each tile of 16.
template <int M_TILES>
struct OnlineSoftmax {
  float row_max[M_TILES][2] = {};  // of each row's scores, or as much less as RESCALE_THRESHOLD allows; 0 if empty
  float row_sum[M_TILES][2] = {};  // of this lane's columns
  // Of all columns, rounded as they are for their product with the values: the output is a mean, and what rounding adds
  // to all weights together must not come out times the offset of the values.
  float rounded_sum[M_TILES][2] = {};
  uint32_t empty = ~0u;  // a bit for each row: it has seen no key yet, row_max is none

  DEVICE bool grows(int m, int r, float largest) const {
    return largest > (empty >> (2 * m + r) & 1 ? -INFINITY : row_max[m][r] + RESCALE_THRESHOLD);
  }

  // Turns scores into exponentials, and scales sum and output again where a row's maximum grows.
  template <typename T, int N, int COLUMNS>
  DEVICE void step(int m, float (&score)[N][4], float (&out)[COLUMNS][4]) {
    raise_maximum(m, score, out);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[n][i] = exp2_approximately(score[n][i] - row_max[m][i / 2]);
        row_sum[m][i / 2] += score[n][i];
      }
    if constexpr (sizeof(T) == 2) {
      float sum[4] = {};
#pragma unroll
      for (int n = 0; n < N; n += 2) multiply<T>(sum, as_fragment<T>(score + n), ones<T>(), 0, false);
      for (int r = 0; r < 2; ++r) rounded_sum[m][r] += sum[2 * r];
    }
  }

  // The same for 16-bit numbers; the exponentials as fragments too, rounded.
  template <typename T, int N, int COLUMNS>
  DEVICE void step(int m, float (&score)[N][4], float (&out)[COLUMNS][4], Fragment (&weights)[N / 2]) {
    raise_maximum(m, score, out);
    float sum[4] = {};
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[n][i] = exp2_approximately(score[n][i] - row_max[m][i / 2]);
        row_sum[m][i / 2] += score[n][i];
      }
      if (n % 2 == 0) continue;
      weights[n / 2] = as_fragment<T>(score + n - 1);
      multiply<T>(sum, weights[n / 2], ones<T>(), 0, false);
    }
    for (int r = 0; r < 2; ++r) rounded_sum[m][r] += sum[2 * r];
  }

  // What the output of row r of tile m is to be divided by; `sum`: of its exponentials
  template <typename T>
  DEVICE float sum_of_weights(int m, int r, float sum) const {
    return sizeof(T) == 2 ? rounded_sum[m][r] : sum;
  }

  template <int N, int COLUMNS>
  DEVICE void raise_maximum(int m, const float (&score)[N][4], float (&out)[COLUMNS][4]) {
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], score[n][i]);
    if (ballot(grows(m, 0, largest[0]) || grows(m, 1, largest[1]))) rescale(m, largest, out);
  }

  template <int COLUMNS>
  DEVICE void rescale(int m, float (&largest)[2], float (&out)[COLUMNS][4]) {
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = quad_max(largest[r]);
      const bool is_grown = grows(m, r, largest[r]);
      // grown by less than 0: nothing is there yet
      shrink[r] = is_grown ? exp2_approximately(-fmaxf(largest[r] - row_max[m][r], 0.f)) : 1.f;
      if (is_grown) empty &= ~(1u << (2 * m + r));
      if (is_grown) row_max[m][r] = largest[r];
      row_sum[m][r] *= shrink[r];
      rounded_sum[m][r] *= shrink[r];
    }
#pragma unroll
    for (int d = 0; d < COLUMNS; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[d][i] *= shrink[i / 2];
  }
};

// Backward, of one pair: score, less row_max, becomes dS, to be scaled in the end; returns P as the values had it.
// `factor`: 1 / row_sum / (1 - p), or 0 where dropped; delta: times 1 / row_sum; dP: the gradient of what the value is
// multiplied with.
DEVICE float softmax_backward(float& score, float dP, float factor, float delta) {
  const bool hidden = score == -INFINITY;
  const float exponential = exp2_approximately(score);
  // not times zero: a row that sees NaN elsewhere has NaN for delta and row_sum
  score = hidden ? 0.f : exponential * (dP * factor - delta);
  return hidden ? 0.f : exponential * factor;
}

}  // namespace xlnet_kernels::cuda
