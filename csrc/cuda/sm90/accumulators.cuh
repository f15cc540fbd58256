// Sums of a wgmma, 64 rows of 64 columns, in both passes: their initial values and their way to global memory.
#pragma once

#include <utility>

#include "../tile.cuh"
#include "memory.cuh"
#include "primitives.cuh"

namespace xlnet_kernels::cuda {

// A bias of each column, which products are added to.
DEVICE void start_scores(float (&score)[8][4], const float* bias, int t) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) score[n][i] = bias[8 * n + 2 * t + i % 2];
}

// Biases as the start of a half of the band, in those ten of the window's 16 tiles that the warp shifts; zeros
// elsewhere.
DEVICE void start_half(float (&half)[8][4], const float* bias, bool is_upper, Lane lane) {
  struct alignas(8) Pair {
    float of[2];
  };
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    Pair pair{};
    if (is_upper ? n <= 7 - 2 * lane.warp : n >= 6 - 2 * lane.warp)
      pair = *reinterpret_cast<const Pair*>(bias + 8 * n + 2 * lane.t);
#pragma unroll
    for (int i = 0; i < 4; ++i) half[n][i] = pair.of[i % 2];
  }
}

// Warpgroup: until the products that were begun are there.
DEVICE void finish_products() {
  commit_products();
  wait_for_products();
}

// Adds row r of a lane's two to global memory; `to`: the lane's first column.
template <int... N>
DEVICE void add_row(float* to, const float (&product)[8][4], int r, std::integer_sequence<int, N...>) {
  (add_atomically_at<8 * N>(to, product[N][2 * r], product[N][2 * r + 1]), ...);
}
DEVICE void add_row(float* to, const float (&product)[8][4], int r) {
  add_row(to, product, r, std::make_integer_sequence<int, 8>());
}

// Stores a warp's 16 rows by 16 bytes a lane, because words of 4 bytes would fill a part of a sector each. word(d, r)
// has columns 8 d + 2 t and its neighbour of row g + 8 r. Rows of `through` are free from `first` on. row(r) is where
// row g + 8 r begins, aligned to 16 bytes, or null.
template <typename T, int COLUMNS, typename Word, typename Row>
DEVICE void store_rows(const Panels<T, COLUMNS>& through, int first, Lane lane, Word word, Row row) {
#pragma unroll
  for (int d = 0; d < COLUMNS / 8; d += 2)
    store_matrices(shared_address(through.at(first + lane.id % 16, 8 * d + lane.id / 16 * 8)), word(d, 0), word(d, 1),
                   word(d + 1, 0), word(d + 1, 1));
  sync_warp();
  constexpr int QUAD = 4 * CHUNK<T>;  // columns
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (T* const to = row(r))
#pragma unroll
      for (int column = 0; column < COLUMNS; column += QUAD) {
        // Odd rows begin with the other half of a panel, to avoid that eight lanes read each bank twice.
        const int own = (column ^ lane.g % 2 * QUAD) + lane.t * CHUNK<T>;
        *reinterpret_cast<Bytes16*>(to + own) =
            *reinterpret_cast<const Bytes16*>(through.at(first + lane.g + 8 * r, own));
      }
  sync_warp();  // other lanes may store there now, and to the rows
}

// The warp has no more to read, or to add.
DEVICE void release(const Barrier& barrier, int lane) {
  sync_warp();
  if (kept_in_register(lane) == 0) barrier.arrive();  // whether it is 0 would be kept, where registers are scarce
}

}  // namespace xlnet_kernels::cuda
