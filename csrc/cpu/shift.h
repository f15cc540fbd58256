// The relative shift, by aliasing: row r of the band holds (q_r + v).R[t] for t = window_start, ...; the same
// memory, read from shift[r] on, is the row's scores, key by key. Backward goes the same way back: dS, stored through
// the shifted rows, is the band of dS once the corners around it are zero.
#pragma once

#include "chunks.h"
#include "gemm.h"
#include "rows.h"
#include "tile_sizes.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

constexpr int64_t BAND_MARGIN = 16;  // zeros on both sides of a row of dS
static_assert(BAND_MARGIN >= ROW_ROWS && BAND_MARGIN >= PANEL_ROWS, "a margin is at least a register tile high");

template <typename T>
struct Tile {
  int64_t first, count;    // of the chunk's keys
  int64_t first_key;       // the same among all keys
  int64_t window_start;    // packed row of rel_key at band column 0
  int64_t shift[BLOCK_M];  // descending
  T* band[BLOCK_M];
  T* score[BLOCK_M];  // band[r] + shift[r]

  static constexpr int64_t elements(int64_t block_n) {
    return BLOCK_M * (block_n + MAX_SPAN + 2 * BAND_MARGIN + 4 * PANEL_WIDTH<T>);
  }

  // Packed rel_key row t belongs to the chunk's key j and position last_position - t + j.
  Tile(const RowBlock<T>& block, const Chunk& chunk, int64_t first, int64_t count, T* buffer)
      : first(first), count(count), first_key(chunk.first_key + first) {
    const int64_t rows = larger(block.padded(PANEL_ROWS), block.padded(ROW_ROWS));
    const int64_t last_position = chunk.last_position;
    const int64_t low = last_position - block.position[block.count - 1] + first;
    const int64_t span = block.position[block.count - 1] - block.position[0];
    window_start = low / LANES<T> * LANES<T>;
    int64_t stride = round_up(2 * BAND_MARGIN + span + count + 3 * PANEL_WIDTH<T>, LANES<T>);
    if (stride * sizeof(T) % 1024 == 0) stride += LANES<T>;  // rows a power of two apart would fight for cache sets
    for (int64_t r = 0; r < rows; ++r) {
      shift[r] = last_position - block.position[smaller(r, block.count - 1)] + first - window_start;
      band[r] = buffer + r * stride + BAND_MARGIN;
      score[r] = band[r] + shift[r];
    }
  }

  // Rows from `real` to `padded`, which only fill a register tile, become the last real row.
  void repeat_last_row(int64_t real, int64_t padded) {
    for (int64_t r = real; r < padded; ++r) {
      score[r] = score[real - 1];
      band[r] = band[real - 1];
      shift[r] = shift[real - 1];
    }
  }

  // Zeros around each row of dS, as far as products over the band reach: the columns of its register tile and a margin.
  void clear_corners(int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t top = r / ROW_ROWS * ROW_ROWS, bottom = smaller(top + ROW_ROWS, rows) - 1;  // of the register tile
      const int64_t low = smaller(shift[bottom], shift[r] - BAND_MARGIN);
      const int64_t high = larger(shift[top], shift[r] + BAND_MARGIN) + count;
      for (int64_t t = low; t < shift[r]; ++t) band[r][t] = 0;
      for (int64_t t = shift[r] + count; t < high; ++t) band[r][t] = 0;
    }
  }
};

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
