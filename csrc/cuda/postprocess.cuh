// After backward's main loop: every gradient that is made of sums, in its own dtype and layout.
//
//   dQ = scale (sum + same s[0] + different s[1]);  dR = scale (sum + rel v)
//   du = scale sum_j key_j k_j;  dv = scale sum_p rel_p r_p
//   ds[0], ds[1] = scale sum_i {same, different}_i (q_i + b);  db = scale (sum_i same_i s[0] + sum_i different_i s[1])
//
// where same_i = dlse_i - different_i, since softmax's gradients add up to zero but for what comes through the
// log-sum-exp. Of sums over keys, rows of query and rows of rel_key a block leaves its part in global memory; the last
// one of a head adds the parts up in their order. dv is also the sum of all rows of dQ less du, which would spare
// reading r; but it would be off by a share of du, which may be far larger.
#pragma once

#include "row_statistics.cuh"

namespace xlnet_kernels::cuda {

constexpr int POSTPROCESS_THREADS = POSTPROCESS_ROWS, POSTPROCESS_WARPS = POSTPROCESS_THREADS / WARP;
static_assert(POSTPROCESS_ROWS == POSTPROCESS_WARPS * ROWS_AT_ONCE);

// Blocks with POSTPROCESS_ROWS of one head each: these, and then rows of rel_key.
struct Postprocess {
  Backward a;
  int key_blocks, query_blocks;
};

// A warp goes through its rows in as many passes at a time as hide how long a load takes.
constexpr int POSTPROCESS_PASSES = 4;
using Columns = RowLanes<FOUR, POSTPROCESS_PASSES>;

DEVICE float* postprocess_scratch() { return reinterpret_cast<float*>(shared_memory()); }
constexpr int MOST_COLUMNS = 128, POSTPROCESS_SCRATCH = 4 * POSTPROCESS_WARPS * QUERY_PARTS * MOST_COLUMNS;

// POSTPROCESS_ROWS of one head: heads one after the other, of each all batches.
struct HeadPart {
  int h, b, number, first;  // the number-th part of the head, and this warp's first row

