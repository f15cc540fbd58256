// The relative shift of a warpgroup's band, in registers: ../shift.cuh.
//
// The window of 64 rows is 128 columns wide: tiles 0 to 15 of eight, of which products leave the lower and the upper
// half. Known: row i of the 64 is shifted by 63 - i, so that warp w begins at tile 2 (3 - w). Found: eight rows, g or
// g + 8, begin at one tile, and from there each is shifted by 15 at most.
#pragma once

#include "../shift.cuh"

namespace xlnet_kernels::cuda {

using WindowHalf = float[8][4];

// Tile i of a window. Columns beyond the last tile are unused, and may hold anything.
DEVICE const float* window_tile(const WindowHalf& lower, const WindowHalf& upper, int i) {
  return i < 8 ? lower[i] : upper[smaller(i - 8, 7)];
}

// A number by its type, which the device knows as a constant
template <int N>
struct Constant {
  DEVICE constexpr operator int() const { return N; }
};
// use(x) with a constant: registers have no index, each number from FIRST to LAST has code of its own.
template <int FIRST, int LAST, typename Use>
DEVICE void with_constant(int x, Use use) {
  constexpr int MIDDLE = (FIRST + LAST) / 2;
  if constexpr (FIRST == LAST)
    use(Constant<FIRST>());
  else if (x <= MIDDLE)
    with_constant<FIRST, MIDDLE>(x, use);
  else
    with_constant<MIDDLE + 1, LAST>(x, use);
}

// Known: adds to the scores of warp W their columns that end in tiles BEGIN to END - 1; tile_of(i): tile i. From one
// part of a window to the next `carried` keeps what rows g and g + 8 have offered last.
template <int W, int BEGIN, int END, typename TileOf>
DEVICE void add_known_tiles(float (&score)[8][4], Offered (&carried)[2], QuadShift shift, TileOf tile_of) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = -1; n < 8; ++n) {
      const int tile = 2 * (3 - W) + 2 - r + n;
      if (tile < BEGIN || tile >= END) continue;
      const Offered offered = Offered::from(tile_of(tile) + 2 * r, shift);
      if (n >= 0) add_known_columns(score[n] + 2 * r, carried[r], offered, shift);
      carried[r] = offered;
    }
}

// Found: use(n, columns) of rows R of a warp, g or g + 8, which begin at tile BEGIN, for their columns 8 n to 8 n + 7,
// n from FIRST to LAST - 1; tile_of(i): tile i.
template <int R, int BEGIN, int FIRST, int LAST, typename TileOf, typename Use>
DEVICE void find_tiles(QuadShift shift, TileOf tile_of, Use use) {
#pragma unroll
  for (int n = FIRST; n < LAST; ++n) {
    float columns[2];
    find_columns(columns, tile_of(BEGIN + n) + 2 * R, tile_of(BEGIN + n + 1) + 2 * R, tile_of(BEGIN + n + 2) + 2 * R,
                 shift);
    use(n, columns);
  }
}

// Rows come one after the other.
struct KnownShift {
  const QuadShift shift;  // of row g + 8

  DEVICE explicit KnownShift(int lane) : shift(known_shift(lane)) {}

  // Adds a window of the band to the scores.
  DEVICE void add_window(float (&score)[8][4], const WindowHalf& lower, const WindowHalf& upper, int warp) const {
    Offered carried[2];
    add_tiles<0, 16>(score, carried, warp, [&](int i) { return window_tile(lower, upper, i); });
  }
  // As `add_window`, one half of the window after the other.
  DEVICE void add_lower(float (&score)[8][4], const WindowHalf& lower, Offered (&carried)[2], int warp) const {
    add_tiles<0, 8>(score, carried, warp, [&](int i) { return lower[i]; });
  }
  DEVICE void add_upper(float (&score)[8][4], const WindowHalf& upper, Offered (&carried)[2], int warp) const {
    add_tiles<8, 16>(score, carried, warp, [&](int i) { return upper[i - 8]; });
  }

 private:
  template <int BEGIN, int END, typename TileOf>
  DEVICE void add_tiles(float (&score)[8][4], Offered (&carried)[2], int warp, TileOf tile_of) const {
    const QuadShift kept = shift.kept();
    with_constant<0, 3>(warp % 4, [&](auto w) { add_known_tiles<w, BEGIN, END>(score, carried, kept, tile_of); });
  }
};

// Rows have positions of their own.
struct FoundShift {
  QuadShift shift[2] = {};  // of rows g and g + 8

  DEVICE explicit FoundShift(int) {}

  // By how much rows g and g + 8 are shifted; less than 0: they are not served.
  DEVICE void find(const int (&columns)[2], int lane) {
    for (int r = 0; r < 2; ++r) {
      const bool mine = columns[r] >= 0;
      const int tile = warp_min(mine ? columns[r] : 64) / 8;
      shift[r] = QuadShift::by(mine ? columns[r] - 8 * tile : 0, mine, lane).from_tile(tile);
    }
  }
  // use(R, tile): rows R of the warp begin at a tile of the window.
  template <typename Use>
  DEVICE void for_each(Use use) const {
    const auto find = [&](auto r) {
      with_constant<0, 8>(uniform(shift[r].first_tile()), [&](auto tile) { use(r, tile); });
    };
    find(Constant<0>());
    find(Constant<1>());
  }

  // Adds a window of the band to the scores.
  DEVICE void add_window(float (&score)[8][4], const WindowHalf& lower, const WindowHalf& upper, int) const {
    for_each([&](auto r, auto begin) {
      find_tiles<r, begin, 0, 8>(
          shift[r], [&](int i) { return window_tile(lower, upper, i); },
          [&](int n, const float (&columns)[2]) {
            for (int parity = 0; parity < 2; ++parity) score[n][2 * r + parity] += columns[parity];
          });
    });
  }
  // The scores' columns of a window, one half of the band after the other. Where columns begin in the last two tiles of
  // the lower half, those wait in the scores for the upper one.
  DEVICE void take_lower(float (&score)[8][4], const WindowHalf& lower) const {
    for_each([&](auto r, auto begin) {
      constexpr int READY = begin < 6 ? 6 - begin : 0;
      find_tiles<r, begin, 0, READY>(shift[r], [&](int i) { return lower[i]; }, keep_in<r>(score));
#pragma unroll
      for (int n = READY; n < 8 - begin; ++n)
        for (int parity = 0; parity < 2; ++parity) score[n][2 * r + parity] = lower[begin + n][2 * r + parity];
    });
  }
  DEVICE void take_upper(float (&score)[8][4], const WindowHalf& upper) const {
    for_each([&](auto r, auto begin) {
      constexpr int READY = begin < 6 ? 6 - begin : 0;
      find_tiles<r, begin, READY, 8>(
          shift[r], [&](int i) { return i < 8 ? score[i - begin] : window_tile(upper, upper, i); }, keep_in<r>(score));
    });
  }
  DEVICE void hide_others(float (&score)[8][4]) const {
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < 8; ++n)
        if (shift[r].is_idle()) score[n][2 * r] = score[n][2 * r + 1] = -INFINITY;
  }

 private:
  template <int R>
  DEVICE static auto keep_in(float (&score)[8][4]) {
    return [&score](int n, const float (&columns)[2]) {
      for (int parity = 0; parity < 2; ++parity) score[n][2 * R + parity] = columns[parity];
    };
  }
};

// Shifts of the rows of forward's consumers. POSITIONS: rows have positions of their own.
template <bool POSITIONS>
using WarpgroupShift = std::conditional_t<POSITIONS, FoundShift, KnownShift>;

}  // namespace xlnet_kernels::cuda
