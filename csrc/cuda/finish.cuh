// After backward's main loop: every gradient that is made of sums, in its own dtype and layout.
//
//   dQ = scale (sum + same s[0] + different s[1]);  dR = scale (sum + rel v)
//   du = scale sum_j key_j k_j;  dv = scale sum_p rel_p r_p
//   ds[0], ds[1] = scale sum_i {same, different}_i (q_i + b);  db = scale (sum_i same_i s[0] + sum_i different_i s[1])
//
// where same_i = dlse_i - different_i, since softmax's gradients add up to zero but for what comes through the
// log-sum-exp.
#pragma once

#include "backward_rows.cuh"

namespace xlnet_kernels::cuda {

constexpr int FINISH_THREADS = 256, FINISH_WARPS = FINISH_THREADS / WARP;
constexpr int COLUMN_BYTES = 32;  // of a row, for one block of a sum over rows

// Blocks in this order; rows by warps, ROWS_AT_ONCE of one head each. `parts`: of a row, COLUMN_BYTES each.
struct Finish {
  Backward a;
  int key_blocks, rel_blocks, segment_blocks, parts, query_items, rel_items;
};

// What the segment term's two embeddings are multiplied with in a row's gradient, but for the scale.
struct SegmentWeights {
  float same = 0, different = 0;
};
DEVICE SegmentWeights segment_weights(const Backward& a, int64_t row) {
  const RelAttention& p = a.call.p;
  const Gradients& grad = a.gradients;
  const int64_t all_rows = p.batch * p.heads * p.length;
  const bool is_masked = grad.row_values[INVERSE * all_rows + row] == 0;
  SegmentWeights of;
  of.different = grad.sums.different[row];
  of.same = (grad.lse && !is_masked ? grad.lse[row] : 0.f) - of.different;
  return of;
}

// Adds a chunk's numbers.
template <typename T>
DEVICE void add_sums(const float* from, float (&x)[CHUNK<T>]) {
#pragma unroll
  for (int d = 0; d < CHUNK<T>; d += 4) {
    float more[4];
    load_chunk(from + d, more);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[d + i] += more[i];
  }
}

// The chunk from `column` on of a row of `width` columns.
template <typename T>
DEVICE void store_columns(T* row, int column, int width, const float (&x)[CHUNK<T>]) {
  if (width % CHUNK<T> == 0) return store_chunk(row + column, x);
#pragma unroll
  for (int d = 0; d < CHUNK<T>; ++d)
    if (column + d < width) store_one(row + column + d, x[d]);
}

template <typename T>
DEVICE void finish_query(const Backward& a, int head, int first) {
  const RelAttention& p = a.call.p;
  const Gradients& grad = a.gradients;
  const int head_dim = int(p.head_dim), b = head / int(p.heads), h = head % int(p.heads);
  const int64_t first_row = head * p.length;
  const auto to = rows_of<T>(grad.query, b, h);
  const RowLanes<T> lanes(head_dim);
  const bool has_segments = p.segments.embed != nullptr;
  float same[CHUNK<T>] = {}, different[CHUNK<T>] = {};
  if (has_segments && lanes.inside) {
    const SegmentEmbed<T> embed(p, h);
    load_chunk(embed.same + lanes.column, same);
    load_chunk(embed.different + lanes.column, different);
  }
  lanes.for_each(first, int(p.length), [&](int i, bool inside) {
    if (!inside || !lanes.inside) return;
    float x[CHUNK<T>] = {};
    add_sums<T>(grad.sums.query + (first_row + i) * head_dim + lanes.column, x);
    const SegmentWeights weights = has_segments ? segment_weights(a, first_row + i) : SegmentWeights{};
#pragma unroll
    for (int d = 0; d < CHUNK<T>; ++d)
      x[d] = (x[d] + weights.same * same[d] + weights.different * different[d]) * float(p.scale);
    store_columns(to(i), lanes.column, int(grad.width), x);
  });
}

// `group`: the head, of all batches unless they share rel_key. Batches that do may have sums of their own.
template <typename T>
DEVICE void finish_rel_key(const Backward& a, int group, int first) {
  const RelAttention& p = a.call.p;
  const Gradients& grad = a.gradients;
  const int head_dim = int(p.head_dim), b = group / int(p.heads), h = group % int(p.heads);
  const int batches = a.call.shared_rel_key ? int(grad.sums.rel_batches) : 1;
  const auto to = rows_of<T>(grad.rel_key, b, h);
  const RowLanes<T> lanes(head_dim);
  float bias[CHUNK<T>] = {};
  if (p.position_bias && lanes.inside)
    load_chunk(static_cast<const T*>(p.position_bias) + h * head_dim + lanes.column, bias);
  lanes.for_each(first, int(p.rel_len), [&](int r, bool inside) {
    if (!inside || !lanes.inside) return;
    float x[CHUNK<T>] = {}, sum = 0;
    for (int batch = 0; batch < batches; ++batch) {
      const int64_t row = (batch * p.heads + group) * p.rel_len + r;
      add_sums<T>(grad.sums.rel_key + row * head_dim + lanes.column, x);
      if (p.position_bias) sum += grad.sums.rel[row];
    }
#pragma unroll
    for (int d = 0; d < CHUNK<T>; ++d) x[d] = (x[d] + sum * bias[d]) * float(p.scale);
    store_columns(to(r), lanes.column, int(grad.width), x);
  });
}

// A block's sums over rows of one head, each row times two weights: of COLUMN_BYTES of columns, and of the weights.
template <typename T>
struct RowSums {
  static constexpr int ROWS = FINISH_THREADS * 16 / COLUMN_BYTES, COLUMNS = COLUMN_BYTES / sizeof(T);
  int row, column;  // this thread's first row, of each ROWS, and first column
  bool inside;
  float sums[2][CHUNK<T>] = {}, totals[2] = {};

