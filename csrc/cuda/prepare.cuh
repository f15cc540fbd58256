// What both passes need first: labels of tiles, and u.k and v.r of every key and row of rel_key.
#pragma once

#include "labels.cuh"
#include "rows.cuh"

namespace xlnet_kernels::cuda {

constexpr int PREPARE_THREADS = 128;

// bias . row, of `width` elements
template <typename T>
DEVICE float bias_product(const T* bias, const T* row, int width) {
  float sum = 0;
  for (int d = 0; d < width; ++d) sum += to_float(bias[d]) * to_float(row[d]);
  return sum;
}

DEVICE void label_keys(const Call& call, int tile, int lane) {
  const RelAttention& p = call.p;
  const int keys = int(p.mem_len + p.key_len), tiles = tiles_of(keys, LABEL_TILE), b = tile / tiles;
  KeyLabels labels{HIGHEST, LOWEST};
  for (int k = lane; k < LABEL_TILE; k += WARP) {
    const int j = tile % tiles * LABEL_TILE + k;
    if (j >= keys) break;
    const int32_t rank = p.rank_mask.key_rank[int64_t(b) * keys + j];
    labels = {smaller(labels.least_rank, rank), larger(labels.largest_rank, rank)};
  }
  labels = {least_of_warp(labels.least_rank), largest_of_warp(labels.largest_rank)};
  if (lane == 0) call.workspace.key_labels[tile] = labels;
}

DEVICE void label_rows(const Call& call, int tile, int lane) {
  const RelAttention& p = call.p;
  const int tiles = tiles_of(p.length, LABEL_TILE), b = tile / tiles;
  RowLabels labels{HIGHEST, LOWEST, HIGHEST, LOWEST, 0};
  for (int k = lane; k < LABEL_TILE; k += WARP) {
    const int place = tile % tiles * LABEL_TILE + k;
    if (place >= p.length) break;
    const Row row = load_row(p, b, place);
    labels = merged(labels, {row.rank, row.rank, row.floor, row.floor, row.own_key >= 0});
  }
  labels = {least_of_warp(labels.least_rank), largest_of_warp(labels.largest_rank), least_of_warp(labels.least_floor),
            largest_of_warp(labels.largest_floor), largest_of_warp(labels.any_sees_self)};
  if (lane == 0) call.workspace.row_labels[tile] = labels;
}

// Warps take tiles of keys, tiles of rows, then 32 products at a time.
template <typename T>
KERNEL THREADS_PER_BLOCK(PREPARE_THREADS, 1) prepare_kernel(Call call) {
  const RelAttention& p = call.p;
  const Workspace& w = call.workspace;
  const int lane = thread_index() % WARP, width = int(p.head_dim), heads = int(p.heads);
  const int64_t keys = p.mem_len + p.key_len;
  const int64_t key_tiles = p.rank_mask.query_rank ? p.batch * tiles_of(keys, LABEL_TILE) : 0;
  const int64_t row_tiles = p.rank_mask.query_rank ? p.batch * tiles_of(p.length, LABEL_TILE) : 0;
  const int64_t key_products = w.key_bias ? p.batch * heads * keys : 0;
  const int64_t rel_products = (call.shared_rel_key ? 1 : p.batch) * heads * p.rel_len;

  int64_t item = int64_t(block_index().x) * (PREPARE_THREADS / WARP) + thread_index() / WARP;
  if (item < key_tiles) return label_keys(call, int(item), lane);
  item -= key_tiles;
  if (item < row_tiles) return label_rows(call, int(item), lane);
  item = (item - row_tiles) * WARP + lane;
  if (item < key_products) {
    const int64_t j = item % keys, head = item / keys, b = head / heads, h = head % heads;
    const T* row = key_rows_of<const T>(p, p.memory.key, p.keys.key, int(b), int(h))(int(j));
    w.key_bias[item] = bias_product(static_cast<const T*>(p.content_bias) + h * width, row, width);
    return;
  }
  item -= key_products;
  if (item < rel_products) {
    const int64_t r = item % p.rel_len, head = item / p.rel_len, b = head / heads, h = head % heads;
    const T* row = rows_of<const T>(p.rel_key.rows, int(b), int(h))(int(r));
    const T* bias = static_cast<const T*>(p.position_bias) + h * width;
    w.rel_bias[head * call.rel_bias_rows + r] = p.position_bias ? bias_product(bias, row, width) : 0.f;
  }
}

template <typename T>
const char* prepare(const Call& call, Stream stream) {
  const RelAttention& p = call.p;
  const Workspace& w = call.workspace;
  const int64_t keys = p.mem_len + p.key_len;
  int64_t warps = 0, products = 0;
  if (p.rank_mask.query_rank)
    warps += p.batch * ((keys + LABEL_TILE - 1) / LABEL_TILE + (p.length + LABEL_TILE - 1) / LABEL_TILE);
  if (w.key_bias) products += p.batch * p.heads * keys;
  products += (call.shared_rel_key ? 1 : p.batch) * p.heads * p.rel_len;
  warps += (products + WARP - 1) / WARP;
  if (warps == 0) return nullptr;
  constexpr int PER_BLOCK = PREPARE_THREADS / WARP;
  return launch(prepare_kernel<T>, {int((warps + PER_BLOCK - 1) / PER_BLOCK), 1, 1}, PREPARE_THREADS, 0, stream, call);
}

}  // namespace xlnet_kernels::cuda
