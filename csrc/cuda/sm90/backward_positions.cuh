// What backward's consumers know of the shifts of their rows: how the band of scores, one half of the window after the
// other, and that of dS in shared memory go by them.
#pragma once

#include "accumulators.cuh"
#include "backward_memory.cuh"
#include "shift.cuh"

namespace xlnet_kernels::cuda {

// What rows R of a warp, g or g + 8, have of the lower half of the band, from tile BEGIN on. Where columns begin in its
// last two tiles, those wait in the scores for the upper half.
template <int R, int BEGIN>
DEVICE void take_lower_half(float (&score)[8][4], const float (&half)[8][4], QuadShift shift) {
#pragma unroll
  for (int n = 0; n < 8 - BEGIN; ++n) {
    const int tile = BEGIN + n;
    float columns[2] = {half[tile][2 * R], half[tile][2 * R + 1]};
    if (tile < 6) shifted_columns<R>(columns, half[tile], half[tile + 1], half[tile + 2], shift);
    for (int parity = 0; parity < 2; ++parity) score[n][2 * R + parity] = columns[parity];
  }
}

// Adds a row's columns of the upper half of the band.
template <int R, int BEGIN>
DEVICE void take_upper_half(float (&score)[8][4], const float (&half)[8][4], QuadShift shift) {
  const float beyond[4] = {};  // nobody's columns
  const float(&before)[8][4] = score;
#pragma unroll
  for (int n = BEGIN < 6 ? 6 - BEGIN : 0; n < 8; ++n) {
    const int tile = BEGIN + n - 8;
    float columns[2];
    shifted_columns<R>(columns, tile < 0 ? before[n] : half[tile],
                       tile < -1  ? before[n + 1]
                       : tile > 6 ? beyond
                                  : half[tile + 1],
                       tile > 5 ? beyond : half[tile + 2], shift);
    for (int parity = 0; parity < 2; ++parity) score[n][2 * R + parity] = columns[parity];
  }
}

// For a tile `begin` from FIRST to LAST.
template <bool UPPER, int R, int FIRST = 0, int LAST = 8>
DEVICE void take_half(float (&score)[8][4], const float (&half)[8][4], QuadShift shift, int begin) {
  constexpr int MIDDLE = (FIRST + LAST) / 2;
  if constexpr (FIRST < LAST) {
    if (begin <= MIDDLE)
      take_half<UPPER, R, FIRST, MIDDLE>(score, half, shift, begin);
    else
      take_half<UPPER, R, MIDDLE + 1, LAST>(score, half, shift, begin);
  } else if constexpr (UPPER) {
    take_upper_half<R, FIRST>(score, half, shift);
  } else {
    take_lower_half<R, FIRST>(score, half, shift);
  }
}

// Rows come one after the other.
template <bool POSITIONS>
struct BackwardShift {
  const QuadShift word;

  DEVICE explicit BackwardShift(int lane) : word(consecutive_shift(lane)) {}
  // Column of the band that row r of a lane's two, `row` of the tile, begins at
  DEVICE int column(int, int row) const { return 63 - row; }
  // Whether 16 columns `begin` of the lower or the upper half of the band have any dS of rows 16 k to 16 k + 15
  DEVICE bool has_dS(int half, int begin, int k) const {
    return half == 0 ? 16 * k >= 48 - begin : 16 * k <= 48 - begin;
  }
};

// Rows have positions of their own, and move within the band from tile to tile.
template <>
struct BackwardShift<true> : WarpgroupShift<true> {
  int place[2] = {};
  uint32_t served = 0;  // see has_dS: bits 2 k + 1 of the lower half, bits 2 k of the upper one

  DEVICE explicit BackwardShift(int lane) : WarpgroupShift<true>(lane) {}

  // To the next tile of rows. A row clears the part of its place in the band that it leaves; one that the tile does not
  // have keeps its place, to which zeros are stored.
  template <typename T>
  DEVICE void move(const SortedRows& rows, const Chunks<T>& band, const Lane& lane) {
    int shifts[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 16 * lane.warp + lane.g + 8 * r;
      shifts[r] = rows.shift[row];
      if (shifts[r] < 0) continue;
      const int left = shifts[r] > place[r] ? place[r] : shifts[r] + 64;  // the first column
      const int end = left + larger(shifts[r], place[r]) - smaller(shifts[r], place[r]);
#pragma unroll 1
      for (int column = left + lane.t; column < end; column += 4) band.at(row, column)->bits = 0;
      place[r] = shifts[r];
    }
    find(shifts, lane.id);
    const int shift = rows.shift[lane.id % 8 / 2 * 16 + lane.id % 2 * 15];
    served = ballot(lane.id % 2 ? shift < 16 * lane.warp + 16 : shift > 16 * lane.warp);
  }
  // Scores begin as biases and what each row has of the band, the lower half first.
  template <bool UPPER>
  DEVICE void take_band(float (&score)[8][4], const float (&half)[8][4], const float* bias, int t) const {
    take_half<UPPER, 0>(score, half, word[0], uniform(int(word[0].word >> BEGIN)));
    take_half<UPPER, 1>(score, half, word[1], uniform(int(word[1].word >> BEGIN)));
    if constexpr (UPPER)
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) score[n][i] += bias[8 * n + 2 * t + i % 2];
  }
  DEVICE int column(int r, int) const { return place[r]; }
  DEVICE bool has_dS(int half, int, int k) const { return served >> (2 * k + (half == 0)) & 1; }
};

}  // namespace xlnet_kernels::cuda
