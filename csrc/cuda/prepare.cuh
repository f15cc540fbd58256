// What both passes need first: bounds of tiles, and u.k and v.r of every key and row of rel_key; before backward also
// its row statistics and the zeros that its sums begin with.
#pragma once

#include "backward_rows.cuh"
#include "scheduler.cuh"

namespace xlnet_kernels::cuda {

constexpr int PREPARE_THREADS = 128, ZERO_CHUNKS = 16 * WARP;  // chunks of 16 bytes: a warp's

// One item for each warp, section after section. Items of rows are ROWS_AT_ONCE of one head.
struct Prepare {
  Backward a;
  int64_t key_tiles, row_tiles, key_items, rel_items, row_items, zero_items;
};

DEVICE void bound_keys(const Call& call, int tile, int lane) {
  const RelAttention& p = call.p;
  const int keys = int(p.mem_len + p.key_len), tiles = tiles_of(keys, BOUNDS_TILE), b = tile / tiles;
  KeyBounds bounds{HIGHEST, LOWEST};
  uint32_t pair = 0;
  for (int parity = 0; parity < 2; ++parity) {
    const int j = tile % tiles * BOUNDS_TILE + first_of_pair(lane) + parity;
    if (j >= keys) break;
    const int32_t rank = p.rank_mask.key_rank[int64_t(b) * keys + j];
    bounds = {smaller(bounds.min_rank, rank), larger(bounds.max_rank, rank)};
    pair |= rank_as_half(rank) << (16 * parity);
  }
  call.workspace.rank_pairs[int64_t(tile) * (BOUNDS_TILE / 2) + lane] = pair;
  bounds = {warp_min(bounds.min_rank), warp_max(bounds.max_rank)};
  if (lane == 0) call.workspace.key_bounds[tile] = bounds;
}

DEVICE void bound_rows(const Call& call, int tile, int lane) {
  const RelAttention& p = call.p;
  const int tiles = tiles_of(p.length, BOUNDS_TILE), b = tile / tiles;
  RowBounds bounds{HIGHEST, LOWEST, HIGHEST, LOWEST, 0};
  for (int k = lane; k < BOUNDS_TILE; k += WARP) {
    const int sorted_row = tile % tiles * BOUNDS_TILE + k;
    if (sorted_row >= p.length) break;
    const QueryRow row = load_query_row(p, b, sorted_row);
    bounds = merged(bounds, {row.rank, row.rank, row.floor, row.floor, row.own_key >= 0});
  }
  bounds = {warp_min(bounds.min_rank), warp_max(bounds.max_rank), warp_min(bounds.min_floor),
            warp_max(bounds.max_floor), warp_max(bounds.any_sees_self)};
  if (lane == 0) call.workspace.row_bounds[tile] = bounds;
}

// sum[0] and sum[2] += bias . row of rows g and g + 8, summed by the quad; null: zeros. A lane's chunk is the same of a
// row and of the bias, in whatever order mma takes them.
template <typename T>
DEVICE void add_bias_products(float (&sum)[4], const T* const (&row)[2], const T* bias, int head_dim, int t) {
#pragma unroll 2
  for (int first = 0; first < head_dim; first += 4 * CHUNK<T>) {
    const int column = first + t * CHUNK<T>;
    Bytes16 of_bias = {}, of_row[2] = {};
    if (column < head_dim) {
      of_bias = *reinterpret_cast<const Bytes16*>(bias + column);
      for (int r = 0; r < 2; ++r)
        if (row[r]) of_row[r] = *reinterpret_cast<const Bytes16*>(row[r] + column);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t* const word[2] = {of_row[0].word + 2 * half, of_row[1].word + 2 * half};
      mma<T>(sum, {word[0][0], word[1][0], word[0][1], word[1][1]},
             {of_bias.word[2 * half], of_bias.word[2 * half + 1]});
    }
  }
}

// to[r] = bias . rows(r), for ROWS_AT_ONCE rows from `first` on; zeros without a bias.
template <typename T, typename Rows>
DEVICE void bias_products(const T* bias, Rows rows, int first, int64_t count, int head_dim, float* to) {
  if constexpr (sizeof(T) == 2) {
    const Lane lane = this_lane();
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i += 16) {
      const int of[2] = {first + i + lane.g, first + i + lane.g + 8};
      const T* row[2];
      for (int r = 0; r < 2; ++r) row[r] = of[r] < count ? rows(of[r]) : nullptr;
      float sum[4] = {};
      if (bias) add_bias_products(sum, row, bias, head_dim, lane.t);
      for (int r = 0; r < 2; ++r)
        if (lane.t == 0 && row[r]) to[of[r]] = sum[2 * r];
    }
  } else {
    const RowLanes<T> lanes(head_dim);
    float of_bias[CHUNK<T>] = {};
    const bool reads = bias && lanes.inside;
    if (reads) load_chunk(bias + lanes.column, of_bias);
    lanes.for_each(first, int(count), [&](int r, bool inside) {
      float sum = 0;
      if (reads && inside) {
        float of_row[CHUNK<T>];
        load_chunk(rows(r) + lanes.column, of_row);
#pragma unroll
        for (int d = 0; d < CHUNK<T>; ++d) sum += of_bias[d] * of_row[d];
      }
      sum = lanes.row_sum(sum);
      if (lanes.column == 0 && inside) to[r] = sum;
    });
  }
}

