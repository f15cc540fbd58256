// The mask: RankMask, the dense bool mask, and pairs for whose distance rel_key has no row. It is asked at three
// grains: groups of keys that a whole block of rows skips, rows that see all keys of a tile, single pairs.
#pragma once

#include "chunks.h"
#include "pack.h"
#include "scratch.h"
#include "tile_sizes.h"
#include "vector.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

// Ranks of a chunk's keys, padded to whole vectors, and their bounds in each group; not loaded for calls without a
// RankMask
struct KeyRanks {
  int32_t *rank, *group_min, *group_max;

  KeyRanks(Carver& carver, int64_t padded_keys, int64_t key_groups) {
    carver.take(padded_keys, rank);
    carver.take(key_groups, group_min, group_max);
  }

  void load(const RelAttention& p, const Chunk& chunk) const {
    if (p.rank_mask.key_rank == nullptr) return;
    const int32_t* from = p.rank_mask.key_rank + chunk.b * (p.mem_len + p.key_len) + chunk.first_key;
    for (int64_t j = 0; j < chunk.padded_keys; ++j) rank[j] = j < chunk.keys ? from[j] : INT32_MAX;
    for (int64_t g = 0; g < chunk.key_groups; ++g) {
      const int64_t first = g * KEY_GROUP, last = smaller(first + KEY_GROUP, chunk.keys);
      group_min[g] = group_max[g] = rank[first];
      for (int64_t j = first + 1; j < last; ++j) {
        group_min[g] = rank[j] < group_min[g] ? rank[j] : group_min[g];
        group_max[g] = rank[j] > group_max[g] ? rank[j] : group_max[g];
      }
    }
  }
};

// Bounds of the keys that the rows of a block see
struct MaskRows {
  int64_t max_rank, min_floor;
  int64_t first_own, last_own;  // keys at the positions of the first and the last row

  void start() {
    max_rank = INT64_MIN;
    min_floor = INT64_MAX;
  }
  // Rows come in the order of their positions.
  void add_row(const RelAttention& p, int64_t b, int64_t r, int64_t row_index, int64_t position) {
    last_own = p.mem_len + position;
    if (r == 0) first_own = last_own;
    const RankMask& mask = p.rank_mask;
    if (mask.query_rank == nullptr) return;
    max_rank = larger(max_rank, mask.query_rank[b * p.length + row_index]);
    if (mask.query_floor != nullptr) min_floor = smaller(min_floor, mask.query_floor[b * p.length + row_index]);
  }

  // Whether any row may see a key of the chunk's group g, by rank; false only if none does.
  bool sees_group(const RelAttention& p, const Chunk& chunk, const KeyRanks& keys, int64_t g) const {
    const int64_t first = chunk.first_key + g * KEY_GROUP, last = first + KEY_GROUP;  // keys
    const RankMask& mask = p.rank_mask;
    if (mask.query_rank == nullptr) return true;
    if (keys.group_min[g] < max_rank && (mask.query_floor == nullptr || keys.group_max[g] >= min_floor)) return true;
    return mask.sees_self != nullptr && first_own < last && last_own >= first;
  }
};

// RankMask for one row against the first keys of a tile; `first` counts the chunk's keys.
template <typename T>
struct RankRow {
  const int32_t* key_rank;
  int32_t query_rank = 0, query_floor = INT32_MIN;
  bool sees_all = true, sees_any = true;  // by bounds of groups: `sees_any` may be true of a row that sees none
  bool sees_self = false;

  // `own`: the key at the row's position
  RankRow(const RelAttention& p, const KeyRanks& keys, int64_t first, int64_t count, int64_t b, int64_t row_index,
          int64_t own)
      : key_rank(keys.rank + first) {
    const RankMask& mask = p.rank_mask;
    if (mask.query_rank == nullptr) return;
    query_rank = mask.query_rank[b * p.length + row_index];
    if (mask.query_floor != nullptr) query_floor = mask.query_floor[b * p.length + row_index];
    sees_any = false;
    for (int64_t g = first / KEY_GROUP; g * KEY_GROUP < first + count; ++g) {
      sees_all = sees_all && keys.group_max[g] < query_rank && keys.group_min[g] >= query_floor;
      sees_any = sees_any || (keys.group_min[g] < query_rank && keys.group_max[g] >= query_floor);
    }
    sees_self = mask.sees_self != nullptr && mask.sees_self[b * p.length + row_index] && own >= 0 && own < count;
  }

  INLINE_MEMBER Vec<T> hide(Vec<T> score, int64_t j) const {
    const IntVec<T> rank = load_ints(key_rank + j, T());
    return select<T>((rank < query_rank) & (rank >= query_floor), score, broadcast(-static_cast<T>(INFINITY)));
  }
};

// Whether a row sees a key; `own`: the key at its position
INLINE bool sees_key(const RelAttention& p, int64_t b, int64_t h, int64_t row_index, int64_t own, int64_t key) {
  const Reach reach(p, own, own);
  if (key < reach.begin || key >= reach.end) return false;
  const RankMask& mask = p.rank_mask;
  if (mask.query_rank != nullptr) {
    const int64_t row = b * p.length + row_index;
    const int32_t rank = mask.key_rank[b * (p.mem_len + p.key_len) + key];
    const bool ranked = rank < mask.query_rank[row] && (mask.query_floor == nullptr || rank >= mask.query_floor[row]);
    if (!ranked && (mask.sees_self == nullptr || !mask.sees_self[row] || key != own)) return false;
  }
  const bool* dense = static_cast<const bool*>(p.mask.data);
  return dense == nullptr || dense[row_start(p.mask, b, h, row_index) + key * p.mask.stride[3]];
}

// Whether a row sees any key, asked key by key; for rows that have no finite score
template <typename T>
static bool sees_any_key(const RelAttention& p, const Chunk& chunk, const KeyRanks& keys, int64_t row_index,
                         int64_t position) {
  const int64_t own = p.mem_len + position;
  const Reach range(p, own, own);
  const bool* dense = static_cast<const bool*>(p.mask.data);
  if (dense != nullptr) dense += row_start(p.mask, chunk.b, chunk.h, row_index);
  for (int64_t first = range.begin, count; first < range.end; first += count) {
    count = smaller(KEY_GROUP, range.end - first);
    const RankRow<T> ranks(p, keys, first - chunk.first_key, count, chunk.b, row_index, own - first);
    if (!ranks.sees_any && !ranks.sees_self) continue;
    for (int64_t j = 0; j < count; ++j) {
      const int32_t rank = ranks.key_rank[j];
      const bool ranked = p.rank_mask.query_rank == nullptr || (rank < ranks.query_rank && rank >= ranks.query_floor);
      const bool visible = ranked || (ranks.sees_self && j == own - first);
      if (visible && (dense == nullptr || dense[(first + j) * p.mask.stride[3]])) return true;
    }
  }
  return false;
}

// The dense mask: sets the row's scores of hidden keys among first .. first + count - 1 to -inf.
template <typename T>
static void hide_by_dense_mask(const RelAttention& p, int64_t b, int64_t h, int64_t row_index, int64_t first,
                               int64_t count, T* score) {
  if (p.mask.data == nullptr) return;
  const bool* visible = static_cast<const bool*>(p.mask.data) + row_start(p.mask, b, h, row_index);
  for (int64_t j = 0; j < count; ++j)
    if (!visible[(first + j) * p.mask.stride[3]]) score[j] = -static_cast<T>(INFINITY);
}

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
