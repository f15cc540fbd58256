// Who sees whom: ranks, floors, own keys, dense masks, segments; per row, per key, and per pair of tiles.
#pragma once

#include "kernels.h"
#include "tile.cuh"

namespace xlnet_kernels::cuda {

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr int32_t LOWEST = -2147483647 - 1, HIGHEST = 2147483647;

DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }
DEVICE int tiles_of(int64_t length, int size) { return int((length + size - 1) / size); }

// One query row as its lanes know it.
struct Row {
  bool inside;
  int index, position;  // of the row in the call, in the segment
  int32_t rank, floor, id;
  int own_key;  // that it sees whatever the ranks say, or -1
};

// The row at `place` in order of position.
DEVICE int row_at(const RelAttention& p, int b, int place) {
  return p.row_order ? p.row_order[b * p.length + place] : place;
}
DEVICE int position_at(const RelAttention& p, int b, int place) {
  if (p.row_position == nullptr) return place;
  return larger(0, smaller(p.row_position[b * p.length + place], int(p.key_len) - 1));  // no one has looked at them
}

DEVICE Row load_row(const RelAttention& p, int b, int place) {
  Row row;
  row.inside = place < p.length;
  place = row.inside ? place : int(p.length) - 1;
  row.index = row_at(p, b, place);
  row.position = position_at(p, b, place);
  const int64_t at = b * p.length + row.index;
  row.rank = p.query_rank ? p.query_rank[at] : HIGHEST;
  row.floor = p.query_floor ? p.query_floor[at] : LOWEST;
  row.id = p.query_ids ? p.query_ids[at] : 0;
  row.own_key = p.sees_self && p.sees_self[at] ? row.position + int(p.mem_len) : -1;
  return row;
}

// Labels of a tile of keys, in shared memory.
struct KeyTile {
  int32_t *rank, *id;
  float* bias;
};

DEVICE bool is_causal(const RelAttention& p) { return p.rel_rows == p.max_distance + 1; }

// Copies the labels of `count` keys from j0 on; keys beyond the last are seen by no one.
template <int THREADS>
DEVICE void load_labels(const Call& call, const KeyTile& tile, int b, int h, int j0, int count) {
  const RelAttention& p = call.p;
  const int keys = int(p.mem_len + p.key_len);
  for (int k = thread_index(); k < count; k += THREADS) {
    const int j = j0 + k;
    const bool inside = j < keys;
    const int64_t at = int64_t(b) * keys + j;
    tile.rank[k] = !inside ? HIGHEST : p.key_rank ? p.key_rank[at] : LOWEST;
    tile.id[k] = inside && p.key_ids ? p.key_ids[at] : 0;
    tile.bias[k] = inside && call.workspace.key_bias ? call.workspace.key_bias[(b * p.heads + h) * keys + j] : 0.f;
  }
}

// Whether a row sees key j, whose rank is `rank`. Rows and keys beyond the last see nothing and are not seen.
DEVICE bool sees(const RelAttention& p, const Row& row, int b, int h, int j, int32_t rank) {
  if (!row.inside || j >= p.mem_len + p.key_len) return false;
  if (is_causal(p) && j > row.position + p.mem_len) return false;
  if (p.query_rank && j != row.own_key && (rank >= row.rank || rank < row.floor)) return false;
  if (p.mask.data == nullptr) return true;
  const int64_t* stride = p.mask.stride;
  return static_cast<const bool*>(p.mask.data)[b * stride[0] + h * stride[1] + row.index * stride[2] + j * stride[3]];
}

// Bit 2 n + parity: whether a row sees column 8 n + 2 t + parity of a tile, whose column 0 is key j0.
template <int COLUMNS>
DEVICE uint32_t seen_columns(const RelAttention& p, const Row& row, int b, int h, int j0, const int32_t* rank, int t) {
  uint32_t seen = 0;
#pragma unroll 1
  for (int n = 0; n < COLUMNS / 8; ++n)
    for (int parity = 0; parity < 2; ++parity) {
      const int k = 8 * n + 2 * t + parity;
      seen |= uint32_t(sees(p, row, b, h, j0 + k, rank[k])) << (2 * n + parity);
    }
  return seen;
}

struct RowTile {
  int first_position, last_position;
  RowLabels labels;
};

// Of the rows place .. place + count - 1.
DEVICE RowTile load_row_tile(const Call& call, int b, int place, int count) {
  const RelAttention& p = call.p;
  RowTile tile;
  tile.first_position = position_at(p, b, place);
  tile.last_position = position_at(p, b, smaller(place + count, int(p.length)) - 1);
  if (p.query_rank) tile.labels = call.workspace.row_labels[b * tiles_of(p.length, LABEL_TILE) + place / LABEL_TILE];
  return tile;
}

enum class Seen { none, some, all };

// Which of the pairs of a tile of rows and one of `count` keys are seen; "some" where only a closer look can tell.
DEVICE Seen seen_pairs(const Call& call, const RowTile& rows, int b, int j0, int count) {
  const RelAttention& p = call.p;
  const int keys = int(p.mem_len + p.key_len), last = j0 + count - 1;
  const int first_own = rows.first_position + int(p.mem_len), last_own = rows.last_position + int(p.mem_len);
  if (is_causal(p) && j0 > last_own) return Seen::none;
  bool all = p.mask.data == nullptr && last < keys && (!is_causal(p) || last <= first_own);
  if (p.query_rank) {
    const KeyLabels& labels = call.workspace.key_labels[b * tiles_of(keys, LABEL_TILE) + j0 / LABEL_TILE];
    const RowLabels& of = rows.labels;
    const bool owns = of.any_sees_self && j0 <= last_own && last >= first_own;
    if ((labels.least_rank >= of.largest_rank || labels.largest_rank < of.least_floor) && !owns) return Seen::none;
    all = all && labels.largest_rank < of.least_rank && labels.least_rank >= of.largest_floor;
  }
  return all ? Seen::all : Seen::some;
}

}  // namespace xlnet_kernels::cuda
