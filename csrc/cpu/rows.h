// Load: a block of query rows in the order of their positions, with the biases of each term.
#pragma once

#include "chunks.h"
#include "mask.h"
#include "pack.h"
#include "segments.h"
#include "softmax.h"
#include "tile_sizes.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

// Biases of one head in the work type
template <typename T>
struct HeadTerms {
  T *content_bias, *position_bias;
  SegmentTerms<T> segments;

  HeadTerms(Carver& carver, const Sizes<T>& sizes) : segments(carver, sizes) {
    carver.take(sizes.padded_dim, content_bias, position_bias);
  }

  void load(const RelAttention& p, int64_t h, int64_t padded_dim) const {
    read_parameter(p, p.content_bias, h, padded_dim, content_bias);
    read_parameter(p, p.position_bias, h, padded_dim, position_bias);
    segments.load(p, h, padded_dim);
  }
};

// A block of rows for all terms but position and content
template <typename T>
struct BlockRows {
  int64_t b, h;
  int64_t count;                // rows
  int64_t row_index[MAX_ROWS];  // in query
  int64_t position[MAX_ROWS];   // ascending
  SegmentRows<T> segments;
  MaskRows mask;

  void start(const Chunk& chunk) {
    b = chunk.b;
    h = chunk.h;
    count = 0;
    mask.start();
  }

  // Whether the row that comes `sorted`-th by position joins the block: at most max_rows within max_span positions. If
  // so it is row `count`; its query, in the work type, goes to segments.query before end_row.
  bool begin_row(const RelAttention& p, const Chunk& chunk, int64_t sorted, int64_t max_rows,
                 int64_t max_span = MAX_SPAN) {
    if (sorted == chunk.end || count == max_rows) return false;
    row_index[count] = row_index_at(p, b, sorted);
    position[count] = position_at(p, b, sorted);
    return position[count] - position[0] <= max_span;
  }
  void end_row(const RelAttention& p, const SegmentTerms<T>& terms, int64_t padded_dim) {
    segments.load_row(p, terms, count, static_cast<T>(p.scale * LOG2E), padded_dim);
    mask.add_row(p, b, count, row_index[count], position[count]);
    ++count;
  }
};

template <typename T>
struct RowBlock : BlockRows<T> {
  T *content_query, *position_query;    // rows q + u and q + v, scaled so that scores are powers of 2
  T *content_panels, *position_panels;  // the same as panel products want them
  using BlockRows<T>::count, BlockRows<T>::segments;

  RowBlock(Carver& carver, const Sizes<T>& sizes) {
    carver.take(elements(sizes), content_query, position_query, segments.query, content_panels, position_panels);
  }

  // One block of rows, and the rows past its end that transposing touches
  static int64_t elements(const Sizes<T>& sizes) { return (BLOCK_M + 2 * LANES<T>)*sizes.padded_dim; }

  void clear_row(int64_t r, int64_t padded_dim) const {
    clear(padded_dim, content_query + r * padded_dim, position_query + r * padded_dim, segments.query + r * padded_dim);
  }

  int64_t padded(int64_t register_rows) const { return round_up(count, register_rows); }
};

// The block's rows, not as panels: with their biases, or without them in content_query alone
template <typename T, bool WITH_BIASES = true>
static void load_queries(const RelAttention& p, const Sizes<T>& sizes, const HeadTerms<T>& terms, const Chunk& chunk,
                         int64_t begin, int64_t max_rows, int64_t max_span, RowBlock<T>& block) {
  const T scale = static_cast<T>(p.scale * LOG2E);
  const int64_t dim = sizes.padded_dim;
  block.start(chunk);
  for (int64_t sorted = begin; block.begin_row(p, chunk, sorted, max_rows, max_span); ++sorted) {
    const int64_t r = block.count, ahead = sorted + ROWS_AHEAD;
    if (ahead < chunk.end)
      prefetch_row(p, p.rows.query, block.b, block.h, row_index_at(p, block.b, ahead), bytes_of(p.dtype));
    T *content = block.content_query + r * dim, *relative = block.position_query + r * dim;
    T* query = block.segments.query + r * dim;
    read_row(p, p.rows.query, block.b, block.h, block.row_index[r], dim, query);
    for (int64_t d = 0; d < dim; d += LANES<T>) {
      const Vec<T> q = load(query + d);
      if constexpr (WITH_BIASES) {
        store(content + d, (q + load(terms.content_bias + d)) * scale);
        store(relative + d, (q + load(terms.position_bias + d)) * scale);
      } else {
        store(content + d, q);
      }
    }
    block.end_row(p, terms.segments, dim);
  }
}

// Rows with their biases and panels of them
template <typename T>
static void load_rows(const RelAttention& p, const Sizes<T>& sizes, const HeadTerms<T>& terms, const Chunk& chunk,
                      int64_t begin, RowBlock<T>& block) {
  const int64_t dim = sizes.padded_dim;
  load_queries(p, sizes, terms, chunk, begin, BLOCK_M, MAX_SPAN, block);
  transpose_row_panels(block.content_query, block.count, dim, p.head_dim, Panels<T>{block.content_panels});
  transpose_row_panels(block.position_query, block.count, dim, p.head_dim, Panels<T>{block.position_panels});
}

// Panels alone
template <typename T>
static void load_panels(const RelAttention& p, const Sizes<T>& sizes, const HeadTerms<T>& terms, const Chunk& chunk,
                        int64_t begin, RowBlock<T>& block) {
  const int64_t dim = sizes.padded_dim;
  load_queries<T, false>(p, sizes, terms, chunk, begin, BLOCK_M, MAX_SPAN, block);
  const BiasedPanels<T> panels{block.content_panels, block.position_panels, terms.content_bias, terms.position_bias,
                               static_cast<T>(p.scale * LOG2E)};
  transpose_row_panels(block.content_query, block.count, dim, p.head_dim, panels);
}

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