  DEVICE RowSums(int part, int head_dim)
      : row(thread_index() * 16 / COLUMN_BYTES),
        column(part * COLUMNS + thread_index() % (COLUMN_BYTES / 16) * CHUNK<T>),
        inside(column < head_dim) {}

  // A row without weight may hold anything.
  DEVICE void add(const T* of_row, float first, float second) {
    const bool counts = first != 0 || second != 0;
    float x[CHUNK<T>];
    load_chunk(of_row + column, x);
#pragma unroll
    for (int d = 0; d < CHUNK<T>; ++d) {
      x[d] = counts ? x[d] : 0.f;
      sums[0][d] += first * x[d];
      sums[1][d] += second * x[d];
    }
    totals[0] += first;
    totals[1] += second;
  }

  // Leaves the block's sums in the first threads of a row each, in the order of columns; scratch: in shared memory.
  DEVICE void merge(float* scratch) {
    constexpr int VALUES = 2 * CHUNK<T> + 2, APART = COLUMN_BYTES / 16;
    float values[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      values[i] = i < 2 * CHUNK<T> ? sums[i / CHUNK<T>][i % CHUNK<T>] : totals[i - 2 * CHUNK<T>];
      for (int step = APART; step < WARP; step *= 2) values[i] += shuffle_xor(values[i], step);
    }
    const int lane = thread_index() % WARP, warp = thread_index() / WARP;
    if (lane < APART)
      for (int i = 0; i < VALUES; ++i) scratch[(warp * APART + lane) * VALUES + i] = values[i];
    sync_block();
    if (thread_index() >= APART) return;
    for (int i = 0; i < VALUES; ++i) {
      float sum = 0;
      for (int of = 0; of < FINISH_WARPS; ++of) sum += scratch[(of * APART + lane) * VALUES + i];
      (i < 2 * CHUNK<T> ? sums[i / CHUNK<T>][i % CHUNK<T>] : totals[i - 2 * CHUNK<T>]) = sum;
    }
  }

