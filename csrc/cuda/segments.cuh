// The segment term: (q + b).s[0] for keys of the row's own segment, (q + b).s[1] for all others. Softmax sees only by
// how much the second is more; the first is in the log-sum-exp alone.
#pragma once

#include "visibility.cuh"

namespace xlnet_kernels::cuda {

// One head's embeddings, where there are segments.
template <typename T>
struct SegmentEmbed {
  const T *same, *different, *bias;  // bias null: none

  DEVICE SegmentEmbed(const RelAttention& p, int64_t h)
      : same(static_cast<const T*>(p.segments.embed) + h * p.head_dim),
        different(same + p.heads * p.head_dim),
        bias(bias_of_head<T>(p.segments.bias, p, h)) {}

  // Adds what element d of a query gives to (q + b).s[0] and to (q + b).(s[1] - s[0]).
  DEVICE void add(int d, float query, float& same_score, float& difference) const {
    const float x = query + (bias ? to_float(bias[d]) : 0.f), of_same = to_float(same[d]);
    same_score += x * of_same;
    difference += x * (to_float(different[d]) - of_same);
  }
};

// Scores of the two rows whose query is in `q`: (q + b).s[0] scale, and (q + b).(s[1] - s[0]) scale for keys elsewhere.
// In 16 bits by mma, whose columns 0 and 1 are both s, and b as if it were rows of its own.
template <typename T, int STEPS>
DEVICE void segment_scores(const RelAttention& p, const Fragment (&q)[STEPS], int h, int t, float scale,
                           float (&same)[2], float (&difference)[2]) {
  if (p.segments.embed == nullptr) return;
  const SegmentEmbed<T> embed(p, h);
  const int head_dim = int(p.head_dim), lane = thread_index() % WARP, column = lane / 4;
  if constexpr (sizeof(T) == 2) {
    const T* const of_column = column == 0 ? embed.same : embed.different;
    float sum[4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      uint32_t right[2], bias[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int d = step * DEPTH<T> + 2 * t + i * CHUNK<T>;
        right[i] = column < 2 && d < head_dim ? *reinterpret_cast<const uint32_t*>(of_column + d) : 0;
        bias[i] = embed.bias && d < head_dim ? *reinterpret_cast<const uint32_t*>(embed.bias + d) : 0;
      }
      mma<T>(sum, q[step].word, right);
      mma<T>(sum, {bias[0], bias[0], bias[1], bias[1]}, right);
    }
    for (int r = 0; r < 2; ++r) {
      same[r] = shuffle(sum[2 * r], lane - t) * scale;
      difference[r] = shuffle(sum[2 * r + 1] - sum[2 * r], lane - t) * scale;
    }
  } else {
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int d = step * DEPTH<T> + t + i / 2 * CHUNK<T>;
        if (d < head_dim) embed.add(d, float_of(q[step].word[i]), same[i % 2], difference[i % 2]);
      }
    for (int r = 0; r < 2; ++r) {
      same[r] = quad_sum(same[r]) * scale;
      difference[r] = quad_sum(difference[r]) * scale;
    }
  }
}

// Whether element i of columns 8 n .. 8 n + 7 is a pair of different segments.
DEVICE bool is_different(const int32_t* key_segment, const RowLabels (&row)[2], int n, int i, int t) {
  return key_segment[8 * n + 2 * t + i % 2] != row[i / 2].segment;
}

// Scales the scores of 8 N keys, and adds `different` where the key is of another segment. One rounding in all: a score
// is the same number in both passes, but for roundings of `different`, which backward sums in another order, and, where
// one pass alone is that of sm_90a, of products by wgmma, which need not be those of mma to the last bit.
// Less `base`, which backward on sm_90a alone gives: there the difference is rounded, not the score.
template <int N>
DEVICE void add_segments(float (&score)[N][4], float scale, const int32_t* key_segment, const RowLabels (&row)[2],
                         const float (&different)[2], int t, const float (&base)[2] = {}) {
  const float others[2] = {different[0] - base[0], different[1] - base[1]};
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      score[n][i] = score[n][i] * scale + (is_different(key_segment, row, n, i, t) ? others[i / 2] : -base[i / 2]);
}

// Whether the labels of COUNT keys are of one segment. All lanes of a warp ask.
template <int COUNT>
DEVICE bool is_one_segment(const int32_t* key_segment, int lane) {
  bool is_other = false;
#pragma unroll
  for (int k = 0; k < COUNT; k += WARP) is_other |= key_segment[(k + lane) % COUNT] != key_segment[0];
  return !ballot(is_other);
}

// Scale and segments for keys that are all of this segment: one multiply-add.
template <int N>
DEVICE void add_segment(float (&score)[N][4], float scale, int32_t segment, const RowLabels (&row)[2],
                        const float (&different)[2]) {
  float added[2];
  for (int r = 0; r < 2; ++r) added[r] = row[r].segment != segment ? different[r] : 0.f;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) score[n][i] = score[n][i] * scale + added[i / 2];
}

}  // namespace xlnet_kernels::cuda
