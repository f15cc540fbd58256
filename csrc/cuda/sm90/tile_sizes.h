// The warpgroup kernels' tiles, threads, registers and shared memory. No CUDA and no torch here.
#pragma once

#include "../tile_sizes.h"

namespace xlnet_kernels::cuda {

// Head dims that they are compiled for
using WarpgroupHeadDims = std::integer_sequence<int, 64, 128>;

template <int HEAD_DIM_>
struct WarpgroupSizes {
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int CONSUMERS = 2, BLOCK_M = 64 * CONSUMERS, BLOCK_N = 64, THREADS = 128 * (1 + CONSUMERS);
  // Registers of a thread: when the block starts, equal for all, as many as a multiprocessor has; then no more than
  // those in all, or the consumers would wait for ever.
  static constexpr int START_REGISTERS = 65536 / THREADS / 8 * 8;
  static constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
  static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (1 + CONSUMERS) * START_REGISTERS);
  static constexpr int STAGES = 4;  // of keys, values and as many rows of rel_key
  // A consumer keeps one stage, no more, while it waits for the next one.
  static_assert(STAGES >= 2);
  // Rows with a bias each behind them, and where a stage begins: the swizzle's pattern goes on every 1024 bytes.
  static constexpr int MATRIX = BLOCK_N * HEAD_DIM * 2, BIASED_ROWS = MATRIX + 1024, LABELS = 1024;
  static constexpr int STAGE = LABELS + 2 * BIASED_ROWS + MATRIX, ALL_STAGES = STAGES * STAGE;
  static constexpr int INFO = 16, BARRIERS = 2 * 8;
  static_assert(INFO + BARRIERS + BLOCK_N * (4 + 4 + 2) <= LABELS);
  static constexpr int SHARED = ALL_STAGES + INFO + BARRIERS;  // barriers without a stage come after the last one's
};

// Backward: a block has 64 keys of each of two consumer warpgroups, and goes to tiles of 64 rows.
template <int HEAD_DIM_, bool POSITIONS_ = false>
struct WarpgroupBackwardSizes {
  static constexpr int HEAD_DIM = HEAD_DIM_, COLUMNS = HEAD_DIM;
  static constexpr int CONSUMERS = 2, BLOCK_M = 64, BLOCK_N = 64, KEYS = BLOCK_N * CONSUMERS;  // BLOCK_N: of a consumer
  static constexpr int THREADS = 128 * (1 + CONSUMERS), START_REGISTERS = 65536 / THREADS / 8 * 8;
  static constexpr int PRODUCER_REGISTERS = POSITIONS_ && HEAD_DIM <= 64 ? 56 : 40;
  static constexpr int CONSUMER_REGISTERS = POSITIONS_ && HEAD_DIM <= 64 ? 224 : 232;
  static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (1 + CONSUMERS) * START_REGISTERS);
  // Kept by consumers, where there are registers for it. REL_KEY: the lower half of a window is the next one's upper
  // half, whose dR is then added to global memory once.
  static constexpr bool QUERY_IN_REGISTERS = HEAD_DIM <= 64, BAND_IN_REGISTERS = QUERY_IN_REGISTERS && !POSITIONS_,
                        KEEPS_REL_KEY = BAND_IN_REGISTERS, KEEPS_BIAS = BAND_IN_REGISTERS;
  static constexpr int STAGES = HEAD_DIM > 64 ? 1 : 2;  // of rows
  // Slots of 64 rows of rel_key: three for one tile of rows, and the next one's first; all of the next one's where
  // windows share no slot, if there is room.
  static constexpr int SLOTS = POSITIONS_ && HEAD_DIM <= 64 ? 8 : 4;
  static constexpr int MATRIX = 64 * HEAD_DIM * 2, MATRICES = 2 * CONSUMERS + 2 * STAGES + SLOTS;
  static constexpr int SCORES = BLOCK_M * BLOCK_N * 2, BAND = 2 * SCORES;
  static constexpr int LABELS = 3 * KEYS * 4, BIAS = 64 * 4, BARRIERS = (1 + 2 * (STAGES + SLOTS + CONSUMERS)) * 8;
  // Where there is room: ranks of keys by pairs, with the stride of other labels to be a constant away from them, and
  // of each row of a stage its ROW_VALUES, segment and rank.
  static constexpr bool HAS_RANK_PAIRS = HEAD_DIM <= 64 || !POSITIONS_, HAS_ROW_VALUES = HEAD_DIM <= 64;
  static constexpr int RANK_PAIRS = HAS_RANK_PAIRS ? KEYS * 2 + BLOCK_N * 2 : 0;
  static constexpr int STAGE_ROWS = HAS_ROW_VALUES ? 6 * BLOCK_M * 4 : 0;
  static constexpr int MESSAGES = (STAGES + 2) / 2 * 8;  // a word for each stage, one for the block's number
  static constexpr int SORTED_ROWS = BLOCK_M * 5 + 16, INFO = POSITIONS_ ? 16 + STAGES * SORTED_ROWS : MESSAGES;
  static constexpr int SHARED =
      MATRICES * MATRIX + CONSUMERS * (2 * SCORES + BAND) + LABELS + RANK_PAIRS + SLOTS * BIAS + STAGES * STAGE_ROWS +
      INFO + BARRIERS;
  static_assert(SHARED <= 227 * 1024);  // of a block on sm_90
};

}  // namespace xlnet_kernels::cuda
