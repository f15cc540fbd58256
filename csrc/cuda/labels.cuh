// Who sees whom: ranks, floors, own keys, dense masks, segments; per row, per key, and per pair of tiles.
#pragma once

#include "kernels.h"
#include "tile.cuh"

namespace xlnet_kernels::cuda {

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr int32_t LOWEST = -2147483647 - 1, HIGHEST = 2147483647;

DEVICE int tiles_of(int64_t length, int size) { return int((length + size - 1) / size); }

// What decides about most pairs of a query row.
struct RowLabel {
  int32_t rank, floor, id;
};
struct Row : RowLabel {
  bool inside;
  int index, position;  // of the row in the call, in the segment
  int own_key;          // that it sees whatever the ranks say, or -1
};

// The row at `place` in order of position.
DEVICE int row_at(const RelAttention& p, int b, int place) {
  return p.rows.order ? p.rows.order[b * p.length + place] : place;
}
DEVICE int position_at(const RelAttention& p, int b, int place) {
  if (p.rows.position == nullptr) return place;
  return larger(0, smaller(p.rows.position[b * p.length + place], int(p.key_len) - 1));  // no one has looked at them
}

DEVICE Row load_row(const RelAttention& p, int b, int place) {
  Row row;
  row.inside = place < p.length;
  place = row.inside ? place : int(p.length) - 1;
  row.index = row_at(p, b, place);
  row.position = position_at(p, b, place);
  const int64_t at = b * p.length + row.index;
  row.rank = !row.inside ? LOWEST : p.rank_mask.query_rank ? p.rank_mask.query_rank[at] : HIGHEST;
  row.floor = p.rank_mask.query_floor ? p.rank_mask.query_floor[at] : LOWEST;
  row.id = p.segments.query_ids ? p.segments.query_ids[at] : 0;
  row.own_key = row.inside && p.rank_mask.sees_self && p.rank_mask.sees_self[at] ? row.position + int(p.mem_len) : -1;
  return row;
}

// Labels of a tile of keys, in shared memory: zeros where there are none, and for keys beyond the last.
struct KeyTile {
  int32_t *rank, *id;
  float* bias;
};

DEVICE bool is_causal(const RelAttention& p) { return p.rel_len == p.rel_key.max_distance + 1; }

template <int THREADS>
DEVICE void clear_labels(const KeyTile& tile, int count) {
  for (int k = thread_index(); k < count; k += THREADS) {
    tile.rank[k] = tile.id[k] = 0;
    tile.bias[k] = 0;
  }
}

// Starts to copy the labels of COUNT keys from j0 on, of those kinds that there are.
template <int THREADS, int COUNT>
DEVICE void copy_labels(const Call& call, const KeyTile& tile, int b, int h, int j0) {
  static_assert(COUNT <= THREADS);
  const RelAttention& p = call.p;
  const int keys = int(p.mem_len + p.key_len), k = thread_index(), j = j0 + k;
  if (k >= COUNT) return;
  const auto copy = [&](void* to, const void* labels, int64_t row) {
    if (labels) copy_async<4>(to, static_cast<const int32_t*>(labels) + row * keys + j, j < keys);
  };
  copy(tile.rank + k, p.rank_mask.key_rank, b);
  copy(tile.id + k, p.segments.key_ids, b);
  copy(tile.bias + k, call.workspace.key_bias, b * p.heads + h);
}

// What ranks alone say of a pair.
DEVICE bool sees_by_rank(const RowLabel& row, int32_t rank) { return rank < row.rank && rank >= row.floor; }

// Bit 2 n + parity: whether the dense mask shows column 8 n + 2 t + parity of a tile, whose column 0 is key j0, to a
// row.
template <int COLUMNS>
DEVICE uint32_t unmasked_columns(const RelAttention& p, const Row& row, int b, int h, int j0, int t) {
  const int keys = int(p.mem_len + p.key_len);
  const int64_t* stride = p.mask.stride;
  const bool* mask = static_cast<const bool*>(p.mask.data) + b * stride[0] + h * stride[1] + row.index * stride[2];
  uint32_t seen = 0;
#pragma unroll 1
  for (int n = 0; n < COLUMNS / 8; ++n)
    for (int parity = 0; parity < 2; ++parity) {
      const int j = j0 + 8 * n + 2 * t + parity;
      seen |= uint32_t(j < keys && mask[j * stride[3]]) << (2 * n + parity);
    }
  return seen;
}

DEVICE RowLabels merged(const RowLabels& a, const RowLabels& b) {
  return {smaller(a.least_rank, b.least_rank), larger(a.largest_rank, b.largest_rank),
          smaller(a.least_floor, b.least_floor), larger(a.largest_floor, b.largest_floor),
          a.any_sees_self || b.any_sees_self};
}

struct RowTile {
  int first_position, last_position;
  RowLabels labels;
};

// Of the rows place .. place + count - 1; place is a multiple of LABEL_TILE, or count a divisor of it.
DEVICE RowTile load_row_tile(const Call& call, int b, int place, int count) {
  const RelAttention& p = call.p;
  RowTile tile;
  tile.first_position = position_at(p, b, place);
  tile.last_position = position_at(p, b, smaller(place + count, int(p.length)) - 1);
  if (p.rank_mask.query_rank) {
    const int first = place / LABEL_TILE, tiles = tiles_of(p.length, LABEL_TILE);
    tile.labels = call.workspace.row_labels[b * tiles + first];
    for (int i = first + 1; i < smaller(tiles, tiles_of(place + count, LABEL_TILE)); ++i)
      tile.labels = merged(tile.labels, call.workspace.row_labels[b * tiles + i]);
  }
  return tile;
}

// Which of the pairs of a tile are seen. by_rank: ranks alone say which; some: other things may, too.
enum class Seen { none, some, by_rank, all };

// Of a tile of rows and one of `count` keys.
DEVICE Seen seen_pairs(const Call& call, const RowTile& rows, int b, int j0, int count) {
  const RelAttention& p = call.p;
  const int keys = int(p.mem_len + p.key_len), last = j0 + count - 1;
  const int first_own = rows.first_position + int(p.mem_len), last_own = rows.last_position + int(p.mem_len);
  if (is_causal(p) && j0 > last_own) return Seen::none;
  const bool plain = p.mask.data == nullptr && last < keys && (!is_causal(p) || last <= first_own);
  if (p.rank_mask.query_rank == nullptr) return plain ? Seen::all : Seen::some;
  const KeyLabels& labels = call.workspace.key_labels[b * tiles_of(keys, LABEL_TILE) + j0 / LABEL_TILE];
  const RowLabels& of = rows.labels;
  const bool owns = of.any_sees_self && j0 <= last_own && last >= first_own;
  if ((labels.least_rank >= of.largest_rank || labels.largest_rank < of.least_floor) && !owns) return Seen::none;
  if (!plain) return Seen::some;
  if (labels.largest_rank < of.least_rank && labels.least_rank >= of.largest_floor) return Seen::all;
  return owns ? Seen::some : Seen::by_rank;
}

// Finds the tiles with a pair that is seen, looking at 32 of them at a time, one for each lane.
struct Walk {
  int tiles, first = -WARP;                    // how many there are; the first of those looked at
  uint32_t waiting = 0, by_rank = 0, all = 0;  // of those: not yet gone to, and what is known of them

