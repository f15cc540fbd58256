// Backward: probabilities recomputed from the log-sum-exp; the buffer of scores becomes dS and, unshifted, its band.

template <typename T>
struct BackwardScratch {
  HeadTerms<T> terms;
  KeyLabels keys;
  T *key_rows, *key_panels, *value_panels, *rel_rows, *rel_panels, *spare;
  T *out, *grad_out, *grad_out_strips, *grad_content, *grad_position;
  T *scores, *grad_probability, *factors;
  // sums of one chunk of rows
  T *grad_key, *grad_value, *grad_rel;
  T *grad_content_bias, *grad_position_bias, *grad_segment_bias, *grad_same, *grad_different;

  // Row stride of grad_probability
  static constexpr int64_t KEYS = BACKWARD_KEYS + PANEL_WIDTH<T> + MARGIN;

  BackwardScratch(Carver& carver, const Sizes<T>& sizes, int64_t depth)
      : terms(carver, sizes.width),
        keys(carver, sizes.groups),
        key_rows(carver.take<T>(sizes.keys_padded * sizes.width)),
        key_panels(carver.take<T>(sizes.keys_padded * depth)),
        value_panels(carver.take<T>(sizes.keys_padded * depth)),
        rel_rows(carver.take<T>(sizes.window * sizes.width)),
        rel_panels(carver.take<T>(sizes.window * depth)),
        spare(carver.take<T>(LANES<T> * sizes.width)),
        out(carver.take<T>(sizes.width)),
        grad_out(carver.take<T>(Block<T>::rows_elements(sizes.width))),
        grad_out_strips(carver.take<T>(Block<T>::rows_elements(sizes.width))),
        grad_content(carver.take<T>(BLOCK_ROWS * sizes.width)),
        grad_position(carver.take<T>(BLOCK_ROWS * sizes.width)),
        scores(carver.take<T>(band_elements<T>(BACKWARD_KEYS))),
        grad_probability(carver.take<T>(BLOCK_ROWS * KEYS)),
        factors(carver.take<T>(BACKWARD_KEYS + 2 * DROPOUT_GROUP)),
        grad_key(carver.take<T>(sizes.keys_padded * sizes.width)),
        grad_value(carver.take<T>(sizes.keys_padded * sizes.width)),
        grad_rel(carver.take<T>(sizes.window * sizes.width)),
        grad_content_bias(carver.take<T>(sizes.width)),
        grad_position_bias(carver.take<T>(sizes.width)),
        grad_segment_bias(carver.take<T>(sizes.width)),
        grad_same(carver.take<T>(sizes.width)),
        grad_different(carver.take<T>(sizes.width)) {}
};

// Which products the wanted gradients need
struct Wanted {
  bool query, key, value, rel_key;

  explicit Wanted(const RelAttentionGradients& g)
      : query(g.query.data != nullptr || g.content_bias != nullptr || g.position_bias != nullptr),
        key(g.keys.key.data != nullptr || g.memory.key.data != nullptr),
        value(g.keys.value.data != nullptr || g.memory.value.data != nullptr),
        rel_key(g.rel_key.data != nullptr) {}
};

// Per row of a block: what turns scores into probabilities and dP into dS
template <typename T>
struct RowStatistics {
  T lse[BLOCK_ROWS];    // of the row's scores without `same`, in powers of 2
  T delta[BLOCK_ROWS];  // dO.O - dlse
  T grad_lse[BLOCK_ROWS];
  T total[BLOCK_ROWS], different[BLOCK_ROWS];  // sums of dS: over all keys, over keys of another segment
  T elsewhere[BLOCK_ROWS];                     // sum of P over the latter
};

