// The position term and its relative shift: the band (q + v).r of 16 rows, and each row's part of it.
//
// A block looks at rel_key through a window of BLOCK_M + BLOCK_N rows. A row's shift is how far its position lies
// behind that of the tile's last row: column j of the row's scores is column j + shift of its band. A window serves
// shifts below BLOCK_M; rows further apart take several windows, one after the other.
//
// The shift happens in registers. Eight columns, a tile, of a row lie in four neighbouring lanes, a quad, so each row
// can be moved by an amount of its own: one shuffle for each column, no shared memory. Of a row that is shifted by 3:
//
//   lane of the quad         0   0   1   1   2   2   3   3
//   column of the scores     0   1   2   3   4   5   6   7
//   is that of the band      3   4   5   6   7   8   9  10      8 and on: of the latter of two tiles
//   which has lane           1   2   2   3   3   0   0   1      even columns come one lane further, odd ones two
//
// Shifts of 8 to 15 begin in the tile that comes next. There are two ways. Known: the positions of 16 rows come one
// after the other, so that row g, of elements 0 and 1, is shifted by 15 - g, and row g + 8, of elements 2 and 3, by
// 7 - g: by the same within eight columns. Found: each row has a shift of its own. Of both there are versions for 16
// columns (here) and for the window of a warpgroup (sm90/shift.cuh).
#pragma once

#include "rows.cuh"

namespace xlnet_kernels::cuda {

// The definition, which tests compare every way with: a row's column of the scores.
DEVICE float shifted_column(const float* band, int shift, int column) { return band[column + shift]; }

// A lane's shift of one of its rows, in one word, because registers are scarce.
struct QuadShift {
  uint32_t word;

  // By 0 to 15 columns; not mine: the row is not served.
  DEVICE static QuadShift by(uint32_t columns, bool mine, int lane) {
    const uint32_t t = lane % 4, quad = lane - t, odd = columns % 2;
    const uint32_t even_step = columns % 8 / 2, odd_step = even_step + odd;
    return {(columns >= 8 ? NEXT : 0) | (odd ? ODD : 0) | (mine ? 0 : IDLE) | (t < even_step ? LATTER : 0) |
            (t < odd_step ? LATTER << 1 : 0) | (quad + (t + even_step) % 4) << GIVER |
            (quad + (t + odd_step) % 4) << (GIVER + 8)};
  }
  DEVICE bool is_odd() const { return word & ODD; }
  DEVICE bool begins_in_next() const { return word & NEXT; }
  DEVICE bool is_idle() const { return word & IDLE; }
  // Whether this lane gives what it has of the latter tile for the scores' columns of this parity
  DEVICE bool gives_latter(int parity) const { return word & LATTER << parity; }
  // The lane that gives this one its column of this parity: in the lowest bits, for shuffle looks at no others
  DEVICE int giver(int parity) const { return int(word >> (GIVER + 8 * parity)); }
  // The tile of a window from which on the row is shifted by that
  DEVICE int first_tile() const { return int(word >> FIRST_TILE); }
  DEVICE QuadShift from_tile(int tile) const { return {word | uint32_t(tile) << FIRST_TILE}; }
  DEVICE QuadShift into_next() const { return {word | NEXT}; }
  DEVICE QuadShift kept() const { return {kept_in_register(word)}; }

 private:
  static constexpr uint32_t NEXT = 1, ODD = 2, LATTER = 4, IDLE = 16;  // bits
  static constexpr int GIVER = 8, FIRST_TILE = 24;                     // where numbers begin
};

// Known: the shift of row g + 8; row g's begins in the next tile, too.
DEVICE QuadShift known_shift(int lane) { return QuadShift::by(7 - lane / 4, true, lane).kept(); }

// Known: a row's two columns of the scores, of two neighbouring tiles of its band. A lane offers its columns of a tile
// in the scores' order, once for both of the scores' tiles that they go to.
struct Offered {
  float column[2];

  DEVICE static Offered from(const float* tile, QuadShift shift) {
    return {{shift.is_odd() ? tile[1] : tile[0], shift.is_odd() ? tile[0] : tile[1]}};
  }
};
DEVICE void add_known_columns(float* score, const Offered& near, const Offered& far, QuadShift shift) {
  for (int parity = 0; parity < 2; ++parity)
    score[parity] +=
        shuffle(shift.gives_latter(parity) ? far.column[parity] : near.column[parity], shift.giver(parity));
}

// Found: a row's two columns of the scores, of three neighbouring tiles of its band. Columns change their parity after
// they are given away: fewer are to be moved then.
DEVICE void find_columns(float (&columns)[2], const float* first, const float* second, const float* third,
                         QuadShift shift) {
  float given[2];
  for (int parity = 0; parity < 2; ++parity) {  // of the band's columns
    const bool next = shift.begins_in_next(), latter = shift.gives_latter(1 - parity);
    const float near = next || latter ? second[parity] : first[parity];
    given[parity] = shuffle(next && latter ? third[parity] : near, shift.giver(1 - parity));
  }
  for (int parity = 0; parity < 2; ++parity) columns[parity] = shift.is_odd() ? given[1 - parity] : given[parity];
}

// 16 of a band's columns, two tiles, as products leave them.
using Sixteen = float[2][4];

// Known: adds to 16 columns of the scores what both rows have of them in 32 columns of the band.
DEVICE void add_known(float (*score)[4], const Sixteen& near, const Sixteen& far, QuadShift shift) {
  const float* const tiles[4] = {near[0], near[1], far[0], far[1]};
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      add_known_columns(score[half] + 2 * r, Offered::from(tiles[half + 1 - r] + 2 * r, shift),
                        Offered::from(tiles[half + 2 - r] + 2 * r, shift), shift);
}

// Found: the same, but for a row that is not served.
DEVICE void add_found(float (*score)[4], const Sixteen& near, const Sixteen& far, const QuadShift (&shift)[2]) {
  const float* const tiles[4] = {near[0], near[1], far[0], far[1]};
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float columns[2];
      find_columns(columns, tiles[half] + 2 * r, tiles[half + 1] + 2 * r, tiles[half + 2] + 2 * r, shift[r]);
      for (int parity = 0; parity < 2; ++parity)
        if (!shift[r].is_idle()) score[half][2 * r + parity] += columns[parity];
    }
}

