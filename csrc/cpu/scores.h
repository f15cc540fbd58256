// Scores of a block of rows against a run of keys: the position band first, the content product onto its shifted rows.

// The buffer of a step. Row r of the band starts at band[r] and holds (q_r + v).R[t] for t = window, window + 1, ...;
// the same memory from view[r] on, its own shift further, is its row of scores.
template <typename T>
struct Step {
  int64_t first, count;       // keys
  int64_t window;             // packed row of rel_key at band column 0
  int64_t shift[BLOCK_ROWS];  // view[r] - band[r], descending
  T* band[BLOCK_ROWS];
  T* view[BLOCK_ROWS];
};

template <typename T>
constexpr int64_t band_elements(int64_t step_keys) {
  return BLOCK_ROWS * (step_keys + MAX_SPAN + 2 * MARGIN + 4 * PANEL_WIDTH<T>);
}

// `last_position` is that of packed rel_key row 0: row t of it belongs to key j and position last_position - t + j.
template <typename T>
static void place_rows(const Block<T>& block, int64_t last_position, int64_t first, int64_t count, T* buffer,
                       Step<T>& step) {
  const int64_t rows = block.padded(PANEL_ROWS > ROW_ROWS ? PANEL_ROWS : ROW_ROWS);
  const int64_t least = last_position - block.position[block.count - 1] + first;
  const int64_t span = block.position[block.count - 1] - block.position[0];
  step.first = first;
  step.count = count;
  step.window = least / LANES<T> * LANES<T>;
  int64_t stride = round_up(2 * MARGIN + span + count + 3 * PANEL_WIDTH<T>, LANES<T>);
  if (stride * sizeof(T) % 1024 == 0) stride += LANES<T>;  // rows a power of two apart would fight for cache sets
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t real = smaller(r, block.count - 1);
    step.shift[r] = last_position - block.position[real] + first - step.window;
    step.band[r] = buffer + r * stride + MARGIN;
    step.view[r] = step.band[r] + step.shift[r];
  }
}

template <typename T>
static void score_step(const RelAttention& p, const Block<T>& block, const T* key_panels, const T* rel_panels,
                       const Step<T>& step) {
  const int64_t depth = p.head_dim, rows = block.padded(PANEL_ROWS);

  // (b) + (d): each strip of rows needs just its own part of the window
  const int64_t end = step.shift[0] + step.count;
  for (int64_t column = 0; column < end; column += PANEL_WIDTH<T>) {
    const T* panels = rel_panels + (step.window + column) * depth;
    for (int64_t r = 0; r < rows; r += PANEL_ROWS)
      if (step.shift[r + PANEL_ROWS - 1] < column + PANEL_WIDTH<T> && step.shift[r] + step.count > column)
        panel_product<T, true>(block.position_strips + r * depth, panels, depth, step.band + r, column);
  }

  // (a) + (c), in place
  for (int64_t column = 0; column < step.count; column += PANEL_WIDTH<T>) {
    const T* panels = key_panels + (step.first + column) * depth;
    for (int64_t r = 0; r < rows; r += PANEL_ROWS)
      panel_product<T, false>(block.content_strips + r * depth, panels, depth, step.view + r, column);
  }
}

// Calls step(first, count) for runs of at most `most` keys, about equally long, that some row of the block sees.
template <typename T, typename F>
INLINE void for_each_run(const RelAttention& p, const Sizes<T>& sizes, const KeyLabels& keys, const Block<T>& block,
                         int64_t most, F step) {
  for (int64_t g = 0; g < sizes.groups;) {
    const int64_t start = g;
    while (g < sizes.groups && sees_group(p, sizes, keys, block, g)) ++g;
    const int64_t pieces = (g - start + most / KEY_GROUP - 1) / (most / KEY_GROUP);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t first = (start + (g - start) * piece / pieces) * KEY_GROUP;
      const int64_t last = (start + (g - start) * (piece + 1) / pieces) * KEY_GROUP;
      step(first, smaller(last, sizes.keys) - first);
    }
    if (g == start) ++g;
  }
}
