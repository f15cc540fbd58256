// The products of one step of backward, each with its part of what a block or a warp adds up.
#pragma once

#include "backward_block.cuh"

namespace xlnet_kernels::cuda {

// A warp's part of a product: rows, or keys, 16 m_tile .. + 15, and one of GROUPS parts of the other dimension.
struct WarpPart {
  Lane lane;
  int m_tile, part;
};
template <typename S>
DEVICE WarpPart warp_part(int lane, int warp) {
  return {{lane, warp, lane / 4, lane % 4}, warp % S::M_TILES, warp / S::M_TILES};
}

// 16 rows of a tile as fragments, which two products take: kept in registers, but for float, of which they would take
// twice as many, and for wide heads.
template <typename S>
struct RowFragments {
  using T = typename S::T;
  static constexpr bool KEPT = sizeof(T) == 2 && S::HEAD_DIM <= 64;
  const typename S::Rows tile;
  int row, lane;
  Fragment kept[KEPT ? S::HEAD_DIM / DEPTH<T> : 1];

  DEVICE RowFragments(const typename S::Rows& tile, int row, int lane) : tile(tile), row(row), lane(lane) {
#pragma unroll
    for (int k = 0; KEPT && k < S::HEAD_DIM; k += DEPTH<T>) kept[k / DEPTH<T>] = load_a(tile, row, k, lane);
  }
  DEVICE Fragment operator()(int k) const {
    if constexpr (KEPT)
      return kept[k / DEPTH<T>];
    else
      return load_a(tile, row, k, lane);
  }
};

// dV of 16 keys.
template <typename S, int N>
DEVICE void add_value_gradient(const BackwardMemory<S>& memory, const WarpPart& of, bool tf32, float (&dV)[N][4]) {
  const int lane = of.lane.id, column = of.part * S::COLUMNS;
  add_product<typename S::T, S::BLOCK_M>(
      dV, tf32, [&](int k) { return load_a_transposed(memory.probability(), k, 16 * of.m_tile, lane); },
      [&](int k, int n) { return load_b_transposed(memory.grad_out, k, column + n, lane); });
}

// The content term's dQ of 16 rows; dS: of all keys, where the warp has them.
template <typename S, int N, int KEYS>
DEVICE void add_content_gradient(const BackwardMemory<S>& memory, const WarpPart& of, bool tf32,
                                 const float (&dS)[KEYS][4], float (&dQ)[N][4]) {
  using T = typename S::T;
  constexpr bool OWN = S::GROUPS == 1;
  const int lane = of.lane.id, first_row = 16 * of.m_tile, column = of.part * S::COLUMNS;
  add_product<T, S::BLOCK_N>(
      dQ, tf32,
      [&](int k) {
        if constexpr (OWN)
          return as_fragment<T>(dS + k / 8);
        else
          return load_a(memory.dS, first_row, k, lane);
      },
      [&](int k, int n) { return load_b_transposed<OWN>(memory.keys, k, column + n, lane); });
}

// The shift back: stores dS into the band, each row from its shift on. Returns the smallest and the largest shift of
// the warp's rows, and leaves them for others in shift_bounds.
struct ShiftBounds {
  int first, last;  // last < 0: the window serves none
};
template <typename S, int N>
DEVICE ShiftBounds store_band(const BackwardMemory<S>& memory, const WarpPart& of, const int (&shift)[2],
                              const float (&dS)[N][4]) {
  int first = S::BLOCK_M, last = -1;
  for (int r = 0; r < 2; ++r) {
    if (shift[r] < 0) continue;
    first = smaller(first, shift[r]);
    last = larger(last, shift[r]);
    typename S::T* to =
        memory.band.at(16 * of.m_tile + of.lane.g + 8 * r, shift[r] + of.part * S::KEYS + 2 * of.lane.t);
#pragma unroll
    for (int n = 0; n < N; ++n)
      for (int parity = 0; parity < 2; ++parity) store_one(to + 8 * n + parity, dS[n][2 * r + parity]);
  }
  first = warp_min(first);
  last = warp_max(last);
  if (of.lane.id == 0 && of.part == 0) {
    memory.shift_bounds[2 * of.m_tile] = first;
    memory.shift_bounds[2 * of.m_tile + 1] = last;
  }
  return {first, last};
}

// The position term's dQ of 16 rows: band R. `window`: the first row of rel_key in the ring.
template <typename S, int N>
DEVICE void add_position_gradient(const BackwardMemory<S>& memory, const WarpPart& of, int window,
                                  const ShiftBounds& bounds, bool tf32, float (&dQ)[N][4]) {
  using T = typename S::T;
  for (int k = bounds.first / 16 * 16; k < bounds.last + S::BLOCK_N && bounds.last >= 0; k += DEPTH<T>) {
    const Fragment band = load_a(memory.band, 16 * of.m_tile, k, of.lane.id);
#pragma unroll
    for (int n = 0; n < S::COLUMNS; n += 16) {
      const Fragment r = load_b_transposed(memory.ring, window + k, of.part * S::COLUMNS + n, of.lane.id);
      multiply<T>(dQ[n / 8], band, r, 0, tf32);
      multiply<T>(dQ[n / 8 + 1], band, r, 1, tf32);
    }
  }
}

// Bit 2 i + half: whether the i-th 16 rows of query have something in 16 columns of that half of the band, from
// first_column on. Bits from 2 M_TILES on repeat these. All lanes of a warp call it.
template <typename S>
DEVICE uint32_t rows_in_band(const BackwardMemory<S>& memory, int first_column, int lane) {
  const int rows = lane / 2 % S::M_TILES, column = first_column + lane % 2 * S::BLOCK_M;
  const int first = memory.shift_bounds[2 * rows], last = memory.shift_bounds[2 * rows + 1];
  return ballot(last >= 0 && first < column + 16 && last + S::BLOCK_N > column);
}

// dK of 16 keys with key_sum, of dS over rows; and dR = band' Q with colsum(band), of 16 rows in each half of the
// window, added to global memory. The upper half comes first: registers hold sums of one half, and these are added
// while the next products run. The lower half reads Q once for dK and dR, the upper one reads it again.
template <typename S, int N>
DEVICE void add_key_gradients(const Backward& a, const KeyTile<S>& tile, const BackwardMemory<S>& memory,
                              const typename S::Rows& queries, const WarpPart& of, int window, float (&dK)[N][4],
                              float (&key_sum)[4]) {
  using T = typename S::T;
  const Sums& sums = a.gradients.sums;
  const bool tf32 = a.call.tf32;
  const int lane = of.lane.id, first_key = 16 * of.m_tile, column = of.part * S::COLUMNS;
  const HeadRows<float> grad_rel = tile.grad_rel.kept();
  const uint32_t in_band = sums.rel_key.data ? rows_in_band(memory, first_key, lane) : 0;
#pragma unroll
  for (int half = 1; half >= 0; --half) {
    const bool adds_dK = half == 0;
    float dR[N][4] = {}, column_sum[4] = {};
#pragma unroll
    for (int rows = 0; rows < S::M_TILES; ++rows) {  // 16 rows of query
      const bool adds_dR = in_band >> (2 * rows + half) & 1;
      if (!adds_dK && !adds_dR) continue;
#pragma unroll
      for (int k = 16 * rows; k < 16 * rows + 16; k += DEPTH<T>) {
        Fragment q[N / 2];
#pragma unroll
        for (int n = 0; n < N; n += 2) q[n / 2] = load_b_transposed(queries, k, column + 8 * n, lane);
        const auto add = [&](const Fragment& left, float (&product)[N][4], float (&sum)[4]) {
          multiply<T>(sum, left, ones<T>(), 0, tf32);
#pragma unroll
          for (int n = 0; n < N; ++n) multiply<T>(product[n], left, q[n / 2], n % 2, tf32);
        };
        if (adds_dK) add(load_a_transposed(memory.dS, k, first_key, lane), dK, key_sum);
        if (adds_dR) add(load_a_transposed(memory.band, k, first_key + half * S::BLOCK_M, lane), dR, column_sum);
      }
    }
    if (!(in_band >> half & 0x55555555)) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = window + first_key + half * S::BLOCK_M + of.lane.g + 8 * r;
      const bool is_inside = row >= 0 && row < a.call.p.rel_len;
      add_rows(grad_rel, dR, r, is_inside ? row : -1, column, int(a.call.p.head_dim), of.lane);
      if (is_inside && sums.rel.data && of.lane.t == 0 && of.part == 0)
        add_atomically(sums.rel.data + tile.first_rel + row, column_sum[2 * r]);
    }
  }
}

