// Forward: streaming softmax over runs of keys (Dao et al. 2022), the output kept in the work type until the end.

template <typename T>
struct ForwardScratch {
  HeadTerms<T> terms;
  KeyLabels keys;
  T *key_panels, *rel_panels, *value_rows, *spare;
  T *out, *scores, *factors;

  ForwardScratch(Carver& carver, const Sizes<T>& sizes, int64_t depth)
      : terms(carver, sizes.width),
        keys(carver, sizes.groups),
        key_panels(carver.take<T>(sizes.keys_padded * depth)),
        rel_panels(carver.take<T>(sizes.window * depth)),
        value_rows(carver.take<T>(sizes.keys_padded * sizes.width)),
        spare(carver.take<T>(LANES<T> * sizes.width)),
        out(carver.take<T>(BLOCK_ROWS * sizes.width)),
        scores(carver.take<T>(band_elements<T>(FORWARD_KEYS))),
        factors(carver.take<T>(FORWARD_KEYS + 2 * DROPOUT_GROUP)) {}
};

// One row of a step: scores, of which `largest` is the largest, become probabilities; `most` and `total` are brought up
// to date, what was summed before is rescaled.
template <typename T>
static void softmax_row(T* score, int64_t seen, int64_t count, T largest, T& most, T& total, T* out, int64_t width) {
  if (largest == -static_cast<T>(INFINITY)) {  // nothing visible, or NaN throughout, which must not vanish
    for (int64_t j = 0; j < seen; ++j)
      if (score[j] != score[j]) total = score[j];
    seen = 0;
  }
  if (seen > 0 && !(largest <= most)) {
    const T factor = exp2(broadcast(most - largest))[0];
    total *= factor;
    for (int64_t d = 0; d < width; d += LANES<T>) store(out + d, load(out + d) * factor);
    most = largest;
  }
  Vec<T> sums{};
  for (int64_t j = 0; j < seen; j += LANES<T>) {
    const Vec<T> probability = exp2(load(score + j) - most);
    store(score + j, probability);
    sums += probability;
  }
  total += sum<T>(sums);
  for (int64_t j = seen; j < count; ++j) score[j] = 0;
}

template <typename T>
static void forward_block(const RelAttention& p, const Sizes<T>& sizes, const Block<T>& block,
                          const ForwardScratch<T>& scratch, int64_t last_position) {
  const int64_t rows = block.padded(ROW_ROWS);
  T most[BLOCK_ROWS], total[BLOCK_ROWS];
  T* out[BLOCK_ROWS];
  for (int64_t r = 0; r < BLOCK_ROWS; ++r) {
    most[r] = -static_cast<T>(INFINITY);
    total[r] = 0;
    out[r] = scratch.out + r * sizes.width;
  }
  memset(scratch.out, 0, static_cast<size_t>(rows * sizes.width) * sizeof(T));

  for_each_run(p, sizes, scratch.keys, block, FORWARD_KEYS, [&](int64_t first, int64_t count) {
    Step<T> step;
    place_rows(block, last_position, first, count, scratch.scores, step);
    score_step(p, block, scratch.key_panels, scratch.rel_panels, step);
    for (int64_t r = 0; r < block.count; ++r) {
      T* score = step.view[r];
      T largest = 0;
      const int64_t seen = mask_row(p, sizes, scratch.keys, block, r, first, count, score, largest);
      softmax_row(score, seen, count, largest, most[r], total[r], out[r], sizes.width);
      if (p.dropout.p > 0 && seen > 0) {
        const T* factors = dropout_factors(p, block.b * p.heads + block.h, block.row[r], first, seen, scratch.factors);
        for (int64_t j = 0; j < seen; ++j) score[j] *= factors[j];
      }
    }
    for (int64_t r = block.count; r < rows; ++r) step.view[r] = step.view[block.count - 1];
    for (int64_t r = 0; r < rows; r += ROW_ROWS)
      row_product<T, A::rows>(step.view + r, 0, scratch.value_rows + first * sizes.width, sizes.width, count, out + r);
  });

  T* lse = static_cast<T*>(p.lse) + (block.b * p.heads + block.h) * p.length;
  for (int64_t r = 0; r < block.count; ++r) {
    const T inverse = total[r] == 0 ? T(0) : 1 / total[r];
    for (int64_t d = 0; d < sizes.width; d += LANES<T>) store(out[r] + d, load(out[r] + d) * inverse);
    write(p.dtype, out[r], p.head_dim, p.out.data, row_start(p.out, block.b, block.h, block.row[r]), p.out.stride[3]);
    lse[block.row[r]] = (most[r] + block.same[r]) * static_cast<T>(LN2) + static_cast<T>(log(total[r]));
  }
}

template <typename T>
static bool forward_as(const RelAttention& p, int64_t threads, Parallel parallel) {
  const Sizes<T> sizes(p, 256);
  Carver measure{nullptr, 0};
  ForwardScratch<T>(measure, sizes, p.head_dim);
  Block<T>(measure, sizes);
  return for_each_task(
      sizes.chunks * p.batch * p.heads, threads, measure.used, parallel, [&](int64_t task, char* memory) {
        Carver carver{memory, 0};
        const ForwardScratch<T> scratch(carver, sizes, p.head_dim);
        const int64_t h = task % p.heads, b = task / p.heads % p.batch, chunk = task / p.heads / p.batch;
        const int64_t begin = chunk * sizes.chunk_rows, end = smaller(begin + sizes.chunk_rows, p.length);
        const int64_t first_position = position_at(p, b, begin), last_position = position_at(p, b, end - 1);
        scratch.terms.load_head(p, h, sizes.width);
        scratch.keys.load_sequence(p, b, sizes.groups);
        T* const none = nullptr;
        pack(p, keys_of(p, p.memory.key, p.keys.key), b, h, sizes.keys_padded, sizes.width, none, scratch.spare,
             scratch.key_panels);
        pack(p, keys_of(p, p.memory.value, p.keys.value), b, h, sizes.keys_padded, sizes.width, scratch.value_rows,
             scratch.spare, none);
        const int64_t rel_first = p.rel_key.max_distance - p.mem_len - last_position;
        const int64_t window =
            round_up(sizes.keys_padded + last_position - first_position + 3 * PANEL_WIDTH<T>, LANES<T>);
        pack(p, {{p.rel_key.rows, {}}, {p.rel_len, 0}, rel_first}, b, h, window, sizes.width, none, scratch.spare,
             scratch.rel_panels);

        Block<T> block(carver, sizes);
        for (int64_t row = begin; row < end; row += block.count) {
          load_block(p, sizes, scratch.terms, b, h, row, end, block);
          forward_block(p, sizes, block, scratch, last_position);
        }
      });
}

static bool forward(const RelAttention& p, int64_t threads, Parallel parallel) {
  return p.dtype == DType::float64 ? forward_as<double>(p, threads, parallel) : forward_as<float>(p, threads, parallel);
}
