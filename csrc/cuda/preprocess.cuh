// Launches before both passes: bounds of tiles, unread keys, and u.k and v.r of every key and row of rel_key; before
// backward also unread rows of rel_key, row statistics and the initial zeros of sums.
#pragma once

#include "bias.cuh"
#include "row_statistics.cuh"
#include "mask.cuh"
#include "scheduler.cuh"
#include "unread.cuh"

namespace xlnet_kernels::cuda {

constexpr int PREPROCESS_THREADS = 128, ZERO_CHUNKS = 16 * WARP;  // chunks of 16 bytes: a warp's

// One item for each warp, section after section. Items of rows are ROWS_AT_ONCE of one head.
struct Preprocess {
  Backward a;
  int key_tiles, row_tiles, unread_items, key_items, rel_items, row_items, zero_items;
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

DEVICE void find_segment(const Call& call, int tile, int lane) {
  const RelAttention& p = call.p;
  const int keys = int(p.mem_len + p.key_len), tiles = tiles_of(keys, BOUNDS_TILE), first = tile % tiles * BOUNDS_TILE;
  const int32_t* const of_key = p.segments.key_ids + int64_t(tile / tiles) * keys;
  bool is_other = false;
  for (int j = first + lane; j < smaller(first + BOUNDS_TILE, keys); j += WARP) is_other |= of_key[j] != of_key[first];
  const bool is_only = !ballot(is_other);
  if (lane == 0) call.workspace.key_segments[tile] = {of_key[first], is_only};
}

DEVICE void mark_unread_keys(const Call& call, int word, int lane) {
  const int head = word / call.key_words, first = word % call.key_words * 32;
  const uint32_t unread = find_unread_keys(call.p, head / call.mask_heads, head % call.mask_heads, first, lane);
  if (lane == 0) call.workspace.unread_keys[word] = unread;
}

// Their v.r are zeros, too.
DEVICE void mark_unread_rel_rows(const Call& call, uint32_t not_finite, int head, int first, float* rel_bias,
                                 int lane) {
  const RelAttention& p = call.p;
  const int heads = int(p.heads), b = head / heads, end = call.shared_rel_key ? int(p.batch) : b + 1;
  const uint32_t unread = unread_among(not_finite, p, b, end, head % heads, first, lane);
  if (lane == 0) call.workspace.unread_rel_rows[int64_t(head) * tiles_of(p.rel_len, 32) + first / 32] = unread;
  sync_warp();  // other lanes have stored the bias
  if (unread >> lane & 1) rel_bias[lane] = 0;
}

template <typename T>
KERNEL THREADS_PER_BLOCK(PREPROCESS_THREADS, 1) preprocess_kernel(Preprocess preprocess) {
  const Call& call = preprocess.a.call;
  const RelAttention& p = call.p;
  const Workspace& w = call.workspace;
  const int lane = thread_index() % WARP, head_dim = int(p.head_dim), heads = int(p.heads);
  int item = block_index().x * (PREPROCESS_THREADS / WARP) + thread_index() / WARP;
  if (item < preprocess.key_tiles) {
    if (w.key_bounds) bound_keys(call, item, lane);
    if (w.key_segments) find_segment(call, item, lane);
    return;
  }
  item -= preprocess.key_tiles;
  if (item < preprocess.row_tiles) return bound_rows(call, item, lane);
  item -= preprocess.row_tiles;
  if (item < preprocess.unread_items) return mark_unread_keys(call, item, lane);
  item -= preprocess.unread_items;
  if (item < preprocess.key_items) {
    const int keys = int(p.mem_len + p.key_len);
    const auto [head, first] = head_item(item, keys);
    const int b = head / heads, h = head % heads;
    return make_key_bias<T>(p, key_rows_of<const T>(p, p.memory.key, p.keys.key, b, h), h, first,
                            w.key_bias + int64_t(head) * keys + first);
  }
  item -= preprocess.key_items;
  if (item < preprocess.rel_items) {
    const auto [head, first] = head_item(item, int(p.rel_len));
    const int b = head / heads, h = head % heads;
    const T* const bias = bias_of_head<T>(p.position_bias, p, h);
    const auto rows = rows_of<const T>(p.rel_key.rows, b, h);
    float* const to = w.rel_bias + head * call.rel_bias_rows + first;
    if (w.unread_rel_rows) {
      const uint32_t not_finite = bias_products<true>(bias, rows, first, int(p.rel_len), head_dim, to);
      mark_unread_rel_rows(call, not_finite, head, first, to, lane);
    } else {
      bias_products(bias, rows, first, int(p.rel_len), head_dim, to);
    }
    return;
  }
  item -= preprocess.rel_items;
  if (item < preprocess.row_items) {
    const auto [head, first] = head_item(item, int(p.length));
    return row_statistics<T>(preprocess.a, head, first);
  }
  item -= preprocess.row_items;
  if (item >= preprocess.zero_items) return;
  const Zeros& all = preprocess.a.gradients.sums.zeros;
  const int64_t first = int64_t(item) * ZERO_CHUNKS + lane;
  Bytes16* const zeros = static_cast<Bytes16*>(all.data) + first;
  const int chunks = all.chunks - first < ZERO_CHUNKS ? int(all.chunks - first) : ZERO_CHUNKS;
#pragma unroll
  for (int i = 0; i < ZERO_CHUNKS; i += WARP)
    if (i < chunks) zeros[i] = {};
}

template <typename T>
const char* preprocess(const Backward& a, Stream stream) {
  const RelAttention& p = a.call.p;
  const int64_t keys = p.mem_len + p.key_len;
  const int heads = int(p.heads), all_heads = int(p.batch) * heads;
  const auto parts = [](int64_t count, int64_t size) { return int((count + size - 1) / size); };
  Preprocess preprocess{a, 0, 0, 0, 0, 0, 0, 0};
  if (p.rank_mask.query_rank || p.segments.key_ids) preprocess.key_tiles = int(p.batch) * parts(keys, BOUNDS_TILE);
  if (p.rank_mask.query_rank) preprocess.row_tiles = int(p.batch) * parts(p.length, BOUNDS_TILE);
  if (a.call.workspace.unread_keys)
    preprocess.unread_items = int(p.batch) * a.call.mask_heads * a.call.key_words;
  if (a.call.workspace.key_bias) preprocess.key_items = all_heads * parts(keys, ROWS_AT_ONCE);
  preprocess.rel_items = (a.call.shared_rel_key ? heads : all_heads) * parts(p.rel_len, ROWS_AT_ONCE);
  if (a.gradients.row_values) preprocess.row_items = all_heads * parts(p.length, ROWS_AT_ONCE);
  preprocess.zero_items = parts(a.gradients.sums.zeros.chunks, ZERO_CHUNKS);
  const int warps = preprocess.key_tiles + preprocess.row_tiles + preprocess.unread_items + preprocess.key_items +
                    preprocess.rel_items + preprocess.row_items + preprocess.zero_items;
  if (warps == 0) return nullptr;
  const Index grid{parts(warps, PREPROCESS_THREADS / WARP), 1, 1};
  return launch(preprocess_kernel<T>, grid, PREPROCESS_THREADS, 0, stream, preprocess);
}

// Before forward.
template <typename T>
const char* preprocess(const Call& call, Stream stream) {
  return preprocess<T>(Backward{call, {}}, stream);
}

}  // namespace xlnet_kernels::cuda
