// The position term and its relative shift: the band (q + v).r of 16 rows, and each row's part of it.
//
// A block looks at rel_key through a window of BLOCK_M + BLOCK_N rows. A row's shift is how far its position lies
// behind that of the tile's last row: column j of the row is column j + shift of the band. A window serves shifts below
// BLOCK_M; rows further apart take several windows, one after the other.
//
// The shift happens in registers. The accumulators of eight columns lie in four neighbouring lanes, a quad, which holds
// row g (elements 0 and 1) and row g + 8 (elements 2 and 3), so each row can be moved by an amount of its own: one
// shuffle for each element, no shared memory.
#pragma once

#include "mask.cuh"

namespace xlnet_kernels::cuda {

// What a lane has to do for one of its rows, in one word: column j of the row is column j + amount of the band.
struct QuadShift {
  // tile n takes tiles n + 1 and n + 2 of the band, not n and n + 1; odd amount; what this lane gives away is of the
  // latter tile, for each parity of columns; the row is not part of this slice
  enum : uint32_t { NEXT = 1, ODD = 2, LATTER = 4, IDLE = 16 };
  uint32_t word;  // these bits; in bits 8 and 16 on, which lane gives this one its even and odd columns

  DEVICE bool has(uint32_t bit) const { return word & bit; }
};

// For an amount of 0 .. 15.
DEVICE QuadShift shift_by(uint32_t amount, bool mine, int lane) {
  const uint32_t t = lane % 4, quad = lane - t, odd = amount % 2;
  const uint32_t even_step = amount % 8 / 2, odd_step = even_step + odd;
  return {(amount >= 8 ? QuadShift::NEXT : 0) | (odd ? QuadShift::ODD : 0) | (mine ? 0 : QuadShift::IDLE) |
          (t < even_step ? QuadShift::LATTER : 0) | (t < odd_step ? QuadShift::LATTER << 1 : 0) |
          (quad + (t + even_step) % 4) << 8 | (quad + (t + odd_step) % 4) << 16};
}

// The shift of row g + 8 of 16 rows whose positions come one after the other; row g's has NEXT, too.
DEVICE QuadShift consecutive_shift(int lane) { return {kept_in_register(shift_by(7 - lane / 4, true, lane).word)}; }

// A row's part, of one parity of columns, of two neighbouring tiles of the band.
DEVICE float shifted(const float* low, const float* high, int parity, QuadShift shift) {
  const bool odd = shift.has(QuadShift::ODD), latter = shift.has(QuadShift::LATTER << parity);
  const float from_low = odd ? low[1 - parity] : low[parity], from_high = odd ? high[1 - parity] : high[parity];
  return shuffle(latter ? from_high : from_low, int(shift.word >> (8 + 8 * parity)));
}

// Adds a row's part of the band to eight columns of its scores; first, second and third: tiles n to n + 2 of the band.
DEVICE void add_shifted(float* score, const float* first, const float* second, const float* third, QuadShift shift) {
  const bool next = shift.has(QuadShift::NEXT);
  float low[2], high[2];
  for (int i = 0; i < 2; ++i) {
    low[i] = next ? second[i] : first[i];
    high[i] = next ? third[i] : second[i];
  }
  for (int parity = 0; parity < 2; ++parity) {
    const float given = shifted(low, high, parity, shift);
    if (!shift.has(QuadShift::IDLE)) score[parity] += given;
  }
}

// The part of a window that serves those rows of a warp whose shifts are within 16 of each other.
struct BandSlice {
  int begin;  // its first column of the window, or NO_SLICE
  QuadShift shift[2];
};
constexpr int NO_SLICE = -1;

// The slice of the smallest shift among the warp's rows that wait; those that it serves do not wait any more.
template <int BLOCK_M>
DEVICE BandSlice next_slice(const int (&shift)[2], bool (&waits)[2], int lane) {
  int first = BLOCK_M;
  for (int r = 0; r < 2; ++r)
    if (waits[r]) first = smaller(first, shift[r]);
  first = warp_min(first);
  BandSlice slice{first < BLOCK_M ? smaller(first, BLOCK_M - 16) : NO_SLICE, {}};
  for (int r = 0; r < 2; ++r) {
    const bool mine = waits[r] && shift[r] - slice.begin < 16;
    slice.shift[r] = shift_by(mine ? shift[r] - slice.begin : 0, mine, lane);
    waits[r] = waits[r] && !mine;
  }
  return slice;
}

// The slices of one window. In the first window, which is all there is unless positions are far apart, the first slice
// is the same for every tile, and mostly there is no other.
template <int BLOCK_M>
struct BandSlices {
  BandSlice first;
  bool more;

  DEVICE static void find_waiting(const int (&shift)[2], bool (&waits)[2]) {
    for (int r = 0; r < 2; ++r) waits[r] = shift[r] >= 0 && shift[r] < BLOCK_M;
  }

  // Finds the slices of the first window.
  DEVICE void find(const int (&shift)[2], int lane) {
    bool waits[2];
    find_waiting(shift, waits);
    first = next_slice<BLOCK_M>(shift, waits, lane);
    more = ballot(waits[0] || waits[1]) != 0;
  }

  // Whether all 16 rows are part of the first slice, row g shifted by 15 - g, as where positions come one after the
  // other.
  DEVICE bool is_consecutive(int lane) const {
    const uint32_t last = consecutive_shift(lane).word;
    return !ballot(first.shift[0].word != (last | QuadShift::NEXT) || first.shift[1].word != last);
  }

