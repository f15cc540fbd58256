// Shared memory of backward by warpgroups.
#pragma once

#include "memory.cuh"

namespace xlnet_kernels::cuda {

// POSITIONS: rows have some of their own. ORDERED: consumers add in the order of their keys; a kernel of its own,
// because others have no registers for it.
template <typename Element, int HEAD_DIM_, bool DROPOUT_, bool POSITIONS_, bool ORDERED_>
struct WarpgroupBackwardShape : WarpgroupBackwardSizes<HEAD_DIM_, POSITIONS_> {
  using T = Element;
  static constexpr bool DROPOUT = DROPOUT_, POSITIONS = POSITIONS_, ORDERED = ORDERED_;
};

// 64 rows of 16-bit numbers that threads store from registers and wgmma reads without swizzle: chunks of eight columns,
// of all rows each, so that eight columns further on is a constant away.
template <typename T>
struct Chunks {
  static constexpr int ROW = 16, EIGHT_ROWS = 8 * ROW, EIGHT_COLUMNS = 64 * ROW;
  static constexpr int STEP = EIGHT_COLUMNS / int(sizeof(T));  // elements
  char* data;

  DEVICE T* at(int row, int column) const {
    return reinterpret_cast<T*>(data + column / 8 * EIGHT_COLUMNS + row * ROW) + column % 8;
  }
  // a(m, k) = (row m, column + k)
  DEVICE uint64_t columns_from(int column) const {
    return plain_descriptor(data, column / 8 * EIGHT_COLUMNS, EIGHT_COLUMNS, EIGHT_ROWS);
  }
  // a(m, k) = (row + k, column + m)
  DEVICE uint64_t rows_from(int row, int column) const {
    return plain_descriptor(data, column / 8 * EIGHT_COLUMNS + row * ROW, EIGHT_ROWS, EIGHT_COLUMNS);
  }
  // 16 x 16 of them as a warp's fragment
  DEVICE Fragment load(int row, int column, int lane) const {
    Fragment a;
    ldmatrix(a.word, at(row + lane % 16, column + lane / 16 * 8));
    return a;
  }
  DEVICE Fragment load_transposed(int row, int column, int lane) const {
    Fragment a;
    ldmatrix_transposed(a.word, at(row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8));
    return a;
  }
};

// The producer's message with a tile of rows, in one word, which takes one pass through shared memory: its number, and
// behind it the visibility of each consumer's keys to it.
struct RowTileInfo {
  // the tile's window of rel_key does not go on from that of the tile before; by_rank, and rows see their own keys as
  // well: of the first consumer's keys, of the second one's
  enum : uint32_t { BEGINS_RUN = 16, OWNS = 32 };
  static constexpr uint32_t NO_TILE = 0xffffff;  // there are no more
  uint32_t word;

  DEVICE static RowTileInfo of(uint32_t tile) { return {tile << 8}; }
  DEVICE void add(int consumer, PairVisibility of_keys) {
    word |= uint32_t(of_keys.visibility) << (2 * consumer) | (of_keys.owns ? OWNS << consumer : 0);
  }
  DEVICE uint32_t tile() const { return word >> 8; }
  DEVICE bool has(uint32_t flag) const { return word & flag; }
  DEVICE PairVisibility visibility(int consumer) const {
    return {Visibility(word >> (2 * consumer) & 3), has(OWNS << consumer)};
  }
};

// A run of rows that have positions of their own, announced with its tile: where each is in the tensors, -1 where the
// run has less than 64 or a row sees nothing; by how much it is shifted, -1 where there is none; the first one among
// the sorted rows, and the position of the last one.
struct alignas(16) SortedRows {
  int index[64];
  int8_t shift[64];
  int first, last_position;
};

// Statistics of a stage's rows for the softmax of backward; segments and ranks where there are any.
struct StageRows {
  float value[ROW_VALUES][64];
  int32_t segment[64], rank[64];
};

template <typename S>
struct BackwardWarpgroupMemory {
  using T = typename S::T;
  using Rows = Panels<T, S::HEAD_DIM>;
  char* data;

  DEVICE Rows matrix(int index) const { return {data + index * S::MATRIX}; }
  DEVICE Rows keys(int consumer) const { return matrix(2 * consumer); }
  DEVICE Rows values(int consumer) const { return matrix(2 * consumer + 1); }
  DEVICE Rows rel_key(int slot) const { return matrix(2 * S::CONSUMERS + slot); }
  DEVICE Rows queries(int stage) const { return matrix(2 * S::CONSUMERS + S::SLOTS + 2 * stage); }
  DEVICE Rows grad_out(int stage) const { return matrix(2 * S::CONSUMERS + S::SLOTS + 2 * stage + 1); }

