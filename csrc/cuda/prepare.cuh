// What both passes need first: bounds of tiles, and u.k and v.r of every key and row of rel_key.
#pragma once

#include "scheduler.cuh"

namespace xlnet_kernels::cuda {

constexpr int PREPARE_THREADS = 128;

// bias . row, of `head_dim` elements
template <typename T>
DEVICE float bias_product(const T* bias, const T* row, int head_dim) {
  float sum = 0;
  for (int d = 0; d < head_dim; ++d) sum += to_float(bias[d]) * to_float(row[d]);
  return sum;
}

DEVICE void bound_keys(const Call& call, int tile, int lane) {
  const RelAttention& p = call.p;
  const int keys = int(p.mem_len + p.key_len), tiles = tiles_of(keys, BOUNDS_TILE), b = tile / tiles;
  KeyBounds bounds{HIGHEST, LOWEST};
  for (int k = lane; k < BOUNDS_TILE; k += WARP) {
    const int j = tile % tiles * BOUNDS_TILE + k;
    if (j >= keys) break;
    const int32_t rank = p.rank_mask.key_rank[int64_t(b) * keys + j];
    bounds = {smaller(bounds.min_rank, rank), larger(bounds.max_rank, rank)};
  }
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

// Warps take tiles of keys, tiles of rows, then 32 products at a time.
template <typename T>
KERNEL THREADS_PER_BLOCK(PREPARE_THREADS, 1) prepare_kernel(Call call) {
  const RelAttention& p = call.p;
  const Workspace& w = call.workspace;
  const int lane = thread_index() % WARP, head_dim = int(p.head_dim), heads = int(p.heads);
  const int64_t keys = p.mem_len + p.key_len;
  const int64_t key_tiles = p.rank_mask.query_rank ? p.batch * tiles_of(keys, BOUNDS_TILE) : 0;
  const int64_t row_tiles = p.rank_mask.query_rank ? p.batch * tiles_of(p.length, BOUNDS_TILE) : 0;
  const int64_t key_products = w.key_bias ? p.batch * heads * keys : 0;
  const int64_t rel_products = (call.shared_rel_key ? 1 : p.batch) * heads * p.rel_len;

  int64_t item = int64_t(block_index().x) * (PREPARE_THREADS / WARP) + thread_index() / WARP;
  if (item < key_tiles) return bound_keys(call, int(item), lane);
  item -= key_tiles;
  if (item < row_tiles) return bound_rows(call, int(item), lane);
  item = (item - row_tiles) * WARP + lane;
  if (item < key_products) {
    const int64_t j = item % keys, head = item / keys, b = head / heads, h = head % heads;
    const T* row = key_rows_of<const T>(p, p.memory.key, p.keys.key, int(b), int(h))(int(j));
    w.key_bias[item] = bias_product(static_cast<const T*>(p.content_bias) + h * head_dim, row, head_dim);
    return;
  }
  item -= key_products;
  if (item < rel_products) {
    const int64_t r = item % p.rel_len, head = item / p.rel_len, b = head / heads, h = head % heads;
    const T* row = rows_of<const T>(p.rel_key.rows, int(b), int(h))(int(r));
    const T* bias = static_cast<const T*>(p.position_bias) + h * head_dim;
    w.rel_bias[head * call.rel_bias_rows + r] = p.position_bias ? bias_product(bias, row, head_dim) : 0.f;
  }
}

template <typename T>
const char* prepare(const Call& call, Stream stream) {
  const RelAttention& p = call.p;
  const Workspace& w = call.workspace;
  const int64_t keys = p.mem_len + p.key_len;
  int64_t warps = 0, products = 0;
  if (p.rank_mask.query_rank)
    warps += p.batch * ((keys + BOUNDS_TILE - 1) / BOUNDS_TILE + (p.length + BOUNDS_TILE - 1) / BOUNDS_TILE);
  if (w.key_bias) products += p.batch * p.heads * keys;
  products += (call.shared_rel_key ? 1 : p.batch) * p.heads * p.rel_len;
  warps += (products + WARP - 1) / WARP;
  if (warps == 0) return nullptr;
  constexpr int PER_BLOCK = PREPARE_THREADS / WARP;
  return launch(prepare_kernel<T>, {int((warps + PER_BLOCK - 1) / PER_BLOCK), 1, 1}, PREPARE_THREADS, 0, stream, call);
}

}  // namespace xlnet_kernels::cuda
