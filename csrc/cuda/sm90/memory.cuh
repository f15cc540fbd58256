// Shared memory of the warpgroup kernels: matrices as wgmma reads them, and the stages that they come in.
#pragma once

#include <type_traits>

#include "../mask.cuh"
#include "../softmax.cuh"
#include "primitives.cuh"
#include "tile_sizes.h"

namespace xlnet_kernels::cuda {

template <typename Element, int HEAD_DIM_, bool DROPOUT_, bool POSITIONS_ = false>
struct WarpgroupShape : WarpgroupSizes<HEAD_DIM_> {
  using T = Element;
  static constexpr bool DROPOUT = DROPOUT_, POSITIONS = POSITIONS_;  // POSITIONS: rows have some of their own
  static constexpr int M_TILES = 1;                                  // of 16 rows, of one warp
  // For keys of one segment a way of its own, unless registers are too few for two.
  static constexpr bool HAS_ONE_SEGMENT_WAY = !DROPOUT || HEAD_DIM_ <= 64;
  using Softmax = OnlineSoftmax<M_TILES, HEAD_DIM_ <= 64>;  // tensor cores bound wide heads
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

// A place among COUNT that are used again in turn.
template <int COUNT>
struct CyclicPlace {
  static_assert(POWER_OF_TWO<COUNT> == COUNT);
  uint32_t passed = 0;  // places before it

  DEVICE int index() const { return passed % COUNT; }
  DEVICE uint32_t parity() const { return passed / COUNT % 2; }  // of the phase that fills it
  DEVICE void advance() { ++passed; }
};

// The producer's message: a tile of keys; or, before a tile that does not follow its predecessor, the 128 rows of its
// window of rel_key before the tile's own, and the window's owner.
struct alignas(16) TileInfo {
  uint32_t flags;
  int32_t segment;  // of the first key
  int first, end;   // the first key; or the sorted rows that the window serves
  // Instead of a tile: there are no more; the rows of a window. All keys are of the first one's segment; not all of the
  // block's rows are served. What hides keys, if anything does: ranks, compared by pairs; those and rows' own keys;
  // other things.
  enum : uint32_t { ENDS = 1, BEGINS = 2, ONE_SEGMENT = 4, SOME_ROWS = 8, BY_RANK = 16, OWNS = 32, PAIR_BY_PAIR = 64 };

  DEVICE static uint32_t hidden_by(PairVisibility keys) {
    if (keys.visibility == Visibility::all) return 0;
    if (keys.owns) return OWNS;
    return keys.visibility == Visibility::by_rank ? BY_RANK : PAIR_BY_PAIR;
  }
};

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

// 64 rows, keys or of rel_key, and a bias for each.
template <typename S>
struct BiasedRows {
  char* data;

  DEVICE Panels<typename S::T, S::HEAD_DIM> rows() const { return {data}; }
  DEVICE float* bias() const { return reinterpret_cast<float*>(data + S::MATRIX); }
};

// A tile's keys, values and labels, and the 64 rows of rel_key that are new to it. A window's first 128 rows lie where
// keys and rel_key do.
template <typename S>
struct WarpgroupStage {
  static constexpr int KEYS = S::LABELS, REL_KEY = KEYS + S::BIASED_ROWS, VALUES = REL_KEY + S::BIASED_ROWS;
  char* data;

  DEVICE TileInfo& info() const { return *reinterpret_cast<TileInfo*>(data); }
  DEVICE Barrier full() const { return {reinterpret_cast<uint64_t*>(data + S::INFO)}; }
  DEVICE Barrier empty() const { return {full().state + 1}; }
  DEVICE KeyLabels labels() const {
    int32_t* const words = reinterpret_cast<int32_t*>(data + S::INFO + S::BARRIERS);
    return {words, words + S::BLOCK_N, keys().bias()};
  }
  DEVICE uint32_t* rank_pairs() const { return reinterpret_cast<uint32_t*>(labels().segment + S::BLOCK_N); }
  DEVICE BiasedRows<S> keys() const { return {data + KEYS}; }
  DEVICE BiasedRows<S> rel_key() const { return {data + REL_KEY}; }
  // One or the other by an offset: of two pointers the compiler would forget that they are to shared memory.
  DEVICE BiasedRows<S> keys_or_rel_key(bool is_keys) const { return {data + (is_keys ? KEYS : REL_KEY)}; }
  DEVICE Panels<typename S::T, S::HEAD_DIM> values() const { return {data + VALUES}; }
};

// A stage by its offset, which costs less than its number.
template <typename S>
struct StagePlace {
  int offset = 0;
  uint32_t parity = 0;  // of the phase that fills it

  DEVICE void advance() {
    const bool is_last = offset == S::ALL_STAGES - S::STAGE;
    offset = is_last ? 0 : offset + S::STAGE;
    parity ^= uint32_t(is_last);
  }
};

template <typename S>
struct WarpgroupMemory {
  char* data;

  DEVICE WarpgroupStage<S> stage(int offset) const { return {data + offset}; }

  // The whole block calls it.
  DEVICE void init() const {
    constexpr int WARPS = 4 * S::CONSUMERS;
    if (shared_address(data) % 1024) trap();  // the swizzle's pattern would begin elsewhere
    if (thread_index() == 0) {
      for (int i = 0; i < S::STAGES; ++i) stage(i * S::STAGE).full().init(WARP + 1);
      for (int i = 0; i <= S::STAGES; ++i) stage(i * S::STAGE).empty().init(WARPS);
    }
    for (int i = 0; i < S::STAGES; ++i) clear_key_labels<S::THREADS>(stage(i * S::STAGE).labels(), S::BLOCK_N);
    sync_block();
  }
};

}  // namespace xlnet_kernels::cuda
