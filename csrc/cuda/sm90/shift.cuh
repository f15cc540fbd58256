// The relative shift of a warpgroup's band, in registers.
//
// The window of 64 rows is 128 columns wide: tiles 0 to 15 of eight. Where rows come one after the other row i of the
// 64 is shifted by 63 - i: warp w begins at column 16 (3 - w), and from there row g is shifted by 15 - g, row g + 8 by
// 7 - g. What is left within eight columns is the same for both. Where rows have positions of their own, eight rows, g
// or g + 8, begin at one tile, and from there each is shifted by 15 at most.
#pragma once

#include "../shift.cuh"

namespace xlnet_kernels::cuda {

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

// What rows R of a warp, g or g + 8, have in eight columns, which begin in the first of three tiles of the band.
// Columns change their parity after they are given away: fewer are to be moved then.
template <int R>
DEVICE void shifted_columns(float (&columns)[2], const float (&first)[4], const float (&second)[4],
                            const float (&third)[4], QuadShift shift) {
  const bool odd = shift.has(QuadShift::ODD), next = shift.has(QuadShift::NEXT);
  float given[2];
  for (int parity = 0; parity < 2; ++parity) {  // of the band's columns
    const int i = 2 * R + parity;
    const bool latter = shift.has(QuadShift::LATTER << (1 - parity));
    const float near = next || latter ? second[i] : first[i];
    given[parity] = shuffle(next && latter ? third[i] : near, int(shift.word >> (16 - 8 * parity)));
  }
  for (int parity = 0; parity < 2; ++parity) columns[parity] = odd ? given[1 - parity] : given[parity];
}

// score[n] += what rows R have of the band in columns 8 n to 8 n + 7, from tile BEGIN on.
template <int R, int BEGIN>
DEVICE void add_shifted_rows(float (&score)[8][4], const float (&lower)[8][4], const float (&upper)[8][4],
                             QuadShift shift) {
  const float beyond[4] = {};  // nobody's columns
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    constexpr int LAST = 15;
    float columns[2];
    shifted_columns<R>(columns, window_tile(lower, upper, BEGIN + n),
                       BEGIN + n + 1 > LAST ? beyond : window_tile(lower, upper, BEGIN + n + 1),
                       BEGIN + n + 2 > LAST ? beyond : window_tile(lower, upper, BEGIN + n + 2), shift);
    for (int parity = 0; parity < 2; ++parity) score[n][2 * R + parity] += columns[parity];
  }
}

// For a tile `begin` from FIRST to LAST.
template <int R, int FIRST = 0, int LAST = 8>
DEVICE void add_shifted_rows(float (&score)[8][4], const float (&lower)[8][4], const float (&upper)[8][4],
                             QuadShift shift, int begin) {
  constexpr int MIDDLE = (FIRST + LAST) / 2;
  if constexpr (FIRST == LAST)
    add_shifted_rows<R, FIRST>(score, lower, upper, shift);
  else if (begin <= MIDDLE)
    add_shifted_rows<R, FIRST, MIDDLE>(score, lower, upper, shift, begin);
  else
    add_shifted_rows<R, MIDDLE + 1, LAST>(score, lower, upper, shift, begin);
}

// What forward's consumers know of the shifts of their rows. POSITIONS: rows have some of their own.
template <bool POSITIONS>
struct WarpgroupShift {
  const QuadShift word;

  DEVICE explicit WarpgroupShift(int lane) : word(consecutive_shift(lane)) {}
  DEVICE void add_band(float (&score)[8][4], const float (&lower)[8][4], const float (&upper)[8][4], int warp) const {
    add_shifted_band(score, lower, upper, {kept_in_register(word.word)}, warp);
  }
};

template <>
struct WarpgroupShift<true> {
  static constexpr int BEGIN = 24;  // bits of the words from which on there is the tile that eight rows begin at
  QuadShift word[2];

  DEVICE explicit WarpgroupShift(int) : word{} {}

  // By how much rows g and g + 8 are shifted; less than 0: they are not served.
  DEVICE void find(const int (&shift)[2], int lane) {
    for (int r = 0; r < 2; ++r) {
      const bool mine = shift[r] >= 0;
      const int begin = warp_min(mine ? shift[r] : 64) / 8;
      word[r] = shift_by(mine ? shift[r] - 8 * begin : 0, mine, lane);
      word[r].word |= uint32_t(begin) << BEGIN;
    }
  }
  DEVICE void add_band(float (&score)[8][4], const float (&lower)[8][4], const float (&upper)[8][4], int) const {
    add_shifted_rows<0>(score, lower, upper, word[0], uniform(int(word[0].word >> BEGIN)));
    add_shifted_rows<1>(score, lower, upper, word[1], uniform(int(word[1].word >> BEGIN)));
  }
  DEVICE void hide_others(float (&score)[8][4]) const {
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < 8; ++n)
        if (word[r].has(QuadShift::IDLE)) score[n][2 * r] = score[n][2 * r + 1] = -INFINITY;
  }
};

// add_shifted_band, one half of the window's columns after the other. From the lower half to the upper one `carried`
// keeps what each row has offered last.
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
