// Which tiles a block goes to: bounds of labels say how much of a tile is visible before anyone looks into it.
#pragma once

#include "visibility.cuh"

namespace xlnet_kernels::cuda {

// The keys that one of `parts` blocks goes to, in tiles of `size` from key 0 on; none where there are not enough.
DEVICE Range part_of(Range all, int size, int part, int parts) {
  const int first = all.begin / size, count = tiles_of(all.end, size) - first, each = tiles_of(count, parts);
  const int begin = smaller(part * each, count), end = smaller((part + 1) * each, count);
  return {(first + begin) * size, (first + end) * size};
}

// A tile's visibility, and flags that the kernel defines.
struct TileState {
  Visibility visibility;
  uint32_t flags = 0;

  DEVICE TileState(Visibility visibility, uint32_t flags = 0) : visibility(visibility), flags(flags) {}
};

// Finds the tiles of which something is visible, looking at 32 of them at a time, one for each lane, so that a tile
// waits for no load of its own.
template <int FLAGS = 0>
struct TileScheduler {
  int tiles, first;                            // where they end; the first of those looked at
  uint32_t waiting = 0, by_rank = 0, all = 0;  // of those: not yet gone to, and what is known of them
  // A bit for each tile, for each flag; one more, because an array has no size 0
  uint32_t flag_bits[FLAGS + 1] = {};

  // Tiles of `size` keys, or rows, outside of which there is nothing to see
  DEVICE TileScheduler(Range range, int size) : tiles(tiles_of(range.end, size)), first(range.begin / size - WARP) {}

  // The next tile, or `tiles`; look(tile) gives a tile's state, and `found` becomes that of the next one.
  template <typename Look>
  DEVICE int next(TileState& found, int lane, Look look) {
    while (waiting == 0) {
      first += WARP;
      if (first >= tiles) return tiles;
      const TileState mine = first + lane < tiles ? look(first + lane) : TileState(Visibility::none);
      waiting = ballot(mine.visibility != Visibility::none);
      by_rank = ballot(mine.visibility == Visibility::by_rank);
      all = ballot(mine.visibility == Visibility::all);
      for (int i = 0; i < FLAGS; ++i) flag_bits[i] = ballot(mine.flags >> i & 1);
    }
    const uint32_t bit = waiting & -waiting;
    waiting ^= bit;
    found = visibility_of(bit);
    for (int i = 0; i < FLAGS; ++i) found.flags |= uint32_t((flag_bits[i] & bit) != 0) << i;
    return first + first_bit(bit);
  }
  DEVICE Visibility visibility_of(uint32_t bit) const {
    return all & bit ? Visibility::all : by_rank & bit ? Visibility::by_rank : Visibility::some;
  }
};

}  // namespace xlnet_kernels::cuda