template <typename T>
static void load_gradients(const RelAttention& p, const RelAttentionGradients& g, const Sizes<T>& sizes,
                           const BackwardScratch<T>& scratch, const Block<T>& block, RowStatistics<T>& statistics) {
  const int64_t b = block.b, h = block.h, head_row = (b * p.heads + h) * p.length;
  for (int64_t r = 0; r < block.count; ++r) {
    const int64_t row = block.row[r];
    T* grad_out = scratch.grad_out + r * sizes.width;
    read_row(p, g.out, b, h, row, sizes.width, grad_out);
    read_row(p, p.out, b, h, row, sizes.width, scratch.out);
    Vec<T> products{};
    for (int64_t d = 0; d < sizes.width; d += LANES<T>) products += load(grad_out + d) * load(scratch.out + d);
    const T row_lse = static_cast<const T*>(p.lse)[head_row + row];
    const bool sees_any = row_lse != -static_cast<T>(INFINITY);
    statistics.grad_lse[r] = g.lse != nullptr && sees_any ? static_cast<const T*>(g.lse)[head_row + row] : T(0);
    statistics.delta[r] = sum<T>(products) - statistics.grad_lse[r];
    statistics.lse[r] = row_lse * static_cast<T>(LOG2E) - block.same[r];
    statistics.total[r] = statistics.different[r] = statistics.elsewhere[r] = 0;
  }
  transpose_strips(scratch.grad_out, block.count, sizes.width, p.head_dim, scratch.grad_out_strips);
}

// One row of a step: `score` becomes dS, `grad_probability` becomes the dropped-out probability that dV needs.
template <typename T>
static void grad_row(const RelAttention& p, const KeyLabels& keys, const Block<T>& block, int64_t r, int64_t first,
                     int64_t count, int64_t seen, const T* factors, RowStatistics<T>& statistics, T* score,
                     T* grad_probability) {
  const T lse = statistics.lse[r], delta = statistics.delta[r];
  if (lse == -static_cast<T>(INFINITY)) seen = 0;
  const bool segments = p.segments.query_ids != nullptr;
  const int32_t id = segments ? p.segments.query_ids[block.b * p.length + block.row[r]] : 0;
  Vec<T> total{}, different{}, elsewhere{};
  for (int64_t j = 0; j < seen; j += LANES<T>) {
    const Vec<T> s = load(score + j);
    // Nothing of what a row does not see reaches its gradients, NaN and infinity included.
    const IntVec<T> hidden = s == -static_cast<T>(INFINITY);
    const Vec<T> probability = select<T>(hidden, Vec<T>{}, exp2(s - lse));
    const Vec<T> factor = factors == nullptr ? broadcast(T(1)) : load(factors + j);
    Vec<T> grad = probability * (factor * load(grad_probability + j) - delta);
    grad = select<T>(hidden, Vec<T>{}, grad);
    store(score + j, grad);
    store(grad_probability + j, factor * probability);
    if (segments) {
      const IntVec<T> other = load_ints(keys.id + first + j, T()) != id;
      total += grad;
      different += select<T>(other, grad, Vec<T>{});
      elsewhere += select<T>(other, probability, Vec<T>{});
    }
  }
  for (int64_t j = seen; j < count + ROW_ROWS; ++j) grad_probability[j] = score[j] = 0;
  if (segments) {
    statistics.total[r] += sum<T>(total);
    statistics.different[r] += sum<T>(different);
    statistics.elsewhere[r] += sum<T>(elsewhere);
  }
}

// Zeros around each row of dS, as far as the products over the band reach: its strip's columns and a tile's margin.
template <typename T>
static void clear_corners(const Block<T>& block, const Step<T>& step) {
  for (int64_t r = 0; r < block.count; ++r) {
    const int64_t strip = r / ROW_ROWS * ROW_ROWS, end = smaller(strip + ROW_ROWS, block.count) - 1;
    const int64_t low = smaller(step.shift[end], step.shift[r] - MARGIN);
    const int64_t high = larger(step.shift[strip], step.shift[r] + MARGIN) + step.count;
    for (int64_t t = low; t < step.shift[r]; ++t) step.band[r][t] = 0;
    for (int64_t t = step.shift[r] + step.count; t < high; ++t) step.band[r][t] = 0;
  }
}

template <typename T>
struct RowPointers {
  T* row[PANEL_ROWS > ROW_ROWS ? PANEL_ROWS : ROW_ROWS];