// The sum of dS over keys of another segment, from the parts that warps have left in different_sums.
template <typename S>
DEVICE void add_segment_gradient(const Backward& a, const KeyTile<S>& tile, const BackwardMemory<S>& memory,
                                 int first_row) {
  const RelAttention& p = a.call.p;
  if (p.segments.embed == nullptr) return;
  for (int m = thread_index(); m < S::BLOCK_M && first_row + m < p.length; m += S::THREADS) {
    float sum = memory.different_sums[m];
    if (S::GROUPS == 2) sum += memory.different_sums[S::BLOCK_M + m];
    add_atomically(a.gradients.sums.different.data + tile.first_row + row_index(p, tile.b, first_row + m), sum);
  }
}

// Stores dK = scale (dS' Q + colsum(dS) u), dV and colsum(dS) of 16 keys.
template <typename S, int N>
DEVICE void backward_epilogue(const Backward& a, const KeyTile<S>& tile, const WarpPart& of, const float (&dV)[N][4],
                              const float (&dK)[N][4], const float (&key_sum)[4]) {
  using T = typename S::T;
  const RelAttention& p = a.call.p;
  const Gradients& grad = a.gradients;
  const int keys = int(p.mem_len + p.key_len), head_dim = int(p.head_dim);
  const float scale = float(p.scale);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int j = tile.j0 + 16 * of.m_tile + of.lane.g + 8 * r;
    if (j >= keys) continue;
    if (of.lane.t == 0 && of.part == 0) grad.sums.key[int64_t(tile.head) * keys + j] = key_sum[2 * r];
    T* to_key = key_rows_of<T>(p, grad.memory_key, grad.key, tile.b, tile.h)(j);
    T* to_value = key_rows_of<T>(p, grad.memory_value, grad.value, tile.b, tile.h)(j);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int d = of.part * S::COLUMNS + 8 * n + 2 * of.lane.t;
      if (d >= head_dim) continue;
      const T* u = static_cast<const T*>(p.content_bias) + tile.h * head_dim + d;
      const float u0 = p.content_bias ? to_float(u[0]) : 0.f, u1 = p.content_bias ? to_float(u[1]) : 0.f;
      store_pair(to_key + d, (dK[n][2 * r] + key_sum[2 * r] * u0) * scale,
                 (dK[n][2 * r + 1] + key_sum[2 * r] * u1) * scale);
      store_pair(to_value + d, dV[n][2 * r], dV[n][2 * r + 1]);
    }
  }
}

}  // namespace xlnet_kernels::cuda
