// The relative shift of a warpgroup's band where rows come one after the other.
//
// The window of 64 rows is 128 columns wide: tiles 0 to 15 of eight. Row i of the 64 is shifted by 63 - i: warp w
// begins at column 16 (3 - w), and from there row g is shifted by 15 - g, row g + 8 by 7 - g. What is left within eight
// columns is the same for both.
#pragma once

#include "../shift.cuh"

namespace xlnet_kernels::cuda {

DEVICE QuadShift consecutive_shift(int lane) { return {kept_in_register(shift_by(7 - lane / 4, true, lane).word)}; }

// Tile `tile` of the window of 16 that `lower` and `upper` are.
DEVICE const float (&window_tile(const float (&lower)[8][4], const float (&upper)[8][4], int tile))[4] {
  return tile < 8 ? lower[tile] : upper[tile - 8];
}

// score[n] += what each row of warp W has of the band in columns 8 n to 8 n + 7.
template <int W>
DEVICE void add_shifted_band(float (&score)[8][4], const float (&lower)[8][4], const float (&upper)[8][4],
                             QuadShift shift) {
  const bool odd = shift.has(QuadShift::ODD);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float low[2], high[2] = {};
#pragma unroll
    for (int n = 0; n < 9; ++n) {
      const float (&tile)[4] = window_tile(lower, upper, 2 * (3 - W) + 1 - r + n);
      for (int parity = 0; parity < 2; ++parity) {
        low[parity] = high[parity];
        high[parity] = odd ? tile[2 * r + 1 - parity] : tile[2 * r + parity];
      }
      if (n == 0) continue;
      for (int parity = 0; parity < 2; ++parity) {
        const float given = shift.has(QuadShift::LATTER << parity) ? high[parity] : low[parity];
        score[n - 1][2 * r + parity] += shuffle(given, int(shift.word >> (8 + 8 * parity)));
      }
    }
  }
}

// Registers have no index: each warp has code of its own.
DEVICE void add_shifted_band(float (&score)[8][4], const float (&lower)[8][4], const float (&upper)[8][4],
                             QuadShift shift, int warp) {
  switch (warp % 4) {
    case 0:
      return add_shifted_band<0>(score, lower, upper, shift);
    case 1:
      return add_shifted_band<1>(score, lower, upper, shift);
    case 2:
      return add_shifted_band<2>(score, lower, upper, shift);
    default:
      return add_shifted_band<3>(score, lower, upper, shift);
  }
}

// The same, one half of the window's columns after the other. From the lower half to the upper one `carried` keeps what
// each row has offered last.
template <int W, bool UPPER>
DEVICE void add_shifted_half(float (&score)[8][4], const float (&half)[8][4], float (&carried)[2][2], QuadShift shift) {
  const bool odd = shift.has(QuadShift::ODD);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float low[2], high[2] = {carried[r][0], carried[r][1]};
#pragma unroll
    for (int n = 0; n < 9; ++n) {
      const int tile = 2 * (3 - W) + 1 - r + n;
      if (tile / 8 != UPPER) continue;
      for (int parity = 0; parity < 2; ++parity) {
        low[parity] = high[parity];
        high[parity] = odd ? half[tile % 8][2 * r + 1 - parity] : half[tile % 8][2 * r + parity];
      }
      if (n == 0) continue;
      for (int parity = 0; parity < 2; ++parity) {
        const float given = shift.has(QuadShift::LATTER << parity) ? high[parity] : low[parity];
        score[n - 1][2 * r + parity] += shuffle(given, int(shift.word >> (8 + 8 * parity)));
      }
    }
    for (int parity = 0; parity < 2; ++parity) carried[r][parity] = high[parity];
  }
}

template <bool UPPER>
DEVICE void add_shifted_half(float (&score)[8][4], const float (&half)[8][4], float (&carried)[2][2], QuadShift shift,
                             int warp) {
  switch (warp % 4) {
    case 0:
      return add_shifted_half<0, UPPER>(score, half, carried, shift);
    case 1:
      return add_shifted_half<1, UPPER>(score, half, carried, shift);
    case 2:
      return add_shifted_half<2, UPPER>(score, half, carried, shift);
    default:
      return add_shifted_half<3, UPPER>(score, half, carried, shift);
  }
}

}  // namespace xlnet_kernels::cuda