  // The next tile, or `tiles`; look(tile) gives what is seen of it, which `seen` becomes.
  template <typename Look>
  DEVICE int next(Seen& seen, int lane, Look look) {
    while (waiting == 0) {
      first += WARP;
      if (first >= tiles) return tiles;
      const Seen mine = first + lane < tiles ? look(first + lane) : Seen::none;
      waiting = ballot(mine != Seen::none);
      by_rank = ballot(mine == Seen::by_rank);
      all = ballot(mine == Seen::all);
    }
    const uint32_t bit = waiting & -waiting;
    waiting ^= bit;
    seen = all & bit ? Seen::all : by_rank & bit ? Seen::by_rank : Seen::some;
    return first + first_bit(bit);
  }
};

// Hides those scores of 8 N keys from j0 on, whose ranks are `rank`, that this lane's rows at `place` and place + 8 do
// not see.
template <int N>
DEVICE void hide(float (&score)[N][4], Seen seen, const RelAttention& p, const RowLabel (&label)[2], int b, int h,
                 int place, int j0, const int32_t* rank, int t) {
  if (seen == Seen::by_rank) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!sees_by_rank(label[i / 2], rank[8 * n + 2 * t + i % 2])) score[n][i] = -INFINITY;
  } else if (seen == Seen::some) {
    const int keys = int(p.mem_len + p.key_len);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Row row = load_row(p, b, place + 8 * r);
      // this lane's own key and the last one it may see, as columns of the tile less 2 t
      const int own = row.own_key - j0 - 2 * t, ahead = is_causal(p) ? row.position + int(p.mem_len) : keys;
      const int last = row.inside ? smaller(ahead, keys - 1) - j0 - 2 * t : -1;
      const uint32_t bits = p.mask.data ? unmasked_columns<8 * N>(p, row, b, h, j0, t) : ~0u;
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int parity = 0; parity < 2; ++parity) {
          const int k = 8 * n + parity;
          const bool by_labels = (sees_by_rank(label[r], rank[k + 2 * t]) || k == own) && k <= last;
          if (!by_labels || !(bits >> (2 * n + parity) & 1)) score[n][2 * r + parity] = -INFINITY;
        }
    }
  }
}

}  // namespace xlnet_kernels::cuda
