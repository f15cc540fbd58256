// Visibility of keys. RowVisibility has the keys that one row of query sees, pair by pair; RowSummary and RowTile bound
// them for many rows at once. A pair is visible where all of these show it:
//
//   reach    rel_key has a row for its distance; the row is not beyond the last one, the key neither
//   labels   the key's rank is below the row's and not below its floor; or it is the row's own key, and that is seen
//   mask     the dense mask has true
//
// Padding, streams and windows come as ranks and floors; segments hide nothing. mask.cuh applies it to scores.
#pragma once

#include "rows.cuh"

namespace xlnet_kernels::cuda {

constexpr int32_t LOWEST = -2147483647 - 1, HIGHEST = 2147483647;

struct Range {
  int begin, end;
};

// The keys for whose distance rel_key has a row, of rows whose own keys are first_own to last_own; empty at 0.
DEVICE Range keys_within_reach(const RelAttention& p, int first_own, int last_own) {
  const int begin = larger(first_own - int(p.rel_key.max_distance), 0);
  const int end = smaller(last_own - int(p.rel_key.max_distance - p.rel_len), int(p.mem_len + p.key_len));
  return begin < end ? Range{begin, end} : Range{0, 0};
}

// The sorted rows that keys j0 .. j0 + count - 1 are within reach of; all of them where positions have to be looked up.
DEVICE Range rows_within_reach(const RelAttention& p, int j0, int count) {
  if (p.rows.position) return {0, int(p.length)};
  const int first = j0 + int(p.rel_key.max_distance - p.mem_len);  // the last row that key j0 is within reach of
  const int begin = larger(first - int(p.rel_len) + 1, 0), end = smaller(first + count, int(p.length));
  return begin < end ? Range{begin, end} : Range{0, 0};
}

// The labels that decide about most pairs of a query row.
struct RowLabels {
  int32_t rank, floor, segment;

  // Whether the row sees a key of this rank, own keys aside.
  DEVICE bool sees_by_rank(int32_t key_rank) const { return key_rank < rank && key_rank >= floor; }
};
struct QueryRow : RowLabels {
  bool inside;          // else beyond the last row: it sees no key
  int index, position;  // in the tensors, in the segment
  int own_key;          // that it sees whatever the ranks say, or -1
};

// Labels of the row at `index` in the tensors
DEVICE QueryRow load_labels(const RelAttention& p, int b, bool inside, int index, int position) {
  QueryRow row;
  row.inside = inside;
  row.index = index;
  row.position = position;
  const int64_t at = b * p.length + row.index;
  row.rank = !row.inside ? LOWEST : p.rank_mask.query_rank ? p.rank_mask.query_rank[at] : HIGHEST;
  row.floor = p.rank_mask.query_floor ? p.rank_mask.query_floor[at] : LOWEST;
  row.segment = p.segments.query_ids ? p.segments.query_ids[at] : 0;
  row.own_key = row.inside && p.rank_mask.sees_self && p.rank_mask.sees_self[at] ? row.position + int(p.mem_len) : -1;
  return row;
}
DEVICE QueryRow load_query_row(const RelAttention& p, int b, int sorted_row) {
  const int cut = smaller(sorted_row, int(p.length) - 1);
  return load_labels(p, b, sorted_row < p.length, row_index(p, b, cut), row_position(p, b, cut));
}

// The keys that one row sees.
struct RowVisibility {
  const RelAttention& p;
  const QueryRow& row;
  const int b, h;
  const Range reach;

  DEVICE RowVisibility(const RelAttention& p, const QueryRow& row, int b, int h)
      : p(p), row(row), b(b), h(h), reach(reach_of(p, row)) {}

  DEVICE static Range reach_of(const RelAttention& p, const QueryRow& row) {
    const int own = row.position + int(p.mem_len);
    return row.inside ? keys_within_reach(p, own, own) : Range{0, 0};
  }
  DEVICE bool is_within_reach(int j) const { return j >= reach.begin && j < reach.end; }
  DEVICE bool is_shown_by_labels(int j, int32_t key_rank) const {
    return row.sees_by_rank(key_rank) || j == row.own_key;
  }
  DEVICE const bool* mask_row() const {
    const int64_t* stride = p.mask.stride;
    return static_cast<const bool*>(p.mask.data) + b * stride[0] + h * stride[1] + row.index * stride[2];
  }

