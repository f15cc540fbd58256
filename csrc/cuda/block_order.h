// In which order blocks of the main loops begin: from a block's number to its tile of one head. The hardware begins
// blocks in the order of their numbers. No CUDA and no torch here: hosts ask too.
#pragma once

#include <cstdint>

#include "../rel_attention.h"

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HOST_DEVICE inline
#endif

namespace xlnet_kernels::cuda {

// A block's work: one tile of rows (forward) or of keys (backward), or a part of one, of head h of batch b.
struct BlockItem {
  int tile, b, h;
};

// Heads are fastest, so that tiles that see most begin first, whichever their head, and small ones fill the gaps at the
// end. Causal calls would otherwise end with the largest tiles of the last heads:
//
//   three tiles of two heads, last tile first:   tile  2 2 1 1 0 0
//                                                head  0 1 0 1 0 1
//
// Many heads come in groups, one after the other, because blocks that run at once are to find what they read in L2.
struct BlockOrder {
  int tiles, heads, all_heads;  // of one head; H; B H
  int together;                 // heads of a group, numbered through all batches; the last group may have fewer
  bool is_last_first;           // from the last tile to the first

  HOST_DEVICE BlockItem item(int number) const {
    const int group = number / (tiles * together), first = group * together, rest = number - first * tiles;
    const int count = all_heads - first < together ? all_heads - first : together;
    const int place = rest / count, head = first + rest - place * count, b = head / heads;
    return {is_last_first ? tiles - 1 - place : place, b, head - b * heads};
  }
  int blocks() const { return tiles * all_heads; }
};

// A100 and H100 have 20 and 25 MB of L2 for each half of their multiprocessors, through which results go, too.
constexpr int64_t L2_FOR_HEADS = 16 << 20;

// Groups of equal size, of at most `most` heads or of one.
inline BlockOrder block_order(const RelAttention& p, int64_t tiles, int64_t most, bool is_last_first) {
  const int64_t all_heads = p.batch * p.heads, groups = most < 1 ? all_heads : (all_heads + most - 1) / most;
  return {int(tiles), int(p.heads), int(all_heads), int((all_heads + groups - 1) / groups), is_last_first};
}

inline int64_t element_bytes(const RelAttention& p) { return p.dtype == DType::float32 ? 4 : 2; }

// Where a mask hides keys ahead of a row, the last rows see most. Blocks of a head read its keys, values and rel_key.
inline BlockOrder forward_order(const RelAttention& p, int64_t tiles) {
  const int64_t rows = 2 * (p.mem_len + p.key_len) + p.rel_len;
  return block_order(p, tiles, L2_FOR_HEADS / (rows * p.head_dim * element_bytes(p)), true);
}

// Then most rows see the first keys. Blocks of a head read its query, dO and rel_key, and add to float32 dQ and dR.
// Blocks that add in order have all heads in one group, because those of a head that run at once wait for each other.
inline BlockOrder backward_order(const RelAttention& p, int64_t tiles, bool is_ordered) {
  const int64_t size = element_bytes(p), row = p.length * (2 * size + 4) + p.rel_len * (size + 4);
  return block_order(p, tiles, is_ordered ? p.batch * p.heads : L2_FOR_HEADS / (row * p.head_dim), false);
}

}  // namespace xlnet_kernels::cuda
