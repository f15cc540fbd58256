// Tiles, threads and shared memory of every compiled kernel. No CUDA and no torch here: hosts ask too.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "../rel_attention.h"

namespace xlnet_kernels::cuda {

// Head dims that kernels are compiled for; others are padded with zeros to the next one.
using HeadDims = std::integer_sequence<int, 32, 64, 96, 128>;

// Bytes of a tile in shared memory: a gap of 16 bytes between rows, so that chunks of eight rows fall into different
// banks. The last row needs none.
constexpr int tile_stride(int row_bytes) { return row_bytes + 16; }
constexpr int tile_bytes(int rows, int row_bytes) { return rows * tile_stride(row_bytes) - 16; }

// The least power of two that is not below N
template <int N>
constexpr int POWER_OF_TWO = 2 * POWER_OF_TWO<(N + 1) / 2>;
template <>
constexpr int POWER_OF_TWO<1> = 1;

// Tiles of a forward kernel for elements of SIZE bytes and this head_dim
template <int SIZE, int HEAD_DIM_>
struct ForwardSizes {
  static constexpr int HEAD_DIM = HEAD_DIM_, ROW_BYTES = SIZE * HEAD_DIM;
  // Two tiles of 16 rows share what they multiply with: half the traffic of shared memory, where registers allow it.
  static constexpr int M_TILES = SIZE == 2 && HEAD_DIM <= 64 ? 2 : 1;
  // Eight warps with one tile each copy what they read as seldom as four warps with two.
  static constexpr int WARPS = SIZE == 4 && HEAD_DIM > 64 ? 2 : SIZE == 2 && HEAD_DIM > 64 ? 8 : 4;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int BLOCK_M = 16 * M_TILES * WARPS, BLOCK_N = ROW_BYTES <= 64 ? 64 : ROW_BYTES <= 256 ? 32 : 16;
  static constexpr int WINDOW = BLOCK_M + BLOCK_N, KEPT_ROWS = WINDOW + BLOCK_N;
  // A power of two spares a division; eight warps' would be more than the 99 KB that some architectures have.
  static constexpr int RING = WARPS == 8 ? KEPT_ROWS : POWER_OF_TWO<KEPT_ROWS>;
  static constexpr bool QUERY_IN_REGISTERS = SIZE == 2;
  static constexpr int KEY_BYTES = tile_bytes(BLOCK_N, ROW_BYTES), RING_BYTES = tile_bytes(RING, ROW_BYTES);
  static constexpr int LABELS = 3 * BLOCK_N * 4, RANKS = BLOCK_N * 2, BIAS_BYTES = WINDOW * 4,
                       STAGE = 2 * KEY_BYTES + LABELS + RANKS + BIAS_BYTES;
  static constexpr int QUERY_BYTES = QUERY_IN_REGISTERS ? 0 : tile_bytes(BLOCK_M, ROW_BYTES);
  static constexpr int KEPT_BYTES = M_TILES * THREADS * 4;
  static constexpr int SHARED = 2 * STAGE + RING_BYTES + QUERY_BYTES + KEPT_BYTES;
  static constexpr int BLOCKS = SHARED <= 100 * 1024 && WARPS <= 4 ? 2 : 1;  // at a time on a multiprocessor
};

template <int SIZE, int HEAD_DIM_>
struct BackwardSizes {
  static constexpr int HEAD_DIM = HEAD_DIM_, ROW_BYTES = SIZE * HEAD_DIM;
  static constexpr int BLOCK_M = SIZE == 2 ? 64 : 32, BLOCK_N = BLOCK_M, M_TILES = BLOCK_M / 16;
  static constexpr int GROUPS = ROW_BYTES > 128 ? 2 : 1, WARPS = M_TILES * GROUPS, THREADS = 32 * WARPS;
  static constexpr int WINDOW = BLOCK_M + BLOCK_N;
  static constexpr int KEYS = BLOCK_N / GROUPS, COLUMNS = HEAD_DIM / GROUPS;  // of one warp
  static constexpr int ROWS_BYTES = tile_bytes(BLOCK_M, ROW_BYTES), RING_BYTES = tile_bytes(WINDOW, ROW_BYTES),
                       SCORES_BYTES = tile_bytes(BLOCK_M, SIZE* BLOCK_N),
                       BAND_BYTES = tile_bytes(BLOCK_M, SIZE* WINDOW), LABEL_BYTES = 3 * BLOCK_N * 4,
                       SUM_BYTES = GROUPS * BLOCK_M * 4, BOUND_BYTES = M_TILES * 2 * 4;
  // Query's next tile comes to where P of this one was: both places have the bytes of the larger one. Not in float32
  // with wide heads: with 96 it would not fit into 99 KB, with 128 there are no registers for it.
  static constexpr bool QUERY_AHEAD = SIZE == 2 || HEAD_DIM <= 64;
  static constexpr int LARGER_BYTES = ROWS_BYTES > SCORES_BYTES ? ROWS_BYTES : SCORES_BYTES,
                       QUERY_BYTES = QUERY_AHEAD ? LARGER_BYTES : ROWS_BYTES,
                       PROBABILITY_BYTES = QUERY_AHEAD ? LARGER_BYTES : SCORES_BYTES;
  // Warps that have all keys of their rows need dS of others for dK alone. It comes to where dO was, after dV.
  static constexpr bool DS_AFTER_DV = GROUPS == 1;
  static constexpr int GRAD_OUT_BYTES = DS_AFTER_DV ? LARGER_BYTES : ROWS_BYTES,
                       OWN_DS_BYTES = DS_AFTER_DV ? 0 : SCORES_BYTES;
  static constexpr int SHARED = 2 * ROWS_BYTES + GRAD_OUT_BYTES + QUERY_BYTES + RING_BYTES + PROBABILITY_BYTES +
                                OWN_DS_BYTES + BAND_BYTES + LABEL_BYTES + SUM_BYTES + BOUND_BYTES;
};

// Rows and keys of a tile of the forward kernel that serves this head_dim
struct TileSizes {
  int rows = 1, keys = 1;
};
template <int SIZE, int... HEAD_DIM>
TileSizes forward_tile(int64_t head_dim, std::integer_sequence<int, HEAD_DIM...>) {
  TileSizes found;
  ((head_dim <= HEAD_DIM &&
    (found = {ForwardSizes<SIZE, HEAD_DIM>::BLOCK_M, ForwardSizes<SIZE, HEAD_DIM>::BLOCK_N}, true)) ||
   ...);
  return found;
}

struct KernelSizes {
  const char *kernel, *dtype;
  int head_dim, block_m, block_n, threads, shared_bytes;
};

template <int SIZE, int... HEAD_DIM>
void add_kernel_sizes(std::vector<KernelSizes>& to, const char* dtype, std::integer_sequence<int, HEAD_DIM...>) {
  const auto add = [&](const char* kernel, auto sizes) {
    using S = decltype(sizes);
    to.push_back({kernel, dtype, S::HEAD_DIM, S::BLOCK_M, S::BLOCK_N, S::THREADS, S::SHARED});
  };
  (add("forward", ForwardSizes<SIZE, HEAD_DIM>()), ...);
  (add("backward", BackwardSizes<SIZE, HEAD_DIM>()), ...);
}

// Every kernel's sizes; dtypes by torch's names
inline std::vector<KernelSizes> kernel_sizes() {
  std::vector<KernelSizes> found;
  add_kernel_sizes<2>(found, "float16", HeadDims());
  add_kernel_sizes<2>(found, "bfloat16", HeadDims());
  add_kernel_sizes<4>(found, "float32", HeadDims());
  return found;
}

}  // namespace xlnet_kernels::cuda