  // use(slice) for every slice of a window; shift_of(r) is the shift of row r in it.
  template <typename ShiftOf, typename Use>
  DEVICE void for_each(ShiftOf shift_of, bool in_first, int lane, Use use) const {
    BandSlice slice = first;
    const bool single = in_first && !more;
    int shift[2];
    bool waits[2];
    if (!single) {
      for (int r = 0; r < 2; ++r) shift[r] = shift_of(r);
      find_waiting(shift, waits);
      slice = next_slice<BLOCK_M>(shift, waits, lane);
    }
    while (slice.begin != NO_SLICE) {
      use(slice);
      if (single) return;
      slice = next_slice<BLOCK_M>(shift, waits, lane);
    }
  }
};

// v.r of the rows of rel_key.
DEVICE const float* rel_bias_of(const Call& call, int b, int h) {
  const int64_t head = (call.shared_rel_key ? 0 : b) * call.p.heads + h;
  return call.workspace.rel_bias + head * call.rel_bias_rows;
}

// The band's columns of 16 rows of rel_key, from `row` on, whose v.r begin at bias: of the warp's tiles of 16 rows from
// `first` to `last`. load_query(k, m) gives the fragment of tile m at depth k.
template <typename T, int HEAD_DIM, int M_TILES, typename Ring, typename Query>
DEVICE void multiply_band(float (&band)[M_TILES][2][4], int first, int last, const Ring& ring, int row,
                          const float* bias, bool tf32, int lane, Query load_query) {
  const float* const of_lane = bias + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (m >= first && m <= last) band[m][half][i] = of_lane[8 * half + i % 2];
#pragma unroll
  for (int k = 0; k < HEAD_DIM; k += DEPTH<T>) {
    const Fragment r = load_b(ring, row, k, lane);
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      if (m < first || m > last) continue;
      const Fragment q = load_query(k, m);
      multiply<T>(band[m][0], q, r, 0, tf32);
      multiply<T>(band[m][1], q, r, 1, tf32);
    }
  }
}

// Adds the position term of a slice to the warp's scores (16 x 8 N). `window` is the window's first row of rel_key;
// load_query(k) gives the fragment at depth k. `carried` has the first 16 columns of the band already, if is_carried,
// and afterwards those of the next tile of keys.
template <typename T, int HEAD_DIM, int N, typename Ring, typename Query>
DEVICE void add_position(float (&score)[N][4], float (&carried)[2][4], bool is_carried, const Ring& ring, int window,
                         const float* bias, int rel_len, const BandSlice& slice, bool tf32, int lane,
                         Query load_query) {
  bias += larger(-REL_MARGIN, smaller(window, rel_len)) - window;  // no pair reads a window beyond its margins
  const auto multiply_columns = [&](float (&band)[2][4], int n) {
    const int row = window + slice.begin + 8 * n;
    multiply_band<T, HEAD_DIM>(reinterpret_cast<float (&)[1][2][4]>(band), 0, 0, ring, row, bias + row, tf32, lane,
                               [&](int k, int) { return load_query(k); });
  };
  if (!is_carried) multiply_columns(carried, 0);
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    float band[2][4];
    multiply_columns(band, n + 2);
    const float* const tiles[4] = {carried[0], carried[1], band[0], band[1]};
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        add_shifted(score[n + half] + 2 * r, tiles[half] + 2 * r, tiles[half + 1] + 2 * r, tiles[half + 2] + 2 * r,
                    slice.shift[r]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) carried[half][i] = band[half][i];
  }
}

// Adds the position term for all of a warp's rows where their positions come one after the other. `row` is the first
// row of rel_key that tile M_TILES - 1 of 16 rows needs, each tile before needs what is 16 rows further on. Only what
// is new to this tile of keys is multiplied: `carried` has the first 16 columns of the bands from the tile before, if
// is_carried, and afterwards those of the next one.
template <typename T, int HEAD_DIM, int M_TILES, int N, typename Ring, typename Query>
DEVICE void add_consecutive_position(float (&score)[M_TILES][N][4], float (&carried)[M_TILES][2][4], bool is_carried,
                                     const Ring& ring, int row, const float* bias, QuadShift shift, bool tf32,
                                     int lane, Query load_query) {
  constexpr int LAST = M_TILES - 1;
  const auto multiply_columns = [&](float (&band)[M_TILES][2][4], int sixteen, int first, int last) {
    multiply_band<T, HEAD_DIM>(band, first, last, ring, row + 16 * sixteen, bias + 16 * sixteen, tf32, lane,
                               load_query);
  };
  if (!is_carried)
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) multiply_columns(carried, LAST - m, m, m);
#pragma unroll
  for (int sixteen = 1; sixteen <= N / 2 + LAST; ++sixteen) {
    float band[M_TILES][2][4];
    multiply_columns(band, sixteen, LAST + 1 - sixteen, N / 2 + LAST - sixteen);
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      const int n = 2 * (sixteen - 1 - LAST + m);
      if (n < 0 || n >= N) continue;
      const float* const tiles[4] = {carried[m][0], carried[m][1], band[m][0], band[m][1]};
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int r = 0; r < 2; ++r)  // row g takes a tile of eight columns further on than row g + 8
          for (int parity = 0; parity < 2; ++parity)
            score[m][n + half][2 * r + parity] +=
                shifted(tiles[half + 1 - r] + 2 * r, tiles[half + 2 - r] + 2 * r, parity, shift);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 4; ++i) carried[m][half][i] = band[m][half][i];
    }
  }
}

}  // namespace xlnet_kernels::cuda