DEVICE void find_segment(const Call& call, int tile, int lane) {
  const RelAttention& p = call.p;
  const int keys = int(p.mem_len + p.key_len), tiles = tiles_of(keys, BOUNDS_TILE), first = tile % tiles * BOUNDS_TILE;
  const int32_t* const of_key = p.segments.key_ids + int64_t(tile / tiles) * keys;
  bool is_other = false;
  for (int j = first + lane; j < smaller(first + BOUNDS_TILE, keys); j += WARP) is_other |= of_key[j] != of_key[first];
  const bool is_only = !ballot(is_other);
  if (lane == 0) call.workspace.key_segments[tile] = {of_key[first], is_only};
}

template <typename T>
KERNEL THREADS_PER_BLOCK(PREPARE_THREADS, 1) prepare_kernel(Prepare prepare) {
  const Call& call = prepare.a.call;
  const RelAttention& p = call.p;
  const Workspace& w = call.workspace;
  const int lane = thread_index() % WARP, head_dim = int(p.head_dim), heads = int(p.heads);
  int64_t item = int64_t(block_index().x) * (PREPARE_THREADS / WARP) + thread_index() / WARP;
  if (item < prepare.key_tiles) {
    if (w.key_bounds) bound_keys(call, int(item), lane);
    if (w.key_segments) find_segment(call, int(item), lane);
    return;
  }
  item -= prepare.key_tiles;
  if (item < prepare.row_tiles) return bound_rows(call, int(item), lane);
  item -= prepare.row_tiles;
  if (item < prepare.key_items) {
    const int keys = int(p.mem_len + p.key_len);
    const auto [head, first] = head_item(item, keys);
    const int b = head / heads, h = head % heads;
    bias_products(static_cast<const T*>(p.content_bias) + h * head_dim,
                  key_rows_of<const T>(p, p.memory.key, p.keys.key, b, h), first, keys, head_dim,
                  w.key_bias + int64_t(head) * keys);
    return;
  }
  item -= prepare.key_items;
  if (item < prepare.rel_items) {
    const auto [head, first] = head_item(item, int(p.rel_len));
    const int b = head / heads, h = head % heads;
    const T* const bias = static_cast<const T*>(p.position_bias);
    bias_products(bias ? bias + h * head_dim : nullptr, rows_of<const T>(p.rel_key.rows, b, h), first, p.rel_len,
                  head_dim, w.rel_bias + head * call.rel_bias_rows);
    return;
  }
  item -= prepare.rel_items;
  if (item < prepare.row_items) {
    const auto [head, first] = head_item(item, int(p.length));
    return row_statistics<T>(prepare.a, head, first);
  }
  item -= prepare.row_items;
  if (item >= prepare.zero_items) return;
  const Sums& sums = prepare.a.gradients.sums;
  const int64_t first = item * ZERO_CHUNKS, end = first + ZERO_CHUNKS;
  for (int64_t i = first + lane; i < (end < sums.zero_chunks ? end : sums.zero_chunks); i += WARP)
    reinterpret_cast<Bytes16*>(sums.zeros)[i] = {};
}

template <typename T>
const char* prepare(const Backward& a, Stream stream) {
  const RelAttention& p = a.call.p;
  const int64_t keys = p.mem_len + p.key_len, all_heads = p.batch * p.heads;
  const auto parts = [](int64_t count, int64_t size) { return (count + size - 1) / size; };
  Prepare prepare{a, 0, 0, 0, 0, 0, 0};
  if (p.rank_mask.query_rank || p.segments.key_ids) prepare.key_tiles = p.batch * parts(keys, BOUNDS_TILE);
  if (p.rank_mask.query_rank) prepare.row_tiles = p.batch * parts(p.length, BOUNDS_TILE);
  if (a.call.workspace.key_bias) prepare.key_items = all_heads * parts(keys, ROWS_AT_ONCE);
  prepare.rel_items = (a.call.shared_rel_key ? p.heads : all_heads) * parts(p.rel_len, ROWS_AT_ONCE);
  if (a.gradients.row_values) prepare.row_items = all_heads * parts(p.length, ROWS_AT_ONCE);
  prepare.zero_items = parts(a.gradients.sums.zero_chunks, ZERO_CHUNKS);
  const int64_t warps = prepare.key_tiles + prepare.row_tiles + prepare.key_items + prepare.rel_items +
                        prepare.row_items + prepare.zero_items;
  if (warps == 0) return nullptr;
  const Index grid{int(parts(warps, PREPARE_THREADS / WARP)), 1, 1};
  return launch(prepare_kernel<T>, grid, PREPARE_THREADS, 0, stream, prepare);
}

// Before forward.
template <typename T>
const char* prepare(const Call& call, Stream stream) {
  return prepare<T>(Backward{call, {}}, stream);
}

}  // namespace xlnet_kernels::cuda
