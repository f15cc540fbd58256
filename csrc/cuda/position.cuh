// The position term of 16 rows: the band (q + v).r, and each row's part of it.
#pragma once

#include "labels.cuh"
#include "shift.cuh"

namespace xlnet_kernels::cuda {

// A block looks at rel_key through a window of BM + BN rows, which serves rows that lag at most BM - 1 positions behind
// the block's last one. Rows further apart take several windows, one after the other.
//
// Of the rows of a warp: `lag` is how far a row's position lies behind that of the window's first row of rel_key.
// Calls use(begin, shift, mine) for each run of 16 lags that one of the warp's rows has: columns begin .. of the window
// are the band's, shift[row] is the row's own shift (0 .. 15), and mine[row] says that the run is this row's.
template <int BM, typename Use>
DEVICE void for_each_run(const int (&lag)[2], Use use) {
  bool waits[2] = {lag[0] >= 0 && lag[0] < BM, lag[1] >= 0 && lag[1] < BM};
  while (true) {
    int first = BM;
    for (int row = 0; row < 2; ++row)
      if (waits[row]) first = smaller(first, lag[row]);
    first = least_of_warp(first);
    if (first == BM) return;
    const int begin = smaller(first, BM - 16);
    bool mine[2];
    int shift[2];
    for (int row = 0; row < 2; ++row) {
      mine[row] = waits[row] && lag[row] - begin < 16;
      shift[row] = mine[row] ? lag[row] - begin : 0;
      waits[row] = waits[row] && !mine[row];
    }
    use(begin, shift, mine);
  }
}

// v.r of the rows of rel_key.
DEVICE const float* rel_bias_of(const Call& call, int b, int h) {
  const int64_t head = (call.shared_rel_key ? 0 : b) * call.p.heads + h;
  return call.workspace.rel_bias + head * call.rel_bias_rows;
}

// Adds the position term to the warp's scores (16 x 8 N). `row0` is the window's first row of rel_key; load_query(k)
// gives the operand at depth k.
template <typename T, int BM, int D, int N, typename Ring, typename Query>
DEVICE void add_position_scores(float (&score)[N][4], const Ring& ring, int row0, const float* bias,
                                const int (&lag)[2], bool tf32, int lane, Query load_query) {
  for_each_run<BM>(lag, [&](int begin, const int (&shift)[2], const bool (&mine)[2]) {
    float band[4][4] = {};  // tiles n - 2 .. n + 1 of eight columns
#pragma unroll
    for (int n = 0; n < N + 2; n += 2) {
      const int row = row0 + begin + 8 * n;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          band[half][i] = band[half + 2][i];
          band[half + 2][i] = bias[row + 8 * half + lane % 4 * 2 + i % 2];
        }
      }
#pragma unroll
      for (int k = 0; k < D; k += DEPTH<T>) {
        const Operand q = load_query(k), r = load_b(ring, row, k, lane);
        multiply<T>(band[2], q, r, 0, tf32);
        multiply<T>(band[3], q, r, 1, tf32);
      }
      if (n == 0) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float shifted[4];
        shift_in(shifted, band[half], band[half + 1], band[half + 2], shift, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (mine[i / 2]) score[n - 2 + half][i] += shifted[i];
      }
    }
  });
}

}  // namespace xlnet_kernels::cuda