  RowPointers(T* first, int64_t stride) {
    for (int64_t m = 0; m < static_cast<int64_t>(sizeof(row) / sizeof(row[0])); ++m) row[m] = first + m * stride;
  }
};

template <typename T>
static void backward_step(const RelAttention& p, const Wanted& wanted, const Sizes<T>& sizes, const Block<T>& block,
                          const BackwardScratch<T>& scratch, RowStatistics<T>& statistics, int64_t last_position,
                          int64_t first, int64_t count) {
  const int64_t width = sizes.width, rows = block.padded(PANEL_ROWS);
  constexpr int64_t KEYS = BackwardScratch<T>::KEYS;
  Step<T> step;
  place_rows(block, last_position, first, count, scratch.scores, step);
  score_step(p, block, scratch.key_panels, scratch.rel_panels, step);

  // dP = dO . V^T
  T* grad_probability[BLOCK_ROWS];
  for (int64_t r = 0; r < rows; ++r) grad_probability[r] = scratch.grad_probability + r * KEYS;
  for (int64_t column = 0; column < count; column += PANEL_WIDTH<T>)
    for (int64_t r = 0; r < rows; r += PANEL_ROWS)
      panel_product<T, true>(scratch.grad_out_strips + r * p.head_dim, scratch.value_panels + (first + column) * p.head_dim,
                             p.head_dim, grad_probability + r, column);

  for (int64_t r = 0; r < block.count; ++r) {
    T largest = 0;
    const int64_t seen = mask_row(p, sizes, scratch.keys, block, r, first, count, step.view[r], largest);
    const T* factors = nullptr;
    if (p.dropout.p > 0 && seen > 0)
      factors = dropout_factors(p, block.b * p.heads + block.h, block.row[r], first, round_up(seen, LANES<T>),
                                scratch.factors);
    grad_row(p, scratch.keys, block, r, first, count, seen, factors, statistics, step.view[r], grad_probability[r]);
  }
  clear_corners(block, step);
  for (int64_t r = block.count; r < rows; ++r) {
    step.view[r] = step.view[block.count - 1];
    step.band[r] = step.band[block.count - 1];
    step.shift[r] = step.shift[block.count - 1];
  }

  // dQ += dS . K and band(dS) . R, apart since their sums are the gradients of u and v
  if (wanted.query) {
    for (int64_t r = 0; r < block.count; r += ROW_ROWS) {
      row_product<T, A::rows>(step.view + r, 0, scratch.key_rows + first * width, width, count,
                              RowPointers<T>(scratch.grad_content + r * width, width).row);
      const int64_t low = step.shift[r + ROW_ROWS - 1], high = step.shift[r] + count;
      T* band[ROW_ROWS];
      for (int64_t m = 0; m < ROW_ROWS; ++m) band[m] = step.band[r + m] + low;
      row_product<T, A::rows>(band, 0, scratch.rel_rows + (step.window + low) * width, width, high - low,
                              RowPointers<T>(scratch.grad_position + r * width, width).row);
    }
  }
  // dK += dS^T . (Q + u), dV += P^T . dO
  for (int64_t j = 0; j < count; j += ROW_ROWS) {
    if (wanted.key)
      row_product<T, A::columns>(step.view, j, block.content, width, block.count,
                                 RowPointers<T>(scratch.grad_key + (first + j) * width, width).row);
    if (wanted.value)
      row_product<T, A::columns>(grad_probability, j, scratch.grad_out, width, block.count,
                                 RowPointers<T>(scratch.grad_value + (first + j) * width, width).row);
  }
  // dR += band(dS)^T . (Q + v), over the rows that reach each piece of the window
  if (wanted.rel_key) {
    int64_t begin = block.count, end = block.count;
    for (int64_t t = step.shift[block.count - 1]; t < step.shift[0] + count; t += ROW_ROWS) {
      while (begin > 0 && step.shift[begin - 1] < t + ROW_ROWS) --begin;
      while (end > begin && step.shift[end - 1] + count <= t) --end;
      row_product<T, A::columns>(step.band + begin, t, block.position_query + begin * width, width, end - begin,
                                 RowPointers<T>(scratch.grad_rel + (step.window + t) * width, width).row);
    }
  }
}

