// Load: a block of query rows in the order of their positions, with the biases of each term.

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

template <typename T>
struct RowBlock {
  int64_t b, h;
  int64_t count;                        // rows, at most BLOCK_M
  int64_t row_index[BLOCK_M];           // in query
  int64_t position[BLOCK_M];            // ascending
  T *content_query, *position_query;    // rows q + u and q + v, scaled so that scores are powers of 2
  T *content_panels, *position_panels;  // the same as panel products want them
  SegmentRows<T> segments;
  MaskRows mask;

  RowBlock(Carver& carver, const Sizes<T>& sizes) {
    carver.take(elements(sizes), content_query, position_query, segments.query, content_panels, position_panels);
  }

  // One block of rows, and what transposing it touches past the end
  static int64_t elements(const Sizes<T>& sizes) { return (BLOCK_M + 2 * LANES<T>)*sizes.padded_dim; }

  void clear_row(int64_t r, int64_t padded_dim) const {
    clear(padded_dim, content_query + r * padded_dim, position_query + r * padded_dim, segments.query + r * padded_dim);
  }

  int64_t padded(int64_t register_rows) const { return round_up(count, register_rows); }
};

// Sorted rows begin .. of a chunk, as many as a block holds and as lie within MAX_SPAN positions.
template <typename T>
static void load_rows(const RelAttention& p, const Sizes<T>& sizes, const HeadTerms<T>& terms, const Chunk& chunk,
                      int64_t begin, RowBlock<T>& block) {
  const T scale = static_cast<T>(p.scale * LOG2E);
  const int64_t dim = sizes.padded_dim, b = block.b = chunk.b, h = block.h = chunk.h;
  block.mask.start();
  block.count = 0;
  for (int64_t sorted = begin; sorted < chunk.end && block.count < BLOCK_M; ++sorted) {
    const int64_t r = block.count, row_index = row_index_at(p, b, sorted), position = position_at(p, b, sorted);
    if (r > 0 && position - block.position[0] > MAX_SPAN) break;
    block.row_index[r] = row_index;
    block.position[r] = position;
    T *content = block.content_query + r * dim, *relative = block.position_query + r * dim;
    T* query = block.segments.query + r * dim;
    read_row(p, p.rows.query, b, h, row_index, dim, query);
    for (int64_t d = 0; d < dim; d += LANES<T>) {
      const Vec<T> q = load(query + d);
      store(content + d, (q + load(terms.content_bias + d)) * scale);
      store(relative + d, (q + load(terms.position_bias + d)) * scale);
    }
    block.segments.load_row(terms.segments, r, scale, dim);
    block.mask.add_row(p, b, r, row_index, position);
    ++block.count;
  }
  // Rows that only fill a register tile repeat the last one.
  const int64_t last = (block.count - 1) * dim;
  for (int64_t r = block.count; r < block.padded(PANEL_ROWS); ++r) {
    memcpy(block.content_query + r * dim, block.content_query + last, static_cast<size_t>(dim) * sizeof(T));
    memcpy(block.position_query + r * dim, block.position_query + last, static_cast<size_t>(dim) * sizeof(T));
  }
  transpose_row_panels(block.content_query, block.count, dim, p.head_dim, block.content_panels);
  transpose_row_panels(block.position_query, block.count, dim, p.head_dim, block.position_panels);
}
