// u.k of keys and v.r of rows of rel_key, which scores begin with: the same to the last bit in both passes.
#pragma once

#include "rows.cuh"

namespace xlnet_kernels::cuda {

// to[i] = bias . rows(first + i) for ROWS_AT_ONCE rows, those below `count`; zeros without a bias. A lane's chunk is
// the same of a row and of the bias, in whatever order mma takes them.
template <typename T, typename Rows>
DEVICE void bias_products(const T* bias, Rows rows, int first, int count, int head_dim, float* to) {
  if constexpr (sizeof(T) == 2) {
    constexpr int TILES = ROWS_AT_ONCE / 16;
    const Lane lane = this_lane();
    const T* row[TILES][2];
    float sum[TILES][4] = {};
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) row[i / 2][i % 2] = rows(smaller(first + 8 * i + lane.g, count - 1));
#pragma unroll 2
    for (int column = lane.t * CHUNK<T>; bias && column < head_dim + lane.t * CHUNK<T>; column += 4 * CHUNK<T>) {
      Bytes16 of_bias = {}, of_row[TILES][2] = {};
      if (column < head_dim) {
        of_bias = *reinterpret_cast<const Bytes16*>(bias + column);
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i)
          of_row[i / 2][i % 2] = *reinterpret_cast<const Bytes16*>(row[i / 2][i % 2] + column);
      }
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t* const word[2] = {of_row[i][0].word + 2 * half, of_row[i][1].word + 2 * half};
          mma<T>(sum[i], {word[0][0], word[1][0], word[0][1], word[1][1]},
                 {of_bias.word[2 * half], of_bias.word[2 * half + 1]});
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i)
      if (lane.t == 0 && first + 8 * i + lane.g < count) to[8 * i + lane.g] = sum[i / 2][i % 2 * 2];
  } else {
    const RowLanes<CHUNK<T>, 1> lanes(head_dim);
    float of_bias[CHUNK<T>] = {};
    const bool reads = bias && lanes.inside;
    if (reads) load_chunk(bias + lanes.column, of_bias);
    lanes.for_each([&](int base) {
      const int r = first + base + lanes.row;
      float sum[1] = {};
      if (reads && r < count) {
        float of_row[CHUNK<T>];
        load_chunk(rows(r) + lanes.column, of_row);
#pragma unroll
        for (int d = 0; d < CHUNK<T>; ++d) sum[0] += of_bias[d] * of_row[d];
      }
      lanes.add_up(sum);
      if (lanes.column == 0 && r < count) to[base + lanes.row] = sum[0];
    });
  }
}

// u.k of a block's COUNT keys from j0 on, by warp number `warp` of WARPS; the others see it after a barrier.
template <typename T, int COUNT, int WARPS, typename Rows>
DEVICE void make_key_biases(const RelAttention& p, Rows rows, int h, int j0, int warp, float* to) {
  if (p.content_bias == nullptr) return;
  const T* const bias = static_cast<const T*>(p.content_bias) + h * p.head_dim;
  for (int i = warp * ROWS_AT_ONCE; i < COUNT; i += WARPS * ROWS_AT_ONCE)
    bias_products(bias, rows, j0 + i, int(p.mem_len + p.key_len), int(p.head_dim), to + i);
}

}  // namespace xlnet_kernels::cuda