// dq of the block's rows, and their part of the sums over rows
template <typename T>
static void finish_rows(const RelAttention& p, const RelAttentionGradients& g, const Sizes<T>& sizes,
                        const Block<T>& block, const BackwardScratch<T>& scratch, const RowStatistics<T>& statistics) {
  const T scale = static_cast<T>(p.scale), unscale = static_cast<T>(LN2);
  for (int64_t r = 0; r < block.count; ++r) {
    T *content = scratch.grad_content + r * sizes.width, *position = scratch.grad_position + r * sizes.width;
    const T* segment_query = block.segment_query + r * sizes.width;
    // A row's dS adds up to dlse. What it adds up to instead is the rounding of delta, which dS holds in proportion to
    // P: a bias that the sums over rows would not average out.
    const T total = statistics.grad_lse[r];
    const T different = statistics.different[r] - (statistics.total[r] - total) * statistics.elsewhere[r];
    for (int64_t d = 0; d < sizes.width; ++d) {
      const T segment = different * scratch.terms.different[d] + total * scratch.terms.same[d];
      scratch.grad_content_bias[d] += scale * content[d];
      scratch.grad_position_bias[d] += scale * position[d];
      scratch.grad_segment_bias[d] += scale * segment;
      scratch.grad_same[d] += (total - different) * unscale * segment_query[d];
      scratch.grad_different[d] += different * unscale * segment_query[d];
      content[d] = scale * (content[d] + position[d] + segment);
    }
    if (g.query.data != nullptr) {
      T* to = static_cast<T*>(g.query.data) + row_start(g.query, block.b, block.h, block.row[r]);
      for (int64_t d = 0; d < p.head_dim; ++d) to[d * g.query.stride[3]] = content[d];
    }
  }
}

template <typename T>
INLINE void add_row(const Tensor4& to, int64_t b, int64_t h, int64_t row, const T* from, T factor, int64_t width) {
  if (to.data == nullptr) return;
  T* start = static_cast<T*>(to.data) + row_start(to, b, h, row);
  for (int64_t d = 0; d < width; ++d) start[d * to.stride[3]] += factor * from[d];
}

// Adds a chunk's sums to the results
template <typename T>
static void add_sums(const RelAttention& p, const RelAttentionGradients& g, const Wanted& wanted, const Sizes<T>& sizes,
                     const BackwardScratch<T>& scratch, int64_t b, int64_t h, int64_t rel_first, int64_t window) {
  const T unscale = static_cast<T>(LN2);
  for (int64_t j = 0; j < sizes.keys; ++j) {
    const bool old = j < p.mem_len;
    const int64_t row = old ? j : j - p.mem_len;
    if (wanted.key)
      add_row(old ? g.memory.key : g.keys.key, b, h, row, scratch.grad_key + j * sizes.width, unscale, p.head_dim);
    if (wanted.value)
      add_row(old ? g.memory.value : g.keys.value, b, h, row, scratch.grad_value + j * sizes.width, T(1), p.head_dim);
  }
  if (wanted.rel_key)
    for (int64_t t = 0; t < window && rel_first + t < p.rel_len; ++t)
      add_row(g.rel_key, b, h, rel_first + t, scratch.grad_rel + t * sizes.width, unscale, p.head_dim);

  const auto add_head = [&](void* to, int64_t head, const T* from) {
    if (to == nullptr) return;
    for (int64_t d = 0; d < p.head_dim; ++d) static_cast<T*>(to)[head * p.head_dim + d] += from[d];
  };
  add_head(g.content_bias, h, scratch.grad_content_bias);
  add_head(g.position_bias, h, scratch.grad_position_bias);
  add_head(g.segment_bias, h, scratch.grad_segment_bias);
  add_head(g.segment_embed, h, scratch.grad_same);
  add_head(g.segment_embed, p.heads + h, scratch.grad_different);
}

