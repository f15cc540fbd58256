// Rows and scores of the bfloat16 kernels. Band and scores are two float32 buffers here, since tiles in registers want
// rows of equal distance; the shift is the address at which a row of the band is added to its scores.
#pragma once

#include "../chunks.h"
#include "../rows.h"
#include "../scores.h"
#include "operands.h"
#include "products.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

constexpr int64_t BFLOAT16_ROWS = 64;  // query rows of a tile at most, whole DEPTH_STEPs: backward sums over them
static_assert(BFLOAT16_ROWS <= MAX_ROWS && BFLOAT16_ROWS % DEPTH_STEP == 0, "rows are depth as well");
static_assert(KEY_STEP % PAIR_COLUMNS == 0, "tiles begin at whole panels");

struct BFloat16Sizes : Sizes<float> {
  int64_t columns;            // D rounded up to whole panels; padded_dim: to whole steps
  int64_t to_low = 0;         // from an operand's number to its low part, in numbers; 0: it has none
  int64_t operand_bytes = 0;  // of a task's memory, before everything else

  BFloat16Sizes(const RelAttention& p, int64_t min_chunk_rows) : Sizes<float>(p, min_chunk_rows) {
    padded_dim = round_up(p.head_dim, DEPTH_STEP);
    columns = round_up(p.head_dim, PAIR_COLUMNS);
    chunk_rows = round_up(chunk_rows, BFLOAT16_ROWS);
    chunks = (p.length + chunk_rows - 1) / chunk_rows;
    max_keys = max_window_rows = 0;
    for (int64_t task = 0; p.heads > 0 && task < chunks * p.batch; ++task) {
      const Chunk chunk(p, *this, task * p.heads);
      max_keys = larger(max_keys, larger(keys(chunk), chunk.padded_keys));
      max_window_rows = larger(max_window_rows, window_rows(p, chunk));
    }
    max_keys = round_up(max_keys, KEY_GROUP);
  }

  // Operands take `bytes`. Where they have two parts, the low parts follow in the same order.
  void place(const RelAttention& p, int64_t bytes) {
    bytes = round_up(bytes, 64);
    to_low = p.operand_parts == 2 ? bytes / 2 : 0;
    operand_bytes = p.operand_parts == 2 ? 2 * bytes : bytes;
  }

  // Packed keys of a chunk: tiles begin at whole panels and end after whole steps.
  static int64_t keys(const Chunk& chunk) { return round_up(chunk.keys, PAIR_COLUMNS) + PAIR_COLUMNS; }
  // Packed rows of rel_key: tiles of the band begin and end at whole steps.
  static int64_t window_rows(const RelAttention& p, const Chunk& chunk) {
    const int64_t span = chunk.last_position - position_at(p, chunk.b, chunk.begin);
    return round_up(keys(chunk) + span + 2 * DEPTH_STEP, DEPTH_STEP);
  }
};

struct BFloat16Rows : BlockRows<float> {
  uint16_t* operand;  // [BFLOAT16_ROWS][dim], zeros past the rows

  BFloat16Rows(Carver& carver, Carver& operands, const BFloat16Sizes& sizes) {
    carver.take(BFLOAT16_ROWS * sizes.padded_dim, segments.query);
    operands.take(BFLOAT16_ROWS * sizes.padded_dim, operand);
  }

  int64_t padded() const { return round_up(count, DEPTH_STEP); }

  void load(const RelAttention& p, const BFloat16Sizes& sizes, const HeadTerms<float>& terms, const Chunk& chunk,
            int64_t begin) {
    const int64_t dim = sizes.padded_dim;
    start(chunk);
    for (int64_t sorted = begin; begin_row(p, chunk, sorted, BFLOAT16_ROWS); ++sorted) {
      copy_row(p, {{p.rows.query, {}}, {p.length, 0}, 0}, b, h, row_index[count], dim, operand + count * dim,
               sizes.to_low);
      read_copied(operand + count * dim, sizes.to_low, dim, segments.query + count * dim);
      end_row(p, terms.segments, dim);
    }
    for_each_part(sizes.to_low, [&](int64_t part) { clear((padded() - count) * dim, operand + part + count * dim); });
  }
};

// A block of rows against a run of keys. As Tile, but the window begins at a whole step of rel_key's packed rows.
struct BFloat16Tile {
  int64_t first, count, steps;          // of the chunk's keys; `count` rounded up to whole steps
  int64_t first_key;                    // `first` among all keys
  int64_t window_start, width, stride;  // packed row of rel_key at band column 0, columns, from row to row
  int64_t shift[MAX_ROWS];              // descending

  // Numbers in the band of `rows` rows against block_n keys
  static constexpr int64_t band_elements(int64_t block_n) {
    return BFLOAT16_ROWS * (block_n + MAX_SPAN + 4 * DEPTH_STEP);
  }

  BFloat16Tile(const BFloat16Rows& rows, const Chunk& chunk, int64_t first, int64_t count)
      : first(first), count(count), steps(round_up(count, DEPTH_STEP)), first_key(chunk.first_key + first) {
    // Packed row of rel_key that position 0 would take for key `first`
    const int64_t zero_row = chunk.last_position + first;
    window_start = (zero_row - rows.position[rows.count - 1]) / DEPTH_STEP * DEPTH_STEP;
    for (int64_t r = 0; r < rows.padded(); ++r)
      shift[r] = zero_row - rows.position[smaller(r, rows.count - 1)] - window_start;
    width = round_up(zero_row - rows.position[0] - window_start + steps, DEPTH_STEP);
    stride = width + DEPTH_STEP / 2;  // an odd number of cache lines, so that rows do not fight for the same sets
  }
};

// q.k + u.k of a tile into `scores`, rows `stride` apart, and q.r + v.r into its band
static void bfloat16_scores(const Products& products, const BFloat16Sizes& sizes, const BFloat16Rows& rows,
                            const BFloat16Tile& tile, const Operand& keys, const Operand& rel_key, float* band,
                            float* scores, int64_t stride) {
  const int64_t dim = sizes.padded_dim, panel = PAIR_COLUMNS * dim;
  for (int64_t r = 0; r < rows.padded(); r += DEPTH_STEP) {
    const int64_t begin = tile.shift[r + DEPTH_STEP - 1] / PAIR_COLUMNS * PAIR_COLUMNS;
    const int64_t end = round_up(tile.shift[r] + tile.count, PAIR_COLUMNS), start = tile.window_start + begin;
    products.multiply({rows.operand + r * dim, dim, rel_key.along + start * dim, panel, band + r * tile.stride + begin,
                       tile.stride, PAIR_COLUMNS, DEPTH_STEP, end - begin, dim, rel_key.offsets + start, sizes.to_low});
  }
  products.multiply({rows.operand, dim, keys.along + tile.first * dim, panel, scores, stride, PAIR_COLUMNS,
                     rows.padded(), round_up(tile.count, PAIR_COLUMNS), dim, keys.offsets + tile.first, sizes.to_low});
}

// Segments and mask of row r, whose two terms are added here and become powers of 2
static VisibleKeys<float> bfloat16_segments_and_mask(const RelAttention& p, const KeyTerms& keys,
                                                     const BFloat16Rows& rows, int64_t r, const BFloat16Tile& tile,
                                                     const float* band, float* score) {
  const SummedScores<float> scores{score, band + r * tile.stride + tile.shift[r], static_cast<float>(p.scale * LOG2E)};
  return segments_and_mask<float>(p, keys, rows, r, tile, scores);
}

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
