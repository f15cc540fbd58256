// Shared memory of the warpgroup kernels: matrices as wgmma reads them, and the ring that they come in.
#pragma once

#include <type_traits>

#include "../mask.cuh"
#include "primitives.cuh"
#include "shapes.h"

namespace xlnet_kernels::cuda {

template <typename Element, int HEAD_DIM_, bool DROPOUT_, bool POSITIONS_ = false>
struct WarpgroupShape : WarpgroupSizes<HEAD_DIM_> {
  using T = Element;
  static constexpr bool DROPOUT = DROPOUT_, POSITIONS = POSITIONS_;  // POSITIONS: rows have some of their own
  static constexpr int M_TILES = 1;                                  // of 16 rows, of one warp
  // For keys of one segment a way of its own, unless registers are too few for two.
  static constexpr bool HAS_ONE_SEGMENT_WAY = !DROPOUT || HEAD_DIM_ <= 64;
  // Scores stay until their exponentials are known to fit.
  static constexpr bool KEEPS_SCORES = HEAD_DIM_ <= 64;
};

// 64 rows of COLUMNS 16-bit numbers: panels of 64 columns, rows of 128 bytes whose chunks of 16 are exchanged by the
// row's number, so that wgmma finds eight rows of a column in eight different places.
template <typename T, int COLUMNS>
struct Panels {
  static constexpr int ROW = 128, PANEL = 64 * ROW, EIGHT_ROWS = 8 * ROW;
  char* data;

  DEVICE T* at(int row, int column) const {  // column: a multiple of 8
    return reinterpret_cast<T*>(data + column / 64 * PANEL + row * ROW + (column / 8 % 8 ^ row % 8) * 16);
  }
  // b(k, n) = (row n, column + k)
  DEVICE uint64_t columns_from(int column) const {
    return matrix_descriptor(data, column / 64 * PANEL + column % 64 * 2, PANEL, EIGHT_ROWS);
  }
  // a(m, k) = (row + m, column + k): 16 x 16 of it as a warp's fragment
  DEVICE Fragment load(int row, int column, int lane) const {
    Fragment a;
    ldmatrix(a.word, at(row + lane % 16, column + lane / 16 * 8));
    return a;
  }
  // b(k, n) = (row + k, column + n); column: a multiple of 64
  DEVICE uint64_t rows_from(int row, int column = 0) const {
    return matrix_descriptor(data, column / 64 * PANEL + row * ROW, PANEL, EIGHT_ROWS);
  }
};

// A place in a ring of COUNT.
template <int COUNT>
struct RingPlace {
  static_assert(POWER_OF_TWO<COUNT> == COUNT);
  uint32_t passed = 0;  // places before it

  DEVICE int index() const { return passed % COUNT; }
  DEVICE uint32_t parity() const { return passed / COUNT % 2; }  // of the phase that fills it
  DEVICE void advance() { ++passed; }
};

// What the producer announces: a tile of keys; or, before a tile that does not follow the one before, twice 64 rows of
// its window of rel_key without keys, and whose window that is.
struct alignas(16) TileInfo {
  int first_key;    // or NO_KEY: there are no more tiles; without keys: the first of the sorted rows that are served
  int32_t segment;  // of the first key; without keys: where the rows that are served end
  Visibility visibility;
  uint32_t flags;
  // by_rank, and rows see their own keys as well; all keys are of the first one's segment; no keys: of two stages of
  // rows the first one, the second one; not all of the block's rows are served
  enum : uint32_t { OWNS = 1, ONE_SEGMENT = 2, FIRST_ROWS = 4, LAST_ROWS = 8, SOME_ROWS = 16 };

  DEVICE bool has(uint32_t flag) const { return flags & flag; }
};
constexpr int NO_KEY = -1;

// Sorted rows first to end - 1 of a block: a run, which one window of rel_key serves. Eight rows of it are 8 positions
// apart at most, the first 64 of the block 64, and the others 64 from the last one of those.
struct RowRun {
  int first, end;

  DEVICE bool has(int sorted_row) const { return sorted_row >= first && sorted_row < end; }
};

// The position by which a block's window of rel_key lies, as if it were that of the first 64 rows' last one: rows of
// the first 64 are at it or up to 64 before, the others up to 64 behind.
template <typename S>
DEVICE int window_position(const RelAttention& p, int b, int first_row, RowRun run) {
  if constexpr (!S::POSITIONS) return first_row + 63;
  return row_position(p, b, larger(run.first, smaller(first_row + 63, run.end - 1)));
}

template <typename S>
struct WarpgroupMemory {
  using Rows = Panels<typename S::T, S::HEAD_DIM>;
  char* data;

  DEVICE Rows matrix(int index) const { return {data + index * S::MATRIX}; }
  DEVICE Rows keys(int stage) const { return matrix(2 * stage); }
  DEVICE Rows values(int stage) const { return matrix(2 * stage + 1); }
  DEVICE Rows rel_key(int stage) const { return matrix(2 * S::STAGES + stage); }
  DEVICE KeyLabels labels(int stage) const {
    return key_labels_at(data + S::MATRICES * S::MATRIX + stage * S::LABELS, S::BLOCK_N);
  }
  DEVICE uint32_t* rank_pairs(int stage) const {
    return reinterpret_cast<uint32_t*>(labels(stage + 1).rank) - S::BLOCK_N / 2;
  }
  DEVICE float* rel_bias(int stage) const {  // v.r of the rows of rel_key
    return reinterpret_cast<float*>(labels(S::STAGES).rank) + stage * S::BLOCK_N;
  }
  DEVICE TileInfo& info(int stage) const { return reinterpret_cast<TileInfo*>(rel_bias(S::STAGES))[stage]; }
  DEVICE Barrier barrier(int index) const { return {reinterpret_cast<uint64_t*>(&info(S::STAGES)) + index}; }

  DEVICE Barrier full_stage(int stage) const { return barrier(stage); }
  DEVICE Barrier empty_stage(int stage) const { return barrier(S::STAGES + stage); }

  // The whole block calls it.
  DEVICE void init() const {
    constexpr int WARPS = 4 * S::CONSUMERS;
    if (shared_address(data) % 1024) trap();  // the swizzle's pattern would begin elsewhere
    if (thread_index() == 0)
      for (int i = 0; i < S::STAGES; ++i) full_stage(i).init(WARP + 1), empty_stage(i).init(WARPS);
    for (int i = 0; i < S::STAGES; ++i) clear_key_labels<S::THREADS>(labels(i), S::BLOCK_N);
    sync_block();
  }
};

}  // namespace xlnet_kernels::cuda