// The part of a window that serves those rows of a warp whose shifts are within 16 of each other.
struct BandSlice {
  int begin;  // its first column of the window, or NO_SLICE
  QuadShift shift[2];
};
constexpr int NO_SLICE = -1;

// The slice of the smallest shift among the warp's waiting rows; rows that it serves stop waiting.
template <int BLOCK_M>
DEVICE BandSlice next_slice(const int (&shift)[2], bool (&waits)[2], int lane) {
  int first = BLOCK_M;
  for (int r = 0; r < 2; ++r)
    if (waits[r]) first = smaller(first, shift[r]);
  first = warp_min(first);
  BandSlice slice{first < BLOCK_M ? smaller(first, BLOCK_M - 16) : NO_SLICE, {}};
  for (int r = 0; r < 2; ++r) {
    const bool mine = waits[r] && shift[r] - slice.begin < 16;
    slice.shift[r] = QuadShift::by(mine ? shift[r] - slice.begin : 0, mine, lane);
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
    const QuadShift last = known_shift(lane);
    return !ballot(first.shift[0].word != last.into_next().word || first.shift[1].word != last.word);
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

// A window's first row, clamped to the margins around rel_key, in which v.r have memory. No visible pair reads beyond.
DEVICE int clamped_window(int window, int rel_len) { return larger(-REL_MARGIN, smaller(window, rel_len)); }

// The band's columns of 16 rows of rel_key, from `row` on, whose v.r begin at bias: of the warp's tiles of 16 rows from
// `first` to `last`. load_query(k, m) gives the fragment of tile m at depth k.
template <typename T, int HEAD_DIM, int M_TILES, typename Ring, typename Query>
DEVICE void multiply_band(Sixteen (&band)[M_TILES], int first, int last, const Ring& ring, int row, const float* bias,
                          bool tf32, int lane, Query load_query) {
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

DEVICE void carry(Sixteen& to, const Sixteen& band) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 4; ++i) to[half][i] = band[half][i];
}

// Adds the position term of a slice to the warp's scores (16 x 8 N). `window` is the window's first row of rel_key,
// whose v.r are at `bias`; load_query(k) gives the fragment at depth k. `carried` has the first 16 columns of the band
// already, if is_carried, and afterwards those of the next tile of keys.
template <typename T, int HEAD_DIM, int N, typename Ring, typename Query>
DEVICE void add_position(float (&score)[N][4], Sixteen& carried, bool is_carried, const Ring& ring, int window,
                         const float* bias, const BandSlice& slice, bool tf32, int lane, Query load_query) {
  const auto multiply_columns = [&](Sixteen& band, int n) {
    const int column = slice.begin + 8 * n;
    multiply_band<T, HEAD_DIM>(reinterpret_cast<Sixteen(&)[1]>(band), 0, 0, ring, window + column, bias + column, tf32,
                               lane, [&](int k, int) { return load_query(k); });
  };
  if (!is_carried) multiply_columns(carried, 0);
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    Sixteen band;
    multiply_columns(band, n + 2);
    add_found(score + n, carried, band, slice.shift);
    carry(carried, band);
  }
}

// Adds the position term for all of a warp's rows where their shifts are known. `row` is the first row of rel_key that
// tile M_TILES - 1 of 16 rows needs, each tile before needs what is 16 rows further on. Only what is new to this tile
// of keys is multiplied: `carried` has the first 16 columns of the bands from the tile before, if is_carried, and
// afterwards those of the next one.
template <typename T, int HEAD_DIM, int M_TILES, int N, typename Ring, typename Query>
DEVICE void add_known_position(float (&score)[M_TILES][N][4], Sixteen (&carried)[M_TILES], bool is_carried,
                               const Ring& ring, int row, const float* bias, QuadShift shift, bool tf32, int lane,
                               Query load_query) {
  constexpr int LAST = M_TILES - 1;
  const auto multiply_columns = [&](Sixteen (&band)[M_TILES], int sixteen, int first, int last) {
    multiply_band<T, HEAD_DIM>(band, first, last, ring, row + 16 * sixteen, bias + 16 * sixteen, tf32, lane,
                               load_query);
  };
  if (!is_carried)
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) multiply_columns(carried, LAST - m, m, m);
#pragma unroll
  for (int sixteen = 1; sixteen <= N / 2 + LAST; ++sixteen) {
    Sixteen band[M_TILES];
    multiply_columns(band, sixteen, LAST + 1 - sixteen, N / 2 + LAST - sixteen);
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      const int n = 2 * (sixteen - 1 - LAST + m);
      if (n < 0 || n >= N) continue;
      add_known(score[m] + n, carried[m], band[m], shift);
      carry(carried[m], band[m]);
    }
  }
}

}  // namespace xlnet_kernels::cuda
