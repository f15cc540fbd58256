// The score of a tile, term by term: position, content, then segments and mask in one pass over each row.

// (q + v).r, into the band: each panel of rows needs just its own part of the window.
template <typename T>
static void position_scores(const RelAttention& p, const RowBlock<T>& block, const T* rel_panels, const Tile<T>& tile) {
  const int64_t rows = block.padded(PANEL_ROWS), end = tile.shift[0] + tile.count;
  for (int64_t column = 0; column < end; column += PANEL_WIDTH<T>) {
    const T* panels = rel_panels + (tile.window + column) * p.head_dim;
    for (int64_t r = 0; r < rows; r += PANEL_ROWS)
      if (tile.shift[r + PANEL_ROWS - 1] < column + PANEL_WIDTH<T> && tile.shift[r] + tile.count > column)
        panel_product<T, true>(block.position_panels + r * p.head_dim, panels, p.head_dim, tile.band + r, column);
  }
}

// (q + u).k, added in place to the shifted band
template <typename T>
static void content_scores(const RelAttention& p, const RowBlock<T>& block, const T* key_panels, const Tile<T>& tile) {
  const int64_t rows = block.padded(PANEL_ROWS);
  for (int64_t column = 0; column < tile.count; column += PANEL_WIDTH<T>) {
    const T* panels = key_panels + (tile.first + column) * p.head_dim;
    for (int64_t r = 0; r < rows; r += PANEL_ROWS)
      panel_product<T, false>(block.content_panels + r * p.head_dim, panels, p.head_dim, tile.score + r, column);
  }
}

// Segments and mask over whole vectors of scores; returns their lane-wise maximum.
template <typename T, bool SEGMENTS, bool RANKS>
INLINE Vec<T> segments_and_ranks(const SegmentRow<T> segments, const RankRow<T> ranks, int64_t count, T* score) {
  Vec<T> max = broadcast(-static_cast<T>(INFINITY));
  for (int64_t j = 0; j < count; j += LANES<T>) {
    Vec<T> s = load(score + j);
    if (SEGMENTS) s = segments.add(s, j);
    if (RANKS) s = ranks.hide(s, j);
    if (SEGMENTS || RANKS) store(score + j, s);
    max = maximum<T>(s, max);
  }
  return max;
}

// Labels of a chunk's keys
struct KeyTerms {
  KeySegments segments;
  KeyRanks ranks;

  template <typename T>
  KeyTerms(Carver& carver, const Sizes<T>& sizes)
      : segments(carver, sizes.max_keys), ranks(carver, sizes.max_keys / KEY_GROUP) {}

  void load(const RelAttention& p, const Chunk& chunk) const {
    segments.load(p, chunk);
    ranks.load(p, chunk);
  }
};

// The keys that a row of a tile may see: the first `count`, 0 if it sees none, and their largest score
template <typename T>
struct VisibleKeys {
  int64_t count;
  T max;
};

// Adds the segment term to row r of a tile and hides (-inf) what the row may not see. Past the visible keys, up to
// whole vectors, is -inf too.
template <typename T>
static VisibleKeys<T> segments_and_mask(const RelAttention& p, const KeyTerms& keys, const RowBlock<T>& block,
                                        int64_t r, const Tile<T>& tile) {
  const int64_t b = block.b, row_index = block.row_index[r], first = tile.first;
  const int64_t own_key = p.mem_len + block.position[r], own = own_key - tile.first_key;
  const Reach range(p, own_key, own_key);
  const int64_t before = larger(range.begin - tile.first_key, 0),
                count = smaller(tile.count, range.end - tile.first_key);
  if (count <= before) return {0, 0};
  T* score = tile.score[r];
  const int64_t whole = round_up(count, LANES<T>);
  const auto hide_without_ranks = [&] {
    for (int64_t j = 0; j < before; ++j) score[j] = -static_cast<T>(INFINITY);
    for (int64_t j = count; j < whole; ++j) score[j] = -static_cast<T>(INFINITY);
    hide_by_dense_mask(p, b, block.h, row_index, tile.first_key, count, score);
  };
  hide_without_ranks();

  const SegmentRow<T> segments(p, keys.segments, first, b, row_index, block.segments.different[r]);
  const RankRow<T> ranks(p, keys.ranks, first, count, b, row_index, own);
  if (!ranks.sees_any && !ranks.sees_self) return {0, 0};
  const T own_score = ranks.sees_self ? segments.add_one(score[own], own) : T(0);
  Vec<T> max;
  if (!segments.used && ranks.sees_all) {
    max = segments_and_ranks<T, false, false>(segments, ranks, whole, score);
  } else if (!segments.used) {
    max = segments_and_ranks<T, false, true>(segments, ranks, whole, score);
  } else if (ranks.sees_all) {
    max = segments_and_ranks<T, true, false>(segments, ranks, whole, score);
  } else {
    max = segments_and_ranks<T, true, true>(segments, ranks, whole, score);
  }
  VisibleKeys<T> visible{count, maximum_of<T>(max)};
  if (ranks.sees_self) {
    score[own] = own_score;
    if (own_score > visible.max) visible.max = own_score;
  }
  if (!is_finite(segments.different)) {  // added to -inf it may have undone what was hidden before
    hide_without_ranks();
    visible.max = maximum_of<T>(segments_and_ranks<T, false, false>(segments, ranks, whole, score));
  }
  return visible;
}
