// The relative shift in registers. The accumulators of eight columns lie in four neighbouring lanes, a quad, which
// holds row g (elements 0 and 1) and row g + 8 (elements 2 and 3), so each row can be moved by an amount of its own:
// one shuffle for each element, no shared memory.
#pragma once

#include "tile.cuh"

namespace xlnet_kernels::cuda {

// What a lane has to do for one of its rows, in one word: column j of the row is column j + amount of the band.
struct Shift {
  // tile n takes tiles n + 1 and n + 2 of the band, not n and n + 1; odd amount; what this lane gives away is of the
  // latter tile, for each parity of columns; the row is not part of this run
  enum : uint32_t { NEXT = 1, ODD = 2, LATTER = 4, IDLE = 16 };
  uint32_t word;  // these bits; in bits 8 and 16 on, which lane gives this one its even and odd columns

  DEVICE bool has(uint32_t bit) const { return word & bit; }
};

// For an amount of 0 .. 15.
DEVICE Shift shift_by(uint32_t amount, bool mine, int lane) {
  const uint32_t t = lane % 4, quad = lane - t, odd = amount % 2;
  const uint32_t even_step = amount % 8 / 2, odd_step = even_step + odd;
  return {(amount >= 8 ? Shift::NEXT : 0) | (odd ? Shift::ODD : 0) | (mine ? 0 : Shift::IDLE) |
          (t < even_step ? Shift::LATTER : 0) | (t < odd_step ? Shift::LATTER << 1 : 0) |
          (quad + (t + even_step) % 4) << 8 | (quad + (t + odd_step) % 4) << 16};
}

// Adds a row's part of the band to eight columns of its scores; first, second and third: tiles n to n + 2 of the band.
DEVICE void add_shifted(float* score, const float* first, const float* second, const float* third, Shift shift) {
  const bool next = shift.has(Shift::NEXT), odd = shift.has(Shift::ODD);
  float low[2], high[2];
  for (int i = 0; i < 2; ++i) {
    low[i] = next ? second[i] : first[i];
    high[i] = next ? third[i] : second[i];
  }
  for (int parity = 0; parity < 2; ++parity) {
    const float from_low = odd ? low[1 - parity] : low[parity], from_high = odd ? high[1 - parity] : high[parity];
    const bool latter = shift.has(Shift::LATTER << parity);
    const float given = shuffle(latter ? from_high : from_low, int(shift.word >> (8 + 8 * parity)));
    if (!shift.has(Shift::IDLE)) score[parity] += given;
  }
}

}  // namespace xlnet_kernels::cuda
