// Softmax, in powers of 2: queries are scaled by log2(e), so that exp2 is all it takes.
#pragma once

#include "scratch.h"
#include "tile_sizes.h"
#include "vector.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

constexpr double LOG2E = 1.44269504088896340736, LN2 = 0.69314718055994530942;

// Online softmax of a block of rows (Dao et al. 2022)
template <typename T>
struct OnlineSoftmax {
  T row_max[MAX_ROWS], row_sum[MAX_ROWS];

  OnlineSoftmax() {
    for (int64_t r = 0; r < MAX_ROWS; ++r) {
      row_max[r] = -static_cast<T>(INFINITY);
      row_sum[r] = 0;
    }
  }

  // Updates row_max by the largest of the first `visible` scores of row r, and multiplies `out` and row_sum by
  // `factor`. Returns the number of scores that count: all or none.
  int64_t take_max(int64_t r, int64_t visible, T tile_max, const T* score, T* out, int64_t padded_dim, T& factor) {
    factor = 1;
    if (tile_max == -static_cast<T>(INFINITY)) {  // nothing visible, or NaN throughout, which must not vanish
      for (int64_t j = 0; j < visible; ++j)
        if (score[j] != score[j]) row_sum[r] = score[j];
      return 0;
    }
    if (visible > 0 && row_max[r] == -static_cast<T>(INFINITY)) {  // nothing has been summed
      row_max[r] = tile_max;
    } else if (visible > 0 && !(tile_max <= row_max[r])) {
      factor = exp2(broadcast(row_max[r] - tile_max))[0];
      row_sum[r] *= factor;
      for (int64_t d = 0; d < padded_dim; d += LANES<T>) store(out + d, load(out + d) * factor);
      row_max[r] = tile_max;
    }
    return visible;
  }

  // `count` scores of row r, of which the first `visible` may be seen and `tile_max` is the largest, become
  // probabilities, to be divided by row_sum in the end. `out` is rescaled.
  ROW_LOOP void step(int64_t r, int64_t visible, int64_t count, T tile_max, T* score, T* out, int64_t padded_dim) {
    T factor;
    visible = take_max(r, visible, tile_max, score, out, padded_dim, factor);
    const T max = row_max[r];
    Vec<T> sums{};
    for (int64_t j = 0; j < visible; j += LANES<T>) {
      const Vec<T> P = exp2(load(score + j) - max);
      store(score + j, P);
      sums += P;
    }
    row_sum[r] += sum<T>(sums);
    for (int64_t j = visible; j < count; ++j) score[j] = 0;
  }

  // Normalizes the output; fully masked rows are zero, even where it is NaN.
  void normalize(int64_t r, T* out, int64_t padded_dim) const {
    if (row_sum[r] == 0) return clear(padded_dim, out);
    const T inverse = 1 / row_sum[r];
    for (int64_t d = 0; d < padded_dim; d += LANES<T>) store(out + d, load(out + d) * inverse);
  }

  // `shared`: a term of all scores of the row, which they do not contain
  T lse(int64_t r, T shared) const {
    if (row_sum[r] == 0) return -static_cast<T>(INFINITY);  // whatever `shared` is
    return (row_max[r] + shared) * static_cast<T>(LN2) + static_cast<T>(log(row_sum[r]));
  }
};

// Statistics of a row: from its scores come the probabilities again, from dP comes dS.
template <typename T>
struct SoftmaxRow {
  T row_max, inverse;  // as OnlineSoftmax left them; 1 / row_sum, 0 for fully masked rows
  T grad_lse;          // 0 for fully masked rows
  T delta;             // dO.O - grad_lse

  SoftmaxRow() = default;
  // `index`: of the row in (B, H, L); `out`: before it was rounded
  SoftmaxRow(const RelAttention& p, const void* saved_grad_lse, int64_t index, const T* out, const T* dO,
             int64_t padded_dim) {
    const T row_sum = static_cast<const T*>(p.row_sum)[index];
    row_max = static_cast<const T*>(p.row_max)[index];
    inverse = row_sum == 0 ? T(0) : 1 / row_sum;
    grad_lse = saved_grad_lse != nullptr && row_sum != 0 ? static_cast<const T*>(saved_grad_lse)[index] : T(0);
    Vec<T> products{};
    for (int64_t d = 0; d < padded_dim; d += LANES<T>) products += load(dO + d) * load(out + d);
    delta = sum<T>(products) - grad_lse;
  }

  bool is_fully_masked() const { return inverse == 0; }

  // Hidden pairs have no P and no dS, to keep NaN and infinity of hidden keys out of the row's gradients.
  INLINE_MEMBER IntVec<T> hidden(Vec<T> score) const { return score == -static_cast<T>(INFINITY); }
  INLINE_MEMBER Vec<T> P(Vec<T> score) const {
    return select<T>(hidden(score), Vec<T>{}, exp2(score - row_max) * inverse);
  }
  INLINE_MEMBER Vec<T> dS(Vec<T> score, Vec<T> P, Vec<T> dP) const {
    return select<T>(hidden(score), Vec<T>{}, P * (dP - delta));
  }
};

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
