// Softmax by exponentials to the base 2: forward's online softmax, backward's P and dS. Scores are in units of log 2.
#pragma once

#include "tile.cuh"

namespace xlnet_kernels::cuda {

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Exponentials are taken of scores less row_max before anyone knows the tile's largest score. Only where what a lane
// adds up of a tile comes to more than this is row_max raised to the largest score, and the tile done again. The sum
// and the output have the same factor, which falls out of their quotient; float16 has room for it.
constexpr float LARGEST_SUM = 256;

// Fragments that the exponentials of 8 N keys make.
template <typename T, int N>
constexpr int WEIGHTS = 8 * N / DEPTH<T>;

// The state of a lane's rows, two in each tile of 16. SUMS_BY_MMA: of rounded weights, in 16 bits; where tensor cores
// are the bound, by additions.
template <int M_TILES, bool SUMS_BY_MMA = true>
struct OnlineSoftmax {
  float row_max[M_TILES][2];       // a score of each row, not much below the largest; -inf if it has seen none above
  float row_sum[M_TILES][2] = {};  // of this lane's columns
  // Rounded as they are for their product with the values: the output is a mean, and what rounding adds to all weights
  // together must not come out times the offset of the values. Of all columns, or without SUMS_BY_MMA of this lane's.
  float rounded_sum[M_TILES][2] = {};

  DEVICE OnlineSoftmax() {
    for (int m = 0; m < M_TILES; ++m) row_max[m][0] = row_max[m][1] = -INFINITY;
  }

  // The base of exponentials of row r of tile m; 0 if there are none, so that hidden scores have 0.
  DEVICE float base(int m, int r) const { return row_max[m][r] == -INFINITY ? 0.f : row_max[m][r]; }

  // The scores' exponentials, rounded as the product with the values takes them; scales sum and output again where
  // row_max grows.
  template <typename T, int N, int COLUMNS>
  DEVICE void step(int m, const float (&score)[N][4], float (&out)[COLUMNS][4], Fragment (&weights)[WEIGHTS<T, N>]) {
    float sum[2];
    exponentials<T>(score, row_max[m], weights, sum);  // of a row that has seen nothing: inf, or NaN
    if (!fits(sum)) raise<T>(m, score, out, weights, sum);
    add_sums<T>(m, weights, sum);
  }

  // A step of all tiles. They share each branch, so that instructions of one hide the latency of another's.
  template <typename T, int N, int COLUMNS>
  DEVICE void step(const float (&score)[M_TILES][N][4], float (&out)[M_TILES][COLUMNS][4],
                   Fragment (&weights)[M_TILES][WEIGHTS<T, N>]) {
    float sum[M_TILES][2];
    bool all_fit = true;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      exponentials<T>(score[m], row_max[m], weights[m], sum[m]);
      all_fit &= lane_fits(sum[m]);
    }
    if (ballot(!all_fit)) {
#pragma unroll
      for (int m = 0; m < M_TILES; ++m)
        if (!fits(sum[m])) raise<T>(m, score[m], out[m], weights[m], sum[m]);
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) add_sums<T>(m, weights[m], sum[m]);
  }

  // Whether this lane's sums let row_max stay as it is.
  DEVICE static bool lane_fits(const float (&sum)[2]) {
    return (sum[0] <= LARGEST_SUM) & (sum[1] <= LARGEST_SUM);  // NaN does not
  }
  // Whether all lanes' sums do.
  DEVICE static bool fits(const float (&sum)[2]) { return !ballot(!lane_fits(sum)); }

  template <typename T, int N, int COLUMNS>
  DEVICE void raise(int m, const float (&score)[N][4], float (&out)[COLUMNS][4], Fragment (&weights)[WEIGHTS<T, N>],
                    float (&sum)[2]) {
    raise_maximum(m, score, out);
    const float bases[2] = {base(m, 0), base(m, 1)};
    exponentials<T>(score, bases, weights, sum);
  }

  template <typename T, int WORDS>
  DEVICE void add_sums(int m, const Fragment (&weights)[WORDS], const float (&sum)[2]) {
    for (int r = 0; r < 2; ++r) row_sum[m][r] += sum[r];
    if constexpr (sizeof(T) == 2) {
      float rounded[4] = {};
#pragma unroll
      for (int k = 0; k < WORDS; ++k)
        if constexpr (SUMS_BY_MMA)
          multiply<T>(rounded, weights[k], ones<T>(), 0, false);
        else
          add_words<T>(weights[k], rounded);
      for (int r = 0; r < 2; ++r) rounded_sum[m][r] += rounded[2 * r];
    }
  }

  // To rounded[0] and rounded[2] the weights of the two rows.
  template <typename T>
  DEVICE static void add_words(const Fragment& weights, float (&rounded)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float pair[2];
      unpack<T>(weights.word[i], pair);
      rounded[i % 2 * 2] += pair[0];
      rounded[i % 2 * 2] += pair[1];
    }
  }

  // The divisor of the output of row r of tile m; `sum`: of its exponentials. Called by all lanes of a warp.
  template <typename T>
  DEVICE float sum_of_weights(int m, int r, float sum) const {
    if constexpr (sizeof(T) != 2) return sum;
    return SUMS_BY_MMA ? rounded_sum[m][r] : quad_sum(rounded_sum[m][r]);
  }

  template <typename T, int N>
  DEVICE static void exponentials(const float (&score)[N][4], const float (&bases)[2],
                                  Fragment (&weights)[WEIGHTS<T, N>], float (&sum)[2]) {
    constexpr int EACH = N / WEIGHTS<T, N>;
#pragma unroll
    for (int n = 0; n < N; n += EACH) {
      float of[EACH][4];
#pragma unroll
      for (int j = 0; j < EACH; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          of[j][i] = exp2_approximately(score[n + j][i] - bases[i / 2]);
          sum[i / 2] = n + j == 0 && i % 2 == 0 ? of[j][i] : sum[i / 2] + of[j][i];
        }
      weights[n / EACH] = as_fragment<T>(of);
    }
  }

  // To the largest score there was. Not by how much a score exceeds row_max, which is a rounded number: old and new
  // exponentials are then relative to the same one.
  template <int N, int COLUMNS>
  DEVICE void raise_maximum(int m, const float (&score)[N][4], float (&out)[COLUMNS][4]) {
    float largest[2] = {-INFINITY, -INFINITY}, shrink[2];
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], score[n][i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = row_max[m][r];
      row_max[m][r] = fmaxf(before, quad_max(largest[r]));
      shrink[r] = exp2_approximately(before - base(m, r));  // 0 where nothing is there yet
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