  // Whether labels and the dense mask show key j, which is within reach.
  DEVICE bool is_shown(int j) const {
    const int32_t* key_rank = p.rank_mask.key_rank;
    const bool by_labels = key_rank == nullptr || is_shown_by_labels(j, key_rank[b * (p.mem_len + p.key_len) + j]);
    return by_labels && (p.mask.data == nullptr || mask_row()[j * p.mask.stride[3]]);
  }
  DEVICE bool sees(int j) const { return is_within_reach(j) && is_shown(j); }
  // Whether it sees any of the keys t, t + 4, .., asked one by one.
  DEVICE bool sees_any(int t) const {
    for (int j = reach.begin + t; j < reach.end; j += 4)
      if (is_shown(j)) return true;
    return false;
  }

  // Bit 2 n + parity: whether the dense mask shows column 8 n + 2 t + parity of a tile, whose column 0 is key j0.
  template <int COLUMNS>
  DEVICE uint32_t unmasked_columns(int j0, int t) const {
    const int keys = int(p.mem_len + p.key_len);
    const bool* mask = mask_row();
    uint32_t visible = 0;
#pragma unroll 1
    for (int n = 0; n < COLUMNS / 8; ++n)
      for (int parity = 0; parity < 2; ++parity) {
        const int j = j0 + 8 * n + 2 * t + parity;
        visible |= uint32_t(j < keys && mask[j * p.mask.stride[3]]) << (2 * n + parity);
      }
    return visible;
  }
  // One bit for each column: whether the row sees it; `key_rank`: the tile's ranks.
  template <int COLUMNS>
  DEVICE uint32_t columns(int j0, const int32_t* key_rank, int t) const {
    uint32_t visible = 0;
#pragma unroll 1
    for (int bit = 0; bit < COLUMNS / 4; ++bit) {
      const int k = bit / 2 * 8 + 2 * t + bit % 2, j = j0 + k;
      visible |= uint32_t(is_shown_by_labels(j, key_rank[k]) && is_within_reach(j)) << bit;
    }
    return p.mask.data ? visible & unmasked_columns<COLUMNS>(j0, t) : visible;
  }
};

// Bounds of the labels of some rows: a key that they hide is hidden from each row.
struct RowSummary {
  int max_rank = LOWEST, min_floor = HIGHEST, first_position = HIGHEST, last_position = LOWEST;
  int any_sees_self = 0;

  DEVICE void add(const QueryRow& row) {
    if (!row.inside) return;
    max_rank = larger(max_rank, row.rank);
    min_floor = smaller(min_floor, row.floor);
    first_position = smaller(first_position, row.position);
    last_position = larger(last_position, row.position);
    any_sees_self |= row.own_key >= 0;
  }
  DEVICE RowSummary of_warp() const {
    return {warp_max(max_rank), warp_min(min_floor), warp_min(first_position), warp_max(last_position),
            warp_max(any_sees_self)};
  }
  DEVICE bool may_see(const RelAttention& p, int j, int32_t key_rank) const {
    const int first_own = first_position + int(p.mem_len), last_own = last_position + int(p.mem_len);
    const Range reach = keys_within_reach(p, first_own, last_own);
    const bool by_rank = key_rank < max_rank && key_rank >= min_floor;
    return (by_rank || (any_sees_self && j >= first_own && j <= last_own)) && j >= reach.begin && j < reach.end;
  }
};

// How much of a tile is visible. by_rank: ranks alone say which pairs; some: other things may, too.
enum class Visibility { none, some, by_rank, all };

// Visibility where ranks are compared by pairs. Kernels on sm_90a have one more case of it: own keys beside ranks. A
// value of Visibility for it would cost kernels on sm_80 500 bytes of spills.
struct PairVisibility {
  Visibility visibility;
  bool owns;  // by_rank, and rows see their own keys as well
};

DEVICE RowBounds merged(const RowBounds& a, const RowBounds& b) {
  return {smaller(a.min_rank, b.min_rank), larger(a.max_rank, b.max_rank), smaller(a.min_floor, b.min_floor),
          larger(a.max_floor, b.max_floor), a.any_sees_self || b.any_sees_self};
}

// Ranks of rows that may be compared by pairs, as float16 numbers, are of less than this magnitude.
constexpr int32_t LARGEST_RANK = LARGEST<Half>;

// The segments, by `preprocess`, of the BOUNDS_TILE keys that keys j0 .. j0 + COUNT - 1 lie in. `keys`: number of keys
// of the sequence, memory included.
template <int COUNT>
DEVICE KeySegment load_key_segment(const Call& call, int b, int keys, int j0) {
  static_assert(BOUNDS_TILE % COUNT == 0);
  const KeySegment* const of = call.workspace.key_segments;
  return of ? of[b * tiles_of(keys, BOUNDS_TILE) + j0 / BOUNDS_TILE] : KeySegment{0, true};
}

// Bounds of a tile of rows, which say how much they see of keys j0 .. j0 + count - 1.
struct RowTile {
  int first_position, last_position;
  RowBounds bounds;