  // Scores of a consumer
  DEVICE char* scores(int consumer) const {
    return data + S::MATRICES * S::MATRIX + consumer * (2 * S::SCORES + S::BAND);
  }
  DEVICE Chunks<T> probability(int consumer) const { return {scores(consumer)}; }
  DEVICE Chunks<T> dS(int consumer) const { return {scores(consumer) + S::SCORES}; }
  DEVICE Chunks<T> band(int consumer) const { return {scores(consumer) + 2 * S::SCORES}; }

  DEVICE KeyLabels labels() const { return key_labels_at(scores(S::CONSUMERS), S::KEYS); }
  DEVICE char* behind_labels() const { return reinterpret_cast<char*>(labels().bias + S::KEYS); }
  // Ranks of a consumer's keys (mask.cuh), if HAS_RANK_PAIRS; else v.r lies there.
  DEVICE uint32_t* rank_pairs(int consumer) const {
    return reinterpret_cast<uint32_t*>(behind_labels()) + consumer * S::BLOCK_N;
  }
  DEVICE float* rel_bias(int slot) const {  // v.r of the slot's rows
    return reinterpret_cast<float*>(behind_labels() + S::RANK_PAIRS) + slot * 64;
  }
  // Statistics of a stage's rows, if HAS_ROW_VALUES; else the messages lie there.
  DEVICE StageRows& row_values(int stage) const {
    static_assert(!S::HAS_ROW_VALUES || sizeof(StageRows) == S::STAGE_ROWS);
    return reinterpret_cast<StageRows*>(rel_bias(S::SLOTS))[stage];
  }
  DEVICE RowTileInfo& info(int stage) const {
    char* const first = reinterpret_cast<char*>(rel_bias(S::SLOTS)) + S::STAGES * S::STAGE_ROWS;
    return reinterpret_cast<RowTileInfo*>(first)[stage];
  }
  // The block's among those that have begun, if ORDERED.
  DEVICE int32_t& block_number() const { return reinterpret_cast<int32_t*>(&info(0))[S::STAGES]; }
  DEVICE SortedRows& rows(int stage) const {
    static_assert(!S::POSITIONS || sizeof(SortedRows) == S::SORTED_ROWS);
    return reinterpret_cast<SortedRows*>(reinterpret_cast<char*>(&info(0)) + 16)[stage];
  }
  DEVICE Barrier barrier(int index) const {
    return {reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(&info(0)) + S::INFO) + index};
  }

  // Filled and emptied: of stages, of slots; the keys are filled once
  DEVICE Barrier full_stage(int stage) const { return barrier(stage); }
  DEVICE Barrier empty_stage(int stage) const { return barrier(S::STAGES + stage); }
  DEVICE Barrier full_slot(int slot) const { return barrier(2 * S::STAGES + slot); }
  DEVICE Barrier empty_slot(int slot) const { return barrier(2 * S::STAGES + S::SLOTS + slot); }
  DEVICE Barrier full_keys() const { return barrier(2 * (S::STAGES + S::SLOTS)); }
  // If ORDERED, once for each tile of rows: the consumer may add, and has added.
  DEVICE Barrier may_add(int consumer) const { return barrier(2 * (S::STAGES + S::SLOTS) + 1 + consumer); }
  DEVICE Barrier has_added(int consumer) const { return may_add(S::CONSUMERS + consumer); }

  // The whole block calls it. begun: how many blocks have, if ORDERED.
  DEVICE void init(int32_t* begun) const {
    constexpr int WARPS = 4 * S::CONSUMERS;
    if (shared_address(data) % 1024) trap();  // the swizzle's pattern would begin elsewhere
    if (thread_index() == 0) {
      if constexpr (S::ORDERED) block_number() = count_up(begun);
      for (int i = 0; i < S::STAGES; ++i) full_stage(i).init(WARP + 1), empty_stage(i).init(WARPS);
      for (int i = 0; i < S::SLOTS; ++i) full_slot(i).init(WARP), empty_slot(i).init(WARPS);
      full_keys().init(WARP);
      for (int i = 0; i < S::CONSUMERS; ++i) may_add(i).init(1), has_added(i).init(WARPS / S::CONSUMERS);
    }
    clear_key_labels<S::THREADS>(labels(), S::KEYS);
    // what no dS is stored to stays zero: each row has its place in every tile, or clears what it leaves
    for (int consumer = 0; consumer < S::CONSUMERS; ++consumer)
      for (int i = thread_index(); i < S::BAND / 16; i += S::THREADS)
        reinterpret_cast<Bytes16*>(band(consumer).data)[i] = {};
    sync_block();
  }
};

}  // namespace xlnet_kernels::cuda