  DEVICE HeadPart(int block, int batch, int64_t rows) {
    const int parts = tiles_of(rows, POSTPROCESS_ROWS), head = block / parts;
    h = head / batch;
    b = head - h * batch;
    number = block - h * batch * parts;
    first = (block - head * parts) * POSTPROCESS_ROWS + thread_index() / WARP * ROWS_AT_ONCE;
  }
};

// FOUR columns, from `column` on, of a row of `width`; all may be padding, which the caller's tensor does not have.
template <typename T>
DEVICE void store_columns(T* row, int column, int width, const float (&x)[FOUR]) {
  if (column >= width) return;
  if (width % FOUR == 0) return store_four(row, x);
#pragma unroll
  for (int d = 0; d < FOUR; ++d)
    if (column + d < width) store_one(row + d, x[d]);
}

// sum += weight row, where a row without weight may hold anything.
template <typename T>
DEVICE void add_weighted(float (&sum)[FOUR], float weight, const Four<T>& row) {
  float x[FOUR];
  unpack_four<T>(row, x);
#pragma unroll
  for (int d = 0; d < FOUR; ++d) sum[d] += weight * (weight != 0 ? x[d] : 0.f);
}

// The block's sums of COUNT kinds over its rows, to as many rows of head_dim columns: lanes', then warps', in order.
template <int COUNT>
DEVICE void store_part(const Columns& lanes, int head_dim, float (&sums)[COUNT][FOUR], float* to) {
  float* const scratch = postprocess_scratch();
  const int values = COUNT * head_dim, warp = thread_index() / WARP;
  for (int step = 1 << lanes.bits; step < WARP; step *= 2)
#pragma unroll
    for (int i = 0; i < COUNT * FOUR; ++i) sums[i / FOUR][i % FOUR] += shuffle_xor(sums[i / FOUR][i % FOUR], step);
  if (lanes.row == 0 && lanes.inside)
#pragma unroll
    for (int kind = 0; kind < COUNT; ++kind)
      store_four(scratch + warp * values + kind * head_dim + lanes.column, sums[kind]);
  sync_block();
  for (int i = thread_index(); i < values; i += POSTPROCESS_THREADS) {
    float sum = 0;
#pragma unroll
    for (int of = 0; of < POSTPROCESS_WARPS; ++of) sum += scratch[of * values + i];
    to[i] = sum;
  }
}

template <typename T>
DEVICE void postprocess_keys(const Backward& a, const HeadPart& part) {
  const RelAttention& p = a.call.p;
  const int head_dim = int(p.head_dim), keys = int(p.mem_len + p.key_len);
  const float* const weights = a.gradients.sums.key + (int64_t(part.b) * p.heads + part.h) * keys + part.first;
  const auto rows = key_rows_of<const T>(p, p.memory.key, p.keys.key, part.b, part.h);
  const Columns lanes(head_dim);
  const float own_weight = part.first + lanes.lane < keys ? weights[lanes.lane] : 0.f;
  float sums[1][FOUR] = {};
  lanes.for_each([&](int base) {
    Four<T> key[POSTPROCESS_PASSES] = {};
#pragma unroll
    for (int i = 0; i < POSTPROCESS_PASSES; ++i) {
      const int j = part.first + base + i * lanes.rows + lanes.row;
      if (j < keys && lanes.inside) key[i] = load_four(rows(j) + lanes.column);
    }
#pragma unroll
    for (int i = 0; i < POSTPROCESS_PASSES; ++i)
      add_weighted<T>(sums[0], lanes.of_row(own_weight, base + i * lanes.rows), key[i]);
  });
  const int64_t before = int64_t(part.h) * p.batch * tiles_of(keys, POSTPROCESS_ROWS) + part.number;
  store_part(lanes, head_dim, sums, a.gradients.sums.key_parts + before * head_dim);
}

template <typename T>
DEVICE void postprocess_query(const Backward& a, const HeadPart& part) {
  const RelAttention& p = a.call.p;
  const Gradients& grad = a.gradients;
  const int head_dim = int(p.head_dim), length = int(p.length);
  const int64_t first_row = (int64_t(part.b) * p.heads + part.h) * length, all_rows = p.batch * p.heads * length;
  const bool has_segments = p.segments.embed != nullptr, sums_segments = grad.segment_embed || grad.segment_bias;
  const bool stores = grad.query.data != nullptr, has_lse = grad.lse != nullptr;
  const float scale = float(p.scale);
  const Columns lanes(head_dim);
  RowWalk<const T> queries(rows_of<const T>(p.rows.query, part.b, part.h), part.first, lanes);
  RowWalk<const float> from({grad.sums.query.data + first_row * head_dim, head_dim}, part.first, lanes);
  RowWalk<T> to(rows_of<T>(grad.query, part.b, part.h), part.first, lanes);
  float same[FOUR] = {}, difference[FOUR] = {}, own_different = 0, own_lse = 0;
  const bool own_inside = part.first + lanes.lane < length;
  const float own_inverse = own_inside ? grad.row_values[INVERSE * all_rows + first_row + part.first + lanes.lane] : 0;
  if (has_segments) {
    if (lanes.inside) {
      const SegmentEmbed<T> embed(p, part.h);
      unpack_four<T>(load_four(embed.same + lanes.column), same);
      unpack_four<T>(load_four(embed.different + lanes.column), difference);
#pragma unroll
      for (int d = 0; d < FOUR; ++d) difference[d] = (difference[d] - same[d]) * scale, same[d] *= scale;
    }
    const int64_t row = first_row + part.first + lanes.lane;
    if (own_inside) {
      own_different = grad.sums.different.data[row];
      if (has_lse && own_inverse != 0) own_lse = grad.lse[row];
    }
  }
  float sums[QUERY_PARTS][FOUR] = {};
  lanes.for_each([&](int base) {
    Four<float> sum[POSTPROCESS_PASSES] = {};
    Four<T> query[POSTPROCESS_PASSES] = {};
    T* rows[POSTPROCESS_PASSES];
    bool inside[POSTPROCESS_PASSES];
#pragma unroll
    for (int i = 0; i < POSTPROCESS_PASSES; ++i) {
      const float* const from_sum = from.next();
      const T* const from_query = queries.next();
      rows[i] = to.next();
      inside[i] = part.first + base + i * lanes.rows + lanes.row < length && lanes.inside;
      if (inside[i]) sum[i] = load_four(from_sum);
      if (inside[i] && sums_segments) query[i] = load_four(from_query);
    }
#pragma unroll
    for (int i = 0; i < POSTPROCESS_PASSES; ++i) {
      const float different = lanes.of_row(own_different, base + i * lanes.rows);
      add_weighted<T>(sums[DIFFERENT_PART], different, query[i]);
      float x[FOUR];
      unpack_four<float>(sum[i], x);
#pragma unroll
      for (int d = 0; d < FOUR; ++d) x[d] = x[d] * scale + different * difference[d];
      if (lanes.of_row(own_inverse, base + i * lanes.rows) == 0)  // fully masked: zero times NaN may be in the sum
#pragma unroll
        for (int d = 0; d < FOUR; ++d) x[d] = 0;
      if (has_lse) {
        const float of_lse = lanes.of_row(own_lse, base + i * lanes.rows);
        add_weighted<T>(sums[LSE_PART], of_lse, query[i]);
#pragma unroll
        for (int d = 0; d < FOUR; ++d) x[d] += of_lse * same[d];
      }
      if (inside[i] && stores) store_columns(rows[i], lanes.column, int(grad.width), x);
    }
  });
  if (grad.sums.query_parts == nullptr) return;
  const float different_sum = warp_sum(own_different), lse_sum = warp_sum(own_lse);
  if (lanes.lane == 0) sums[WEIGHT_PART][0] = different_sum, sums[WEIGHT_PART][1] = lse_sum;
  const int64_t before = int64_t(part.h) * p.batch * tiles_of(length, POSTPROCESS_ROWS) + part.number;
  store_part(lanes, head_dim, sums, grad.sums.query_parts + before * QUERY_PARTS * head_dim);
}

// The gradient of rel_key for a head, of all batches unless they share it. Batches that do may have sums of their own.
// With position_bias
// also the part of its gradient, where that is wanted.
template <typename T>
DEVICE void postprocess_rel_key(const Backward& a, const HeadPart& part) {
  const RelAttention& p = a.call.p;
  const Gradients& grad = a.gradients;
  const int head_dim = int(p.head_dim), rel_len = int(p.rel_len);
  const int batches = a.call.shared_rel_key ? int(grad.sums.rel_batches) : 1;
  const float scale = float(p.scale);
  const Columns lanes(head_dim);
  const bool stores = grad.rel_key.data != nullptr, sums_rows = grad.sums.rel_parts != nullptr;
  RowWalk<const T> rel_rows(rows_of<const T>(p.rel_key.rows, part.b, part.h), part.first, lanes);
  RowWalk<T> to(rows_of<T>(grad.rel_key, part.b, part.h), part.first, lanes);
  float bias[FOUR] = {};
  if (p.position_bias && lanes.inside)
    unpack_four<T>(load_four(static_cast<const T*>(p.position_bias) + part.h * head_dim + lanes.column), bias);
  const auto first_row = [&](int batch) { return ((part.b + batch) * p.heads + part.h) * rel_len; };
  float own_sum = 0;
  if (p.position_bias && part.first + lanes.lane < rel_len)
#pragma unroll 1
    for (int batch = 0; batch < batches; ++batch)
      own_sum += grad.sums.rel.data[first_row(batch) + part.first + lanes.lane];
  RowWalk<const float> from({grad.sums.rel_key.data + first_row(0) * head_dim, head_dim}, part.first, lanes);
  float sums[1][FOUR] = {};
  lanes.for_each([&](int base) {
    Four<float> sum[POSTPROCESS_PASSES] = {};
    Four<T> rel[POSTPROCESS_PASSES] = {};
    const float* of[POSTPROCESS_PASSES];
    T* rows[POSTPROCESS_PASSES];
    bool inside[POSTPROCESS_PASSES];
#pragma unroll
    for (int i = 0; i < POSTPROCESS_PASSES; ++i) {
      of[i] = from.next();
      rows[i] = to.next();
      const T* const from_rel = rel_rows.next();
      inside[i] = part.first + base + i * lanes.rows + lanes.row < rel_len && lanes.inside;
      if (inside[i] && stores) sum[i] = load_four(of[i]);
      if (inside[i] && sums_rows) rel[i] = load_four(from_rel);
    }
#pragma unroll
    for (int i = 0; i < POSTPROCESS_PASSES; ++i) {
      const float of_bias = lanes.of_row(own_sum, base + i * lanes.rows);
      add_weighted<T>(sums[0], of_bias, rel[i]);
      float x[FOUR];
      unpack_four<float>(sum[i], x);
#pragma unroll 1
      for (int batch = 1; batch < batches && inside[i] && stores; ++batch) {
        float more[FOUR];
        unpack_four<float>(load_four(of[i] + batch * p.heads * rel_len * head_dim), more);
#pragma unroll
        for (int d = 0; d < FOUR; ++d) x[d] += more[d];
      }
#pragma unroll
      for (int d = 0; d < FOUR; ++d) x[d] = (x[d] + of_bias * bias[d]) * scale;
      if (inside[i] && stores) store_columns(rows[i], lanes.column, int(grad.width), x);
    }
  });
  if (!sums_rows) return;
  const int64_t before = int64_t(part.h) * (a.call.shared_rel_key ? 1 : p.batch) * tiles_of(rel_len, POSTPROCESS_ROWS);
  store_part(lanes, head_dim, sums, grad.sums.rel_parts + (before + part.number) * head_dim);
}

// Adds up the parts of a head, which lie one after the other; all threads of the block.
template <typename T>
DEVICE void postprocess_head(const Backward& a, int h) {
  const RelAttention& p = a.call.p;
  const Gradients& grad = a.gradients;
  const int head_dim = int(p.head_dim), batch = int(p.batch), rel_batch = a.call.shared_rel_key ? 1 : batch;
  constexpr int KEY_PART = QUERY_PARTS, REL_PART = KEY_PART + 1, KINDS = REL_PART + 1;
  constexpr int GROUPS = POSTPROCESS_THREADS / MOST_COLUMNS;
  const int column = thread_index() % MOST_COLUMNS, group = thread_index() / MOST_COLUMNS;
  float* const scratch = postprocess_scratch();
  sync_block();  // all warps have read the previous contents
  const auto add_parts = [&](const float* from, int parts, int kinds, int kind, int to) {
    float sum = 0;
    if (from && column < head_dim) {
      from += (int64_t(h) * parts * kinds + kind) * head_dim + column;
#pragma unroll 4
      for (int i = group; i < parts; i += GROUPS) sum += from[int64_t(i) * kinds * head_dim];
    }
    scratch[(group * KINDS + to) * MOST_COLUMNS + column] = sum;
  };
  for (int kind = 0; kind < QUERY_PARTS; ++kind)
    add_parts(grad.sums.query_parts, batch * tiles_of(p.length, POSTPROCESS_ROWS), QUERY_PARTS, kind, kind);
  add_parts(grad.sums.key_parts, batch * tiles_of(p.mem_len + p.key_len, POSTPROCESS_ROWS), 1, 0, KEY_PART);
  add_parts(grad.sums.rel_parts, rel_batch * tiles_of(p.rel_len, POSTPROCESS_ROWS), 1, 0, REL_PART);
  sync_block();
  if (group > 0 || column >= int(grad.width)) return;
  const auto sum_of = [&](int kind, int column) {
    float sum = 0;
    for (int of = 0; of < GROUPS; ++of) sum += scratch[(of * KINDS + kind) * MOST_COLUMNS + column];
    return sum;
  };
  const float scale = float(p.scale);
  const auto store = [&](void* gradient, int64_t head, float x) {
    if (gradient) store_one(static_cast<T*>(gradient) + head * grad.width + column, x * scale);
  };
  store(grad.content_bias, h, sum_of(KEY_PART, column));
  store(grad.position_bias, h, sum_of(REL_PART, column));
  if (!grad.segment_embed && !grad.segment_bias) return;
  const SegmentEmbed<T> embed(p, h);
  const float bias = embed.bias ? to_float(embed.bias[column]) : 0.f;
  const float different = sum_of(WEIGHT_PART, 0), same = sum_of(WEIGHT_PART, 1) - different;
  const float of_different = sum_of(DIFFERENT_PART, column), of_same = sum_of(LSE_PART, column) - of_different;
  store(grad.segment_embed, h, of_same + same * bias);
  store(grad.segment_embed, p.heads + h, of_different + different * bias);
  store(grad.segment_bias, h, same * to_float(embed.same[column]) + different * to_float(embed.different[column]));
}

// Whether this block is the last one of those that add to the sums of head h; then it sees what the others have stored.
DEVICE bool is_last(const Backward& a, int h, int blocks) {
  int32_t* const before = reinterpret_cast<int32_t*>(shared_memory());
  sync_block();
  if (thread_index() == 0) *before = count_up(a.gradients.sums.finished.data + h);
  sync_block();
  return *before + 1 == blocks;
}

template <typename T>
KERNEL THREADS_PER_BLOCK(POSTPROCESS_THREADS, 1) postprocess_kernel(Postprocess of) {
  const Backward& a = of.a;
  const RelAttention& p = a.call.p;
  const int batch = int(p.batch), block = block_index().x;
  const int of_query = block - of.key_blocks, of_rel = of_query - of.query_blocks;  // numbers among those, or negative
  const HeadPart part = of_query < 0 ? HeadPart(block, batch, p.mem_len + p.key_len)
                        : of_rel < 0 ? HeadPart(of_query, batch, p.length)
                                     : HeadPart(of_rel, a.call.shared_rel_key ? 1 : batch, p.rel_len);
  if (of_query < 0)
    postprocess_keys<T>(a, part);
  else if (of_rel < 0)
    postprocess_query<T>(a, part);
  else
    postprocess_rel_key<T>(a, part);
  if (a.gradients.sums.finished.data && is_last(a, part.h, grid_size().x / int(p.heads)))
    postprocess_head<T>(a, part.h);
}

template <typename T>
const char* postprocess(const Backward& a, Stream stream) {
  const RelAttention& p = a.call.p;
  const Gradients& grad = a.gradients;
  const auto blocks = [](int64_t heads, int64_t rows) {
    return int(heads * ((rows + POSTPROCESS_ROWS - 1) / POSTPROCESS_ROWS));
  };
  const int64_t all_heads = p.batch * p.heads, rel_heads = a.call.shared_rel_key ? p.heads : all_heads;
  Postprocess of{a, 0, 0};
  if (grad.sums.key_parts) of.key_blocks = blocks(all_heads, p.mem_len + p.key_len);
  if (grad.query.data || grad.sums.query_parts) of.query_blocks = blocks(all_heads, p.length);
  const int rel_blocks = grad.rel_key.data || grad.sums.rel_parts ? blocks(rel_heads, p.rel_len) : 0;
  const int grid = of.key_blocks + of.query_blocks + rel_blocks;
  if (grid == 0) return nullptr;
  return launch(postprocess_kernel<T>, {grid, 1, 1}, POSTPROCESS_THREADS, POSTPROCESS_SCRATCH, stream, of);
}

}  // namespace xlnet_kernels::cuda