  // Whether labels alone decide: there is no dense mask, and each key is within reach of each row. For the last row
  // the reach begins latest, for the first one it ends first.
  DEVICE bool is_by_labels(const RelAttention& p, int j0, int count) const {
    const int first_own = first_position + int(p.mem_len), last_own = last_position + int(p.mem_len);
    const int latest_begin = last_own - int(p.rel_key.max_distance), last = j0 + count - 1;
    const int first_end = first_own - int(p.rel_key.max_distance - p.rel_len);
    return p.mask.data == nullptr && last < int(p.mem_len + p.key_len) && j0 >= latest_begin && last < first_end;
  }
  // Whether ranks may be compared by pairs.
  DEVICE bool fits_pairs() const { return bounds.min_rank > -LARGEST_RANK && bounds.max_rank < LARGEST_RANK; }

  DEVICE Visibility visibility(const Call& call, int b, int j0, int count) const {
    const RelAttention& p = call.p;
    const int keys = int(p.mem_len + p.key_len), last = j0 + count - 1;
    const int first_own = first_position + int(p.mem_len), last_own = last_position + int(p.mem_len);
    const Range some = keys_within_reach(p, first_own, last_own);
    if (j0 >= some.end || last < some.begin) return Visibility::none;
    const bool by_labels = is_by_labels(p, j0, count);
    if (p.rank_mask.query_rank == nullptr) return by_labels ? Visibility::all : Visibility::some;
    const KeyBounds& of_keys = call.workspace.key_bounds[b * tiles_of(keys, BOUNDS_TILE) + j0 / BOUNDS_TILE];
    const bool owns = bounds.any_sees_self && j0 <= last_own && last >= first_own;
    if ((of_keys.min_rank >= bounds.max_rank || of_keys.max_rank < bounds.min_floor) && !owns) return Visibility::none;
    if (!by_labels) return Visibility::some;
    if (of_keys.max_rank < bounds.min_rank && of_keys.min_rank >= bounds.max_floor) return Visibility::all;
    return owns ? Visibility::some : Visibility::by_rank;
  }

  // For kernels that compare ranks by pairs
  DEVICE Visibility visibility_by_pairs(const Call& call, int b, int j0, int count) const {
    const Visibility visibility = this->visibility(call, b, j0, count);
    return visibility == Visibility::by_rank && !fits_pairs() ? Visibility::some : visibility;
  }
  // Pair visibility with own keys told apart, and without floors, because pairs have none.
  DEVICE PairVisibility with_own_keys(const RelAttention& p, Visibility by_pairs, int j0, int count) const {
    if (by_pairs == Visibility::by_rank && p.rank_mask.query_floor) by_pairs = Visibility::some;
    const bool owns = by_pairs == Visibility::some && p.rank_mask.query_rank && !p.rank_mask.query_floor &&
                      fits_pairs() && is_by_labels(p, j0, count);
    return {owns ? Visibility::by_rank : by_pairs, owns};
  }
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

}  // namespace xlnet_kernels::cuda
