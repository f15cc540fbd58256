// u.k of keys and v.r of rows of rel_key, which scores begin with: the same to the last bit in both passes.
#pragma once

#include "rows.cuh"

namespace xlnet_kernels::cuda {

// to[i] = bias . rows(first + i) for ROWS_AT_ONCE rows, those below `count`; zeros without a bias. A lane's chunk is
// the same of a row and of the bias, in whatever order mma takes them. FINDS: returns bits of the rows that are not
// finite, whose product with zeros is NaN; in 16 bits that is another column of the same mma. Else returns 0.
template <bool FINDS = false, typename T, typename Rows>
DEVICE uint32_t bias_products(const T* bias, Rows rows, int first, int count, int head_dim, float* to) {
  static_assert(ROWS_AT_ONCE == 32);
  uint32_t not_finite = 0;
  if constexpr (sizeof(T) == 2) {
    constexpr int TILES = ROWS_AT_ONCE / 16;
    const Lane lane = this_lane();
    const T* row[TILES][2];
    float sum[TILES][4] = {};
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) row[i / 2][i % 2] = rows(smaller(first + 8 * i + lane.g, count - 1));
#pragma unroll 2
    for (int column = lane.t * CHUNK<T>; (FINDS || bias) && column < head_dim + lane.t * CHUNK<T>;
         column += 4 * CHUNK<T>) {
      Bytes16 of_bias = {}, of_row[TILES][2] = {};
      if (column < head_dim) {
        if (!FINDS || (bias && lane.g != 1)) of_bias = *reinterpret_cast<const Bytes16*>(bias + column);
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
    if constexpr (FINDS) {
      bool own = false;
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i) {
        const uint32_t found = ballot(lane.t == 0 && sum[i / 2][i % 2 * 2 + 1] != 0);  // row 8 i + g in bit 4 g
        if (lane.id / 8 == i) own = first + lane.id < count && found >> 4 * (lane.id % 8) & 1;
      }
      not_finite = ballot(own);
    }
  } else {
    const RowLanes<CHUNK<T>, 1> lanes(head_dim);
    float of_bias[CHUNK<T>] = {};
    const bool reads = bias && lanes.inside;
    if (reads) load_chunk(bias + lanes.column, of_bias);
    lanes.for_each([&](int base) {
      const int r = first + base + lanes.row;
      float sum[FINDS ? 2 : 1] = {};
      if ((reads || (FINDS && lanes.inside)) && r < count) {
        float of_row[CHUNK<T>];
        load_chunk(rows(r) + lanes.column, of_row);
#pragma unroll
        for (int d = 0; d < CHUNK<T>; ++d) {
          sum[0] += of_bias[d] * of_row[d];
          if constexpr (FINDS) sum[1] += 0 * of_row[d];
        }
      }
      lanes.add_up(sum);
      if (lanes.column == 0 && r < count) to[base + lanes.row] = sum[0];
      if constexpr (FINDS)
        for (uint32_t found = ballot(lanes.column == 0 && sum[1] != 0); found != 0; found &= found - 1)
          not_finite |= 1u << (base + (first_bit(found) >> lanes.bits));
    });
  }
  return not_finite;
}

// u.k of ROWS_AT_ONCE keys of head h from `first` on.
template <typename T, typename Rows>
DEVICE void make_key_bias(const RelAttention& p, Rows rows, int h, int first, float* to) {
  bias_products(bias_of_head<T>(p.content_bias, p, h), rows, first, int(p.mem_len + p.key_len), int(p.head_dim), to);
}

// That of a block's COUNT keys from j0 on, by warp number `warp` of WARPS; the others see it after a barrier.
template <typename T, int COUNT, int WARPS, typename Rows>
DEVICE void make_key_biases(const RelAttention& p, Rows rows, int h, int j0, int warp, float* to) {
  if (p.content_bias == nullptr) return;
  for (int i = warp * ROWS_AT_ONCE; i < COUNT; i += WARPS * ROWS_AT_ONCE) make_key_bias<T>(p, rows, h, j0 + i, to + i);
}

}  // namespace xlnet_kernels::cuda
