// The CUDA kernels' face to the host: arguments and device memory in, an error's text or null out. No torch here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>

#include "../rel_attention.h"
#include "block_order.h"
#include "tile_sizes.h"

namespace xlnet_kernels::cuda {

// Bounds of the labels of BOUNDS_TILE keys or rows, by which kernels skip tiles without looking into them
constexpr int BOUNDS_TILE = 64;
struct KeyBounds {
  int32_t min_rank, max_rank;
};
struct KeySegment {
  int32_t first, is_only;  // of the first key; whether the others are of it, too
};
struct RowBounds {
  int32_t min_rank, max_rank, min_floor, max_floor, any_sees_self;
};

// Windows of rel_key reach beyond its first and its last row by less than this where a pair has a row in them.
constexpr int REL_MARGIN = 3 * BOUNDS_TILE;

// Partial results of blocks of forward that share a tile of rows, as planes (splits, B, H, L).
enum SplitValue {
  SPLIT_MAX,      // what the part's exponentials are relative to, in units of log 2
  SPLIT_SUM,      // of them; 0: the row sees no key of the part
  SPLIT_WEIGHTS,  // of them as they were multiplied with the values
  SPLIT_SAME,     // what segments add to every key
  SPLIT_VALUES
};

// Device memory beside the operator's own arguments. All float32 and contiguous.
struct Workspace {
  float* key_bias;                // (B, H, M + K), u.k; null in backward, whose blocks make that of their keys
  float* rel_bias;                // (B or 1, H, rel_bias_rows), v.r from row 0 on; outside of P whatever was there
  KeyBounds* key_bounds;          // (B, tiles of keys)
  KeySegment* key_segments;       // (B, tiles of keys)
  uint32_t* rank_pairs;           // (B, tiles of keys, BOUNDS_TILE / 2), ranks of two keys: mask.cuh
  RowBounds* row_bounds;          // (B, tiles of rows)
  uint32_t* unread_keys;          // (B, mask_heads, key_words), a bit a key: unread.cuh; null: rows see all of them
  uint32_t* unread_rel_rows;      // (B or 1, H, words of 32 rows), a bit a row of rel_key; null: not wanted
  float *split_out, *split_rows;  // (splits, B, H, L, D) and (SPLIT_VALUES, splits, B, H, L), where keys are split
};

// Per-row statistics of backward, stored as ROW_VALUES planes (B, H, L).
enum RowValue {
  ROW_MAX,    // in units of log 2, without what segments add to every key
  INVERSE,    // 1 / row_sum; 0 in fully masked rows
  DELTA,      // rowsum(dO * O), minus the gradient of the log-sum-exp, all times INVERSE
  DIFFERENT,  // score that a key of another segment has in addition, in units of log 2
  ROW_VALUES
};

// `postprocess` sums over a head's keys, rows of query and rows of rel_key in parts of POSTPROCESS_ROWS each.
constexpr int POSTPROCESS_ROWS = 256;
enum QueryPart {
  DIFFERENT_PART,  // of q times Sums::different
  LSE_PART,        // of q times the log-sum-exp's gradient
  WEIGHT_PART,     // of those two factors themselves, in its first two columns
  QUERY_PARTS
};

// An array that `preprocess` fills with zeros before anything is added to it.
template <typename Element>
struct Zeroed {
  Element* data;
};
// All of them, side by side
struct Zeros {
  void* data;
  int64_t chunks;  // of 16 bytes
};

// Sums of blocks of backward, in float32 and without the scale, because it would cost 16-bit numbers some of their
// range.
struct Sums {
  Zeroed<float> query;       // (B, H, L, D), without the segment term
  Zeroed<float> rel_key;     // (rel_batches, H, P, D), without what position_bias gives; null: not wanted
  Zeroed<float> rel;         // (rel_batches, H, P), of dS over the pairs at each distance; null: not wanted
  Zeroed<float> different;   // (B, H, L), of dS over keys of another segment; null: no segments
  Zeroed<int32_t> progress;  // blocks begun, (B, H, tiles of keys): ordered_accumulation.cuh; null: in any order
  Zeroed<int32_t> finished;  // (H), blocks of `postprocess` that have stored their parts; null: no parts are wanted
  float* key;                // (B, H, M + K), of dS over rows
  float* key_parts;          // (H, B, parts, D), of keys times those; null: not wanted
  float* query_parts;        // (H, B, parts, QUERY_PARTS, D); null: not wanted
  float* rel_parts;          // (H, B or 1, parts, D), of rows of rel_key times `rel`; null: not wanted
  Zeros zeros;
  int64_t rel_batches;  // B, or 1 where all batches add to the same: they do in any order alone
};

// Where the gradients go: storage, all but keys and values contiguous or with rows of their own width, which may be
// less than the padded head_dim. Null: not wanted.
struct Gradients {
  Tensor4 out;        // of the output
  const float* lse;   // (B, H, L), of the log-sum-exp, or null; anything in fully masked rows
  float* row_values;  // (ROW_VALUES, B, H, L), workspace
  Sums sums;
  Tensor4 key, value, memory_key, memory_value;
  int64_t width;  // columns of those below
  Tensor4 query, rel_key;
  void *content_bias, *position_bias, *segment_embed, *segment_bias;
};

struct Call {
  RelAttention p;
  Workspace workspace;
  bool tf32;              // float32: one TF32 product instead of three
  bool shared_rel_key;    // rel_key has no batch dimension
  int64_t rel_bias_rows;  // P + 2 REL_MARGIN
  int mask_heads;         // H where a dense mask has masks of its own for each head, else 1
  int key_words;          // of 32 keys, as many as tiles of keys have
  int splits;             // how many blocks of forward share the keys of one tile of rows
  BlockOrder order;       // of the main loop's blocks, which its launch sets
};

// Whether there may be a key that no row sees: a mask hides some, or rel_key has no row for some distance.
inline bool may_have_unread_keys(const RelAttention& p) {
  const int64_t keys = p.mem_len + p.key_len, positions = p.rows.position ? p.key_len : p.length;
  const bool is_within_reach = p.mem_len + positions - 1 <= p.rel_key.max_distance &&
                               p.mem_len - p.rel_key.max_distance + p.rel_len >= keys;
  return p.rank_mask.query_rank || p.mask.data || !is_within_reach;
}

struct Backward {
  Call call;
  Gradients gradients;
};

// The most tiles of one head's keys that any kernel of backward has; of sm_90a's, two in a block.
inline int64_t most_backward_tiles(const RelAttention& p) {
  constexpr int ANY = 64;  // head_dim, which the tile does not depend on
  const int tile = p.dtype == DType::float32 ? BackwardSizes<4, ANY>::BLOCK_N : BackwardSizes<2, ANY>::BLOCK_N;
  return (p.mem_len + p.key_len + 2 * tile - 1) / (2 * tile) * 2;
}

constexpr int LEAST_SPLITS = 4, MOST_SPLITS = 32;  // fewer are not worth the launch that merges them

// The heuristic for `splits`: 1 unless the tiles of rows leave three quarters of the device's processors idle. Every
// part has at least `least_tiles` tiles of keys.
inline int forward_splits(const Call& call, int processors, int least_tiles) {
  const RelAttention& p = call.p;
  const auto [block_m, block_n] =
      p.dtype == DType::float32 ? forward_tile<4>(p.head_dim, HeadDims()) : forward_tile<2>(p.head_dim, HeadDims());
  const int64_t blocks = (p.length + block_m - 1) / block_m * p.heads * p.batch;
  if (4 * blocks > processors) return 1;
  const int64_t keys = std::min(p.mem_len + p.key_len, p.rel_len + block_m);  // as far as rel_key reaches
  const int64_t tiles = (keys + block_n - 1) / block_n;
  const int64_t splits = std::min({tiles / least_tiles, 2 * processors / blocks, int64_t(MOST_SPLITS)});
  return splits < LEAST_SPLITS ? 1 : int(splits);
}

// Bytes of shared memory that a block may have on a device; -1 if there is no such device
int shared_memory_limit(int device);

// Stream is cudaStream_t; on the host, whatever executes the kernels there.
template <typename Stream>
std::string forward(const Call& call, Stream stream);
template <typename Stream>
std::string backward(const Call& call, const Gradients& gradients, Stream stream);

}  // namespace xlnet_kernels::cuda
