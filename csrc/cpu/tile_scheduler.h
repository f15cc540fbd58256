// The tile scheduler: which tiles of keys a block of rows takes.
#pragma once

#include "arithmetic.h"
#include "chunks.h"
#include "mask.h"
#include "tile_sizes.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

// A range of groups of keys, by default all. Backward takes all rows of a chunk through one range before the next, to
// keep the range's sums over rows in the cache.
struct KeyRange {
  int64_t begin = 0, end = INT64_MAX;
  bool is_first = true, is_last = true;
};

// The tile scheduler: cuts the groups of keys that some row of a block sees into tiles, those of a run of groups about
// equally long. Outside of the range, and of the keys that have a row of rel_key, there are none.
struct TileScheduler {
  const RelAttention& p;
  const Chunk& chunk;
  const KeyRanks& keys;
  const MaskRows& rows;
  int64_t max_keys;             // of a tile
  int64_t begin_key, end_key;   // of the chunk's keys, where tiles may be
  int64_t start = 0, end;       // the run's groups
  int64_t tile = 0, tiles = 0;  // the run's

  TileScheduler(const RelAttention& p, const Chunk& chunk, const KeyRanks& keys, const MaskRows& rows, int64_t max_keys,
                const KeyRange& range = {})
      : p(p), chunk(chunk), keys(keys), rows(rows), max_keys(max_keys) {
    const Reach reach(p, rows.first_own, rows.last_own);
    begin_key = larger(round_down(reach.begin - chunk.first_key, KEY_STEP), range.begin * KEY_GROUP);
    end_key = smaller(reach.end - chunk.first_key, smaller(range.end, chunk.key_groups) * KEY_GROUP);
    if (reach.end == reach.begin || end_key <= begin_key) begin_key = end_key = 0;
    end = begin_key / KEY_GROUP;
  }

  // False after the last tile; else it holds keys first .. first + count - 1 of the chunk.
  bool next(int64_t& first, int64_t& count) {
    if (tile == tiles && !next_run()) return false;
    first = larger((start + (end - start) * tile / tiles) * KEY_GROUP, begin_key);
    ++tile;
    const int64_t last = (start + (end - start) * tile / tiles) * KEY_GROUP;
    count = smaller(smaller(last, chunk.keys) - first, round_up(end_key - first, ROW_ROWS));
    return true;
  }

 private:
  bool sees(int64_t g) const { return rows.sees_group(p, chunk, keys, g); }

  bool next_run() {
    const int64_t groups = (end_key + KEY_GROUP - 1) / KEY_GROUP;
    start = end;
    while (start < groups && !sees(start)) ++start;
    end = start;
    while (end < groups && sees(end)) ++end;
    const int64_t tile_groups = max_keys / KEY_GROUP;
    tile = 0;
    tiles = (end - start + tile_groups - 1) / tile_groups;
    return tiles > 0;
  }
};

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
