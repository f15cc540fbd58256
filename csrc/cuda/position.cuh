// The position term of 16 rows: the band (q + v).r, and each row's part of it.
#pragma once

#include "labels.cuh"
#include "shift.cuh"

namespace xlnet_kernels::cuda {

// A block looks at rel_key through a window of BM + BN rows, which serves rows that lag at most BM - 1 positions behind
// the block's last one. Rows further apart take several windows, one after the other.
//
// Of the rows of a warp, `lag` is how far a row's position lies behind that of the window's first row of rel_key. A run
// is 16 neighbouring lags: their band begins with column `begin` of the window.
struct Run {
  int begin;  // or NO_RUN
  Shift shift[2];
};
constexpr int NO_RUN = -1;

// The run of the least lag among the warp's rows that wait, which do not wait any more then.
template <int BM>
DEVICE Run next_run(const int (&lag)[2], bool (&waits)[2], int lane) {
  int first = BM;
  for (int row = 0; row < 2; ++row)
    if (waits[row]) first = smaller(first, lag[row]);
  first = least_of_warp(first);
  Run run{first < BM ? smaller(first, BM - 16) : NO_RUN, {}};
  for (int row = 0; row < 2; ++row) {
    const bool mine = waits[row] && lag[row] - run.begin < 16;
    run.shift[row] = shift_by(mine ? lag[row] - run.begin : 0, mine, lane);
    waits[row] = waits[row] && !mine;
  }
  return run;
}

// The runs of one window. In the first one, which is all there is unless positions are far apart, the first run is the
// same for every tile, and mostly there is no other.
template <int BM>
struct Runs {
  Run first;
  bool more;

  DEVICE static void find_waiting(const int (&lag)[2], bool (&waits)[2]) {
    for (int row = 0; row < 2; ++row) waits[row] = lag[row] >= 0 && lag[row] < BM;
  }

  // Of the first window.
  DEVICE void find(const int (&lag)[2], int lane) {
    bool waits[2];
    find_waiting(lag, waits);
    first = next_run<BM>(lag, waits, lane);
    more = ballot(waits[0] || waits[1]) != 0;
  }

  // use(run) for every run of a window; lag_of(row) is a row's lag behind it.
  template <typename Lag, typename Use>
  DEVICE void for_each(Lag lag_of, bool in_first, int lane, Use use) const {
    Run run = first;
    const bool single = in_first && !more;
    int lag[2];
    bool waits[2];
    if (!single) {
      for (int row = 0; row < 2; ++row) lag[row] = lag_of(row);
      find_waiting(lag, waits);
      run = next_run<BM>(lag, waits, lane);
    }
    while (run.begin != NO_RUN) {
      use(run);
      if (single) return;
      run = next_run<BM>(lag, waits, lane);
    }
  }
};

// v.r of the rows of rel_key.
DEVICE const float* rel_bias_of(const Call& call, int b, int h) {
  const int64_t head = (call.shared_rel_key ? 0 : b) * call.p.heads + h;
  return call.workspace.rel_bias + head * call.rel_bias_rows;
}

// Adds the position term of a run to the warp's scores (16 x 8 N). `row0` is the window's first row of rel_key;
// load_query(k) gives the operand at depth k.
template <typename T, int D, int N, typename Ring, typename Query>
DEVICE void add_position_scores(float (&score)[N][4], const Ring& ring, int row0, const float* bias, const Run& run,
                                bool tf32, int lane, Query load_query) {
  float band[4][4] = {};  // tiles n - 2 .. n + 1 of eight columns
#pragma unroll
  for (int n = 0; n < N + 2; n += 2) {
    const int row = row0 + run.begin + 8 * n;
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
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        add_shifted(score[n - 2 + half] + 2 * r, band[half] + 2 * r, band[half + 1] + 2 * r, band[half + 2] + 2 * r,
                    run.shift[r]);
  }
}

}  // namespace xlnet_kernels::cuda
