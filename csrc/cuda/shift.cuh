// The relative shift in registers. The accumulators of eight columns lie in four neighbouring lanes, a quad, which
// holds row g (elements 0 and 1) and row g + 8 (elements 2 and 3), so each row can be moved by an amount of its own:
// one shuffle for each element, no shared memory.
#pragma once

#include "tile.cuh"

namespace xlnet_kernels::cuda {

// Columns amount .. amount + 7 (0 <= amount <= 8) of the sixteen in `low` and `high`, for one of the two rows.
DEVICE void shift_row(float* to, const float* low, const float* high, int amount, int lane) {
  const int t = lane % 4;
  for (int parity = 0; parity < 2; ++parity) {
    const int step = (amount + parity) / 2;
    const bool odd = (amount + parity) % 2;
    const float from_low = odd ? low[1] : low[0], from_high = odd ? high[1] : high[0];
    // asked by lane t - step of the quad, of the next eight columns where that wraps around
    to[parity] = shuffle(t < step ? from_high : from_low, lane / 4 * 4 + (t + step) % 4);
  }
}

// Scores from the band: column j of a row is column j + shift[row] (0 .. 15) of `band`, three tiles of eight columns.
DEVICE void shift_in(float (&score)[4], const float* first, const float* second, const float* third,
                     const int (&shift)[2], int lane) {
  for (int row = 0; row < 2; ++row) {
    float low[2], high[2];
    for (int i = 0; i < 2; ++i) {
      low[i] = shift[row] < 8 ? first[2 * row + i] : second[2 * row + i];
      high[i] = shift[row] < 8 ? second[2 * row + i] : third[2 * row + i];
    }
    shift_row(score + 2 * row, low, high, shift[row] % 8, lane);
  }
}

}  // namespace xlnet_kernels::cuda