template <typename T>
static bool backward_as(const RelAttention& p, const RelAttentionGradients& g, int64_t threads, Parallel parallel) {
  const Sizes<T> sizes(p, 512);
  const Wanted wanted(g);
  Carver measure{nullptr, 0};
  BackwardScratch<T>(measure, sizes, p.head_dim);
  Block<T>(measure, sizes);
  const Turns turns{static_cast<int64_t*>(calloc(static_cast<size_t>(larger(p.heads, 1)), sizeof(int64_t)))};
  if (turns.turn == nullptr) return false;
  const bool ran =
      for_each_task(sizes.chunks * p.batch * p.heads, threads, measure.used, parallel, [&](int64_t task, char* memory) {
        Carver carver{memory, 0};
        const BackwardScratch<T> scratch(carver, sizes, p.head_dim);
        const int64_t h = task % p.heads, b = task / p.heads % p.batch, chunk = task / p.heads / p.batch;
        const int64_t begin = chunk * sizes.chunk_rows, end = smaller(begin + sizes.chunk_rows, p.length);
        const int64_t last_position = position_at(p, b, end - 1), width = sizes.width;
        const int64_t rel_first = p.rel_key.max_distance - p.mem_len - last_position;
        const int64_t window =
            round_up(sizes.keys_padded + last_position - position_at(p, b, begin) + 3 * PANEL_WIDTH<T>, LANES<T>);
        scratch.terms.load_head(p, h, width);
        scratch.keys.load_sequence(p, b, sizes.groups);
        T* const none = nullptr;
        pack(p, keys_of(p, p.memory.key, p.keys.key), b, h, sizes.keys_padded, width, scratch.key_rows, scratch.spare,
             scratch.key_panels);
        pack(p, keys_of(p, p.memory.value, p.keys.value), b, h, sizes.keys_padded, width, none, scratch.spare,
             scratch.value_panels);
        pack(p, {{p.rel_key.rows, {}}, {p.rel_len, 0}, rel_first}, b, h, window, width, scratch.rel_rows, scratch.spare,
             scratch.rel_panels);
        const auto clear = [](T* sums, int64_t count) { memset(sums, 0, static_cast<size_t>(count) * sizeof(T)); };
        clear(scratch.grad_key, sizes.keys_padded * width);
        clear(scratch.grad_value, sizes.keys_padded * width);
        clear(scratch.grad_rel, window * width);
        clear(scratch.grad_content_bias, width);
        clear(scratch.grad_position_bias, width);
        clear(scratch.grad_segment_bias, width);
        clear(scratch.grad_same, width);
        clear(scratch.grad_different, width);

        Block<T> block(carver, sizes);
        RowStatistics<T> statistics;
        for (int64_t row = begin; row < end; row += block.count) {
          load_block(p, sizes, scratch.terms, b, h, row, end, block);
          load_gradients(p, g, sizes, scratch, block, statistics);
          clear(scratch.grad_content, block.padded(ROW_ROWS) * width);
          clear(scratch.grad_position, block.padded(ROW_ROWS) * width);
          for_each_run(p, sizes, scratch.keys, block, BACKWARD_KEYS, [&](int64_t first, int64_t count) {
            backward_step(p, wanted, sizes, block, scratch, statistics, last_position, first, count);
          });
          finish_rows(p, g, sizes, block, scratch, statistics);
        }

        const int64_t ticket = chunk * p.batch + b;
        turns.wait(h, ticket);
        add_sums(p, g, wanted, sizes, scratch, b, h, rel_first, window);
        turns.pass(h, ticket);
      });
  free(turns.turn);
  return ran;
}

static bool backward(const RelAttention& p, const RelAttentionGradients& g, int64_t threads, Parallel parallel) {
  return p.dtype == DType::float64 ? backward_as<double>(p, g, threads, parallel)
                                   : backward_as<float>(p, g, threads, parallel);
}
