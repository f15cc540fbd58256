// The arguments of relative attention as every compiled backend takes them: plain pointers, sizes and strides.
// Names and meaning follow xlnet_kernels/functional.py. No torch here.
#pragma once

#include <cstdint>

namespace xlnet_kernels {

enum class DType { float32, float64, bfloat16, float16 };

// (B, H, rows, D), strides in elements; a stride of 0 repeats.
struct Tensor4 {
  void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
};

struct RelAttention {
  DType dtype;  // of the tensors marked "storage"; float32 work for 16-bit storage
  int64_t batch, heads, length, key_len, mem_len, width, rel_rows;  // B, H, L, K, M, D, P
  int64_t max_distance;
  double scale;

  Tensor4 query, key, value, memory_key, memory_value, rel_key;  // storage
  const void* content_bias;  // storage, (H, D) contiguous or null, like the next three
  const void* position_bias;
  const void* segment_embed;  // (2, H, D)
  const void* segment_bias;
  const int32_t* query_ids;  // (B, L); null: no segments
  const int32_t* key_ids;    // (B, M + K)

  const int32_t* query_rank;   // (B, L); null: no RankMask
  const int32_t* key_rank;     // (B, M + K)
  const int32_t* query_floor;  // (B, L) or null
  const bool* sees_self;       // (B, L) or null
  Tensor4 mask;                // bool, (B, H, L, M + K); data null: none

  const int32_t* row_order;     // (B, L), rows by ascending position; null: row i at position i
  const int32_t* row_position;  // (B, L), position of row_order's rows

  double dropout_p;
  uint32_t dropout_threshold;    // words below it are dropped
  const int64_t* dropout_state;  // seed and offset, where the tensors are

  Tensor4 out;  // storage
  void* lse;    // work, (B, H, L) contiguous
};

// Where the gradients go, in the work dtype. All but `query` are added to; null data: not wanted.
struct RelAttentionGradients {
  Tensor4 out;      // storage, of the output
  const void* lse;  // work, of lse, (B, H, L) contiguous or null
  Tensor4 query, key, value, memory_key, memory_value, rel_key;
  void* content_bias;  // (H, D)
  void* position_bias;
  void* segment_embed;  // (2, H, D)
  void* segment_bias;
};

}  // namespace xlnet_kernels
