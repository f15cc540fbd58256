// Shifts of the rows of backward's consumers: of the band of scores, one half of the window after the other, and of
// that of dS in shared memory.
#pragma once

#include "accumulators.cuh"
#include "backward_memory.cuh"
#include "shift.cuh"

namespace xlnet_kernels::cuda {

// Rows come one after the other.
template <bool POSITIONS>
struct BackwardShift : KnownShift {
  using KnownShift::KnownShift;

  // How products of a half of the window begin: v.r where the warp reads them.
  DEVICE void start_half(WindowHalf& half, const float* bias, bool is_upper, const Lane& lane) const {
    cuda::start_half(half, bias, is_upper, lane);
  }
  // Scores become bias(n, i) and what each row has of the band, which comes one half after the other.
  template <typename Bias>
  DEVICE void take_lower(float (&score)[8][4], const WindowHalf& half, Offered (&carried)[2], Bias bias,
                         int warp) const {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] = bias(n, i);
    add_lower(score, half, carried, warp);
  }
  template <typename Bias>
  DEVICE void take_upper(float (&score)[8][4], const WindowHalf& half, Offered (&carried)[2], Bias, int warp) const {
    add_upper(score, half, carried, warp);
  }
  // Column of the band that row r of a lane's two, `row` of the tile, begins at
  DEVICE int column(int, int row) const { return 63 - row; }
  // Whether 16 columns `begin` of the lower or the upper half of the band have any dS of rows 16 k to 16 k + 15
  DEVICE bool has_dS(int half, int begin, int k) const {
    return half == 0 ? 16 * k >= 48 - begin : 16 * k <= 48 - begin;
  }
};

// Rows have positions of their own, and move within the band from tile to tile.
template <>
struct BackwardShift<true> : FoundShift {
  int place[2] = {};
  uint32_t served = 0;  // see has_dS: bits 2 k + 1 of the lower half, bits 2 k of the upper one

  using FoundShift::FoundShift;

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
  DEVICE void start_half(WindowHalf& half, const float* bias, bool, const Lane& lane) const {
    start_scores(half, bias, lane.t);
  }
  template <typename Bias>
  DEVICE void take_lower(float (&score)[8][4], const WindowHalf& half, Offered (&)[2], Bias, int) const {
    FoundShift::take_lower(score, half);
  }
  template <typename Bias>
  DEVICE void take_upper(float (&score)[8][4], const WindowHalf& half, Offered (&)[2], Bias bias, int) const {
    FoundShift::take_upper(score, half);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] += bias(n, i);
  }
  DEVICE int column(int r, int) const { return place[r]; }
  DEVICE bool has_dS(int half, int, int k) const { return served >> (2 * k + (half == 0)) & 1; }
};

}  // namespace xlnet_kernels::cuda
