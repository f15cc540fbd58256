// Which tiles a block goes to: bounds of labels say how much of a tile is visible before anyone looks into it.
#pragma once

#include "mask.cuh"

namespace xlnet_kernels::cuda {

DEVICE RowBounds merged(const RowBounds& a, const RowBounds& b) {
  return {smaller(a.min_rank, b.min_rank), larger(a.max_rank, b.max_rank), smaller(a.min_floor, b.min_floor),
          larger(a.max_floor, b.max_floor), a.any_sees_self || b.any_sees_self};
}

struct RowTile {
  int first_position, last_position;
  RowBounds bounds;
};

// The tile of `count` sorted rows; first_row is a multiple of BOUNDS_TILE, or count a divisor of it.
DEVICE RowTile load_row_tile(const Call& call, int b, int first_row, int count) {
  const RelAttention& p = call.p;
  RowTile tile;
  tile.first_position = row_position(p, b, first_row);
  tile.last_position = row_position(p, b, smaller(first_row + count, int(p.length)) - 1);
  if (p.rank_mask.query_rank) {
    const int first = first_row / BOUNDS_TILE, tiles = tiles_of(p.length, BOUNDS_TILE);
    tile.bounds = call.workspace.row_bounds[b * tiles + first];
    for (int i = first + 1; i < smaller(tiles, tiles_of(first_row + count, BOUNDS_TILE)); ++i)
      tile.bounds = merged(tile.bounds, call.workspace.row_bounds[b * tiles + i]);
  }
  return tile;
}

// How much is visible of a tile of these rows and keys j0 .. j0 + count - 1.
DEVICE Visibility tile_visibility(const Call& call, const RowTile& rows, int b, int j0, int count) {
  const RelAttention& p = call.p;
  const int keys = int(p.mem_len + p.key_len), last = j0 + count - 1;
  const int first_own = rows.first_position + int(p.mem_len), last_own = rows.last_position + int(p.mem_len);
  const Range some = keys_within_reach(p, first_own, last_own);
  if (j0 >= some.end || last < some.begin) return Visibility::none;
  // each key of the tile is within reach of each row: of the last one it begins latest, of the first one it ends first
  const int latest_begin = last_own - int(p.rel_key.max_distance);
  const int first_end = first_own - int(p.rel_key.max_distance - p.rel_len);
  const bool plain = p.mask.data == nullptr && last < keys && j0 >= latest_begin && last < first_end;
  if (p.rank_mask.query_rank == nullptr) return plain ? Visibility::all : Visibility::some;
  const KeyBounds& of_keys = call.workspace.key_bounds[b * tiles_of(keys, BOUNDS_TILE) + j0 / BOUNDS_TILE];
  const RowBounds& of_rows = rows.bounds;
  const bool owns = of_rows.any_sees_self && j0 <= last_own && last >= first_own;
  if ((of_keys.min_rank >= of_rows.max_rank || of_keys.max_rank < of_rows.min_floor) && !owns) return Visibility::none;
  if (!plain) return Visibility::some;
  if (of_keys.max_rank < of_rows.min_rank && of_keys.min_rank >= of_rows.max_floor) return Visibility::all;
  return owns ? Visibility::some : Visibility::by_rank;
}

// The keys that one of `parts` blocks goes to, in tiles of `size` from key 0 on; none where there are not enough.
DEVICE Range part_of(Range all, int size, int part, int parts) {
  const int first = all.begin / size, count = tiles_of(all.end, size) - first, each = tiles_of(count, parts);
  const int begin = smaller(part * each, count), end = smaller((part + 1) * each, count);
  return {(first + begin) * size, (first + end) * size};
}

// Whether the rows' ranks may be compared by pairs.
DEVICE bool fit_pairs(const RowBounds& rows) { return rows.min_rank > -LARGEST_RANK && rows.max_rank < LARGEST_RANK; }

// How much is visible, for kernels that compare ranks by pairs.
DEVICE Visibility visibility_by_pairs(const Call& call, const RowTile& rows, int b, int j0, int count) {
  const Visibility visibility = tile_visibility(call, rows, b, j0, count);
  return visibility == Visibility::by_rank && !fit_pairs(rows.bounds) ? Visibility::some : visibility;
}

// Whether a tile that is visible in part is so by ranks and by rows' own keys.
DEVICE bool is_by_rank_and_own(const RelAttention& p, const RowTile& rows, int j0, int count) {
  if (!p.rank_mask.query_rank || p.rank_mask.query_floor || p.mask.data || !fit_pairs(rows.bounds)) return false;
  const int to_end = int(p.mem_len - p.rel_key.max_distance + p.rel_len), last = j0 + count - 1;
  return last < int(p.mem_len + p.key_len) && j0 >= rows.last_position + to_end - int(p.rel_len) &&
         last < rows.first_position + to_end;
}

// Finds the tiles of which something is visible, looking at 32 of them at a time, one for each lane.
struct TileScheduler {
  int tiles, first;                            // where they end; the first of those looked at
  uint32_t waiting = 0, by_rank = 0, all = 0;  // of those: not yet gone to, and what is known of them

  // Tiles of `size` keys, or rows, outside of which there is nothing to see
  DEVICE TileScheduler(Range range, int size) : tiles(tiles_of(range.end, size)), first(range.begin / size - WARP) {}

  // The next tile, or `tiles`; look(tile) gives its visibility, which `visibility` becomes.
  template <typename Look>
  DEVICE int next(Visibility& visibility, int lane, Look look) {
    while (waiting == 0) {
      first += WARP;
      if (first >= tiles) return tiles;
      const Visibility mine = first + lane < tiles ? look(first + lane) : Visibility::none;
      waiting = ballot(mine != Visibility::none);
      by_rank = ballot(mine == Visibility::by_rank);
      all = ballot(mine == Visibility::all);
    }
    const uint32_t bit = waiting & -waiting;
    waiting ^= bit;
    visibility = visibility_of(bit);
    return first + first_bit(bit);
  }
  DEVICE Visibility visibility_of(uint32_t bit) const {
    return all & bit ? Visibility::all : by_rank & bit ? Visibility::by_rank : Visibility::some;
  }
};

}  // namespace xlnet_kernels::cuda
