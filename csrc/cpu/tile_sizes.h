// Sizes of tiles: query rows, keys, and the groups of keys that are skipped together.
#pragma once

#include "vector.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

constexpr int64_t BLOCK_M = 48;            // query rows of a tile at most; a multiple of every register tile's height
constexpr int64_t MAX_ROWS = 64;           // rows of a block of any kernel at most, those of bfloat16/scores.h
constexpr int64_t FORWARD_BLOCK_N = 576;   // keys of a tile at most
constexpr int64_t BACKWARD_BLOCK_N = 288;  // keys of a tile of backward at most
constexpr int64_t KEY_GROUP = 96;          // keys that are skipped or taken together
constexpr int64_t RANGE_GROUPS = RANGE_KEYS / KEY_GROUP;  // that backward takes all rows through, then the next
constexpr int64_t MAX_SPAN = 512;                         // largest difference of positions within a block of rows

constexpr int64_t SHORT_LENGTH = 256;  // rows, at most, of a sequence that is prefetched during work on another

// A tile begins at a multiple of this: whole vectors, and whole register tiles of keys.
constexpr int64_t KEY_STEP = KEY_GROUP / 2;

static_assert(BLOCK_M % PANEL_ROWS == 0 && BLOCK_M % ROW_ROWS == 0, "a block is whole register tiles");
static_assert(KEY_STEP % ROW_ROWS == 0 && KEY_STEP % LANES<float> == 0, "a key step is whole register tiles");

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