  // Whether this thread has, after `merge`, what is to be stored.
  DEVICE bool stores() const { return thread_index() < COLUMN_BYTES / 16 && inside; }
};
template <typename T>
constexpr int ROW_SUMS_BYTES = FINISH_WARPS * (COLUMN_BYTES / 16) * (2 * CHUNK<T> + 2) * 4;

// The gradient of content_bias from sums over keys, of position_bias from sums over rows of rel_key.
template <typename T>
DEVICE void finish_bias(const Backward& a, int h, int part, bool of_content) {
  const RelAttention& p = a.call.p;
  const Gradients& grad = a.gradients;
  const int heads = int(p.heads), keys = int(p.mem_len + p.key_len);
  RowSums<T> sums(part, int(p.head_dim));
  if (of_content) {
    for (int b = 0; b < p.batch && sums.inside; ++b) {
      const auto rows = key_rows_of<const T>(p, p.memory.key, p.keys.key, b, h);
      const float* const weights = grad.sums.key + (int64_t(b) * heads + h) * keys;
#pragma unroll 4
      for (int j = sums.row; j < keys; j += sums.ROWS) sums.add(rows(j), weights[j], 0);
    }
  } else {
    for (int b = 0; b < grad.sums.rel_batches && sums.inside; ++b) {
      const auto rows = rows_of<const T>(p.rel_key.rows, b, h);
      const float* const weights = grad.sums.rel + (int64_t(b) * heads + h) * p.rel_len;
#pragma unroll 4
      for (int r = sums.row; r < p.rel_len; r += sums.ROWS) sums.add(rows(r), weights[r], 0);
    }
  }
  sums.merge(reinterpret_cast<float*>(shared_memory()));
  if (!sums.stores()) return;
#pragma unroll
  for (int d = 0; d < CHUNK<T>; ++d) sums.sums[0][d] *= float(p.scale);
  T* const to = static_cast<T*>(of_content ? grad.content_bias : grad.position_bias);
  store_columns(to + h * grad.width, sums.column, int(grad.width), sums.sums[0]);
}

template <typename T>
DEVICE void finish_segments(const Backward& a, int h, int part) {
  const RelAttention& p = a.call.p;
  const Gradients& grad = a.gradients;
  const int heads = int(p.heads);
  RowSums<T> sums(part, int(p.head_dim));
  for (int b = 0; b < p.batch && sums.inside; ++b) {
    const auto rows = rows_of<const T>(p.rows.query, b, h);
    const int64_t first_row = (int64_t(b) * heads + h) * p.length;
#pragma unroll 4
    for (int i = sums.row; i < p.length; i += sums.ROWS) {
      const SegmentWeights weights = segment_weights(a, first_row + i);
      sums.add(rows(i), weights.same, weights.different);
    }
  }
  sums.merge(reinterpret_cast<float*>(shared_memory()));
  if (!sums.stores()) return;
  const SegmentEmbed<T> embed(p, h);
  float bias[CHUNK<T>] = {}, embeds[2][CHUNK<T>], of_bias[CHUNK<T>];
  if (embed.bias) load_chunk(embed.bias + sums.column, bias);
  load_chunk(embed.same + sums.column, embeds[0]);
  load_chunk(embed.different + sums.column, embeds[1]);
  const float scale = float(p.scale);
#pragma unroll
  for (int d = 0; d < CHUNK<T>; ++d) {
    of_bias[d] = (sums.totals[0] * embeds[0][d] + sums.totals[1] * embeds[1][d]) * scale;
    for (int kind = 0; kind < 2; ++kind)
      sums.sums[kind][d] = (sums.sums[kind][d] + sums.totals[kind] * bias[d]) * scale;
  }
  const auto store = [&](void* gradient, int64_t head, const float (&x)[CHUNK<T>]) {
    if (gradient) store_columns(static_cast<T*>(gradient) + head * grad.width, sums.column, int(grad.width), x);
  };
  store(grad.segment_embed, h, sums.sums[0]);
  store(grad.segment_embed, heads + h, sums.sums[1]);
  store(grad.segment_bias, h, of_bias);
}

template <typename T>
KERNEL THREADS_PER_BLOCK(FINISH_THREADS, 1) finish_kernel(Finish of) {
  const Backward& a = of.a;
  int block = block_index().x;
  if (block < of.key_blocks) return finish_bias<T>(a, block / of.parts, block % of.parts, true);
  block -= of.key_blocks;
  if (block < of.rel_blocks) return finish_bias<T>(a, block / of.parts, block % of.parts, false);
  block -= of.rel_blocks;
  if (block < of.segment_blocks) return finish_segments<T>(a, block / of.parts, block % of.parts);
  int item = (block - of.segment_blocks) * FINISH_WARPS + thread_index() / WARP;
  if (item < of.query_items) {
    const auto [head, first] = head_item(item, int(a.call.p.length));
    return finish_query<T>(a, head, first);
  }
  item -= of.query_items;
  if (item >= of.rel_items) return;
  const auto [group, first] = head_item(item, int(a.call.p.rel_len));
  finish_rel_key<T>(a, group, first);
}

template <typename T>
const char* finish(const Backward& a, Stream stream) {
  const RelAttention& p = a.call.p;
  const Gradients& grad = a.gradients;
  const auto parts = [](int64_t count, int64_t size) { return int((count + size - 1) / size); };
  Finish of{a, 0, 0, 0, parts(p.head_dim * sizeof(T), COLUMN_BYTES), 0, 0};
  const int blocks = int(p.heads) * of.parts;
  if (grad.content_bias) of.key_blocks = blocks;
  if (grad.position_bias) of.rel_blocks = blocks;
  if (grad.segment_embed || grad.segment_bias) of.segment_blocks = blocks;
  const int64_t all_heads = p.batch * p.heads;
  if (grad.query.data) of.query_items = int(all_heads * parts(p.length, ROWS_AT_ONCE));
  if (grad.rel_key.data)
    of.rel_items = int((a.call.shared_rel_key ? p.heads : all_heads) * parts(p.rel_len, ROWS_AT_ONCE));
  const int grid =
      of.key_blocks + of.rel_blocks + of.segment_blocks + parts(of.query_items + of.rel_items, FINISH_WARPS);
  if (grid == 0) return nullptr;
  return launch(finish_kernel<T>, {grid, 1, 1}, FINISH_THREADS, ROW_SUMS_BYTES<T>, stream, of);
}

}  // namespace xlnet_kernels::cuda
