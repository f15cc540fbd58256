// The operator's call as every compiled backend takes it: plain pointers, sizes and strides, grouped by the terms of
// the score. Names and meaning follow xlnet_kernels/functional.py. No torch here.
#pragma once

#include <cstdint>

namespace xlnet_kernels {

enum class DType { float32, float64, bfloat16, float16 };

// (B, H, rows, D), strides in elements; a stride of 0 repeats.
struct Tensor4 {
  void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
};

struct Rows {
  Tensor4 query;
  const int32_t* order;     // (B, L), rows by ascending position; null: row i at position i
  const int32_t* position;  // (B, L), position of order's rows
};

// Keys and values of the current segment (K) or of the memory before it (M)
struct Keys {
  Tensor4 key, value;
};

struct RelKey {
  Tensor4 rows;  // (B, H, P, D)
  int64_t max_distance;
};

struct Segments {
  const void *embed, *bias;            // storage, (2, H, D) and (H, D) or null
  const int32_t *query_ids, *key_ids;  // (B, L) and (B, M + K); null: no segments
};

struct RankMask {
  const int32_t *query_rank, *key_rank;  // (B, L) and (B, M + K); null: no RankMask
  const int32_t* query_floor;            // (B, L) or null
  const bool* sees_self;                 // (B, L) or null
};

struct Dropout {
  double p = 0;
  uint32_t threshold = 0;          // p in units of 2^-32; 0: no dropout
  const int64_t* state = nullptr;  // seed and offset, where the tensors are
  double kept_scale = 1;           // 1 / (1 - p)

  Dropout() = default;
  Dropout(double p, const int64_t* state)
      : p(p),
        threshold(p * 4294967296.0 >= 4294967295.0 ? 4294967295u : static_cast<uint32_t>(p * 4294967296.0)),
        state(state),
        kept_scale(1 / (1 - p)) {}
};

struct RelAttention {
  DType dtype;            // of the tensors marked "storage"; float32 work for 16-bit storage
  int operand_parts = 0;  // bfloat16 numbers that may be an operand of float32 products, 1 or 2; 0: none. CPU only
  int64_t batch, heads, length, key_len, mem_len, rel_len, head_dim;  // B, H, L, K, M, P, D
  double scale;

  Rows rows;  // storage, like the next two
  Keys keys, memory;
  RelKey rel_key;
  const void *content_bias, *position_bias;  // storage, (H, D) contiguous or null
  Segments segments;
  RankMask rank_mask;
  Tensor4 mask;  // bool, (B, H, L, M + K); data null: none
  Dropout dropout;

  Tensor4 out, out_residual;      // storage; the latter is the rounding error of `out`, data null: not wanted
  void *lse, *row_max, *row_sum;  // work, (B, H, L) contiguous; forward alone writes lse
};

// Where the gradients go, in the work dtype; null data: not wanted. With query rows, each row of `query`, `keys` and
// `memory` is written. All others are added to.
struct RelAttentionGradients {
  Tensor4 out;      // storage, of the output
  const void* lse;  // work, of lse, (B, H, L) contiguous or null
  Tensor4 query;
  Keys keys, memory;
  Tensor4 rel_key;
  void *content_bias, *position_bias;  // (H, D)
  void *segment_embed, *segment_bias;  // (2, H, D), (H, D)
};

}  // namespace xlnet_kernels
