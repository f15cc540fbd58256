// A block of query rows in the order of their positions, and what each of them may see.

template <typename T>
struct Block {
  int64_t b, h;
  int64_t count;                 // rows, at most BLOCK_ROWS
  int64_t row[BLOCK_ROWS];       // index in query
  int64_t position[BLOCK_ROWS];  // ascending
  T different[BLOCK_ROWS];       // (q + b).(s1 - s0): what a key of another segment adds
  T same[BLOCK_ROWS];            // (q + b).s0: in every score of the row, so only the log-sum-exp needs it
  T *content, *position_query, *segment_query;  // rows q + u, q + v, q + b, scaled so that scores are powers of 2
  T *content_strips, *position_strips;          // the first two as panel products want them
  int64_t most_rank, least_floor;               // bounds over the rows, for tile skipping

  int64_t padded(int64_t tile) const { return round_up(count, tile); }

  Block(Carver& carver, const Sizes<T>& sizes)
      : content(carver.take<T>(rows_elements(sizes.width))),
        position_query(carver.take<T>(rows_elements(sizes.width))),
        segment_query(carver.take<T>(rows_elements(sizes.width))),
        content_strips(carver.take<T>(rows_elements(sizes.width))),
        position_strips(carver.take<T>(rows_elements(sizes.width))) {}

  // One block of rows, and what transposing it touches past the end
  static int64_t rows_elements(int64_t width) { return (BLOCK_ROWS + 2 * LANES<T>)*width; }
};

constexpr double LOG2E = 1.44269504088896340736, LN2 = 0.69314718055994530942;

INLINE int64_t row_at(const RelAttention& p, int64_t b, int64_t sorted) {
  return p.rows.order == nullptr ? sorted : p.rows.order[b * p.length + sorted];
}
INLINE int64_t position_at(const RelAttention& p, int64_t b, int64_t sorted) {
  return p.rows.order == nullptr ? sorted : p.rows.position[b * p.length + sorted];
}

// Biases and segment embeddings of one head in the work type; `different` is less `same`
template <typename T>
struct HeadTerms {
  T *content_bias, *position_bias, *segment_bias, *same, *different;

  HeadTerms(Carver& carver, int64_t width)
      : content_bias(carver.take<T>(width)),
        position_bias(carver.take<T>(width)),
        segment_bias(carver.take<T>(width)),
        same(carver.take<T>(width)),
        different(carver.take<T>(width)) {}

  void load_head(const RelAttention& p, int64_t h, int64_t width) const {
    const auto read_or_zero = [&](const void* data, int64_t start, T* to) {
      for (int64_t d = 0; d < width; ++d) to[d] = 0;
      if (data != nullptr) read(p.dtype, data, start, 1, p.head_dim, to);
    };
    read_or_zero(p.content_bias, h * p.head_dim, content_bias);
    read_or_zero(p.position_bias, h * p.head_dim, position_bias);
    read_or_zero(p.segments.bias, h * p.head_dim, segment_bias);
    read_or_zero(p.segments.embed, h * p.head_dim, same);
    read_or_zero(p.segments.embed, (p.heads + h) * p.head_dim, different);
    for (int64_t d = 0; d < width; ++d) different[d] -= same[d];
  }
};

// Rows first .. of head (b, h), at most to `last`, as many as a block holds and as lie within MAX_SPAN positions.
template <typename T>
static void load_block(const RelAttention& p, const Sizes<T>& sizes, const HeadTerms<T>& terms, int64_t b, int64_t h,
                       int64_t first, int64_t last, Block<T>& block) {
  const T scale = static_cast<T>(p.scale * LOG2E);
  block.b = b;
  block.h = h;
  block.count = 0;
  block.most_rank = INT64_MIN;
  block.least_floor = INT64_MAX;
  for (int64_t sorted = first; sorted < last && block.count < BLOCK_ROWS; ++sorted) {
    const int64_t r = block.count, row = row_at(p, b, sorted), position = position_at(p, b, sorted);
    if (r > 0 && position - block.position[0] > MAX_SPAN) break;
    block.row[r] = row;
    block.position[r] = position;
    T *content = block.content + r * sizes.width, *relative = block.position_query + r * sizes.width,
      *segment = block.segment_query + r * sizes.width;
    read_row(p, p.rows.query, b, h, row, sizes.width, content);
    Vec<T> same{}, different{};
    for (int64_t d = 0; d < sizes.width; d += LANES<T>) {
      const Vec<T> q = load(content + d);
      store(content + d, (q + load(terms.content_bias + d)) * scale);
      store(relative + d, (q + load(terms.position_bias + d)) * scale);
      const Vec<T> q_segment = (q + load(terms.segment_bias + d)) * scale;
      store(segment + d, q_segment);
      same += q_segment * load(terms.same + d);
      different += q_segment * load(terms.different + d);
    }
    block.same[r] = sum<T>(same);
    block.different[r] = sum<T>(different);
    if (p.rank_mask.query_rank != nullptr) {
      const int64_t rank = p.rank_mask.query_rank[b * p.length + row];
      block.most_rank = larger(block.most_rank, rank);
      if (p.rank_mask.query_floor != nullptr) block.least_floor = smaller(block.least_floor, p.rank_mask.query_floor[b * p.length + row]);
    }
    ++block.count;
  }
  // Rows that only fill a register tile repeat the last one.
  const size_t bytes = static_cast<size_t>(sizes.width) * sizeof(T);
  for (int64_t r = block.count; r < block.padded(PANEL_ROWS); ++r) {
    memcpy(block.content + r * sizes.width, block.content + (block.count - 1) * sizes.width, bytes);
    memcpy(block.position_query + r * sizes.width, block.position_query + (block.count - 1) * sizes.width, bytes);
  }
  transpose_strips(block.content, block.count, sizes.width, p.head_dim, block.content_strips);
  transpose_strips(block.position_query, block.count, sizes.width, p.head_dim, block.position_strips);
}

// Segment and rank of the keys of one sequence, padded to whole groups, and the bounds of each group's ranks
struct KeyLabels {
  int32_t *id, *rank, *least_rank, *most_rank;

  KeyLabels(Carver& carver, int64_t groups)
      : id(carver.take<int32_t>(groups * KEY_GROUP)),
        rank(carver.take<int32_t>(groups * KEY_GROUP)),
        least_rank(carver.take<int32_t>(groups)),
        most_rank(carver.take<int32_t>(groups)) {}

  void load_sequence(const RelAttention& p, int64_t b, int64_t groups) const {
    const int64_t keys = p.mem_len + p.key_len;
    for (int64_t j = 0; j < groups * KEY_GROUP; ++j) {
      id[j] = j < keys && p.segments.key_ids != nullptr ? p.segments.key_ids[b * keys + j] : 0;
      rank[j] = j < keys && p.rank_mask.key_rank != nullptr ? p.rank_mask.key_rank[b * keys + j] : INT32_MAX;
    }
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * KEY_GROUP, last = smaller(first + KEY_GROUP, keys);
      least_rank[g] = most_rank[g] = rank[first];
      for (int64_t j = first + 1; j < last; ++j) {
        least_rank[g] = rank[j] < least_rank[g] ? rank[j] : least_rank[g];
        most_rank[g] = rank[j] > most_rank[g] ? rank[j] : most_rank[g];
      }
    }
  }
};

// Whether any row of the block may see a key of group g; false only if none does.
template <typename T>
static bool sees_group(const RelAttention& p, const Sizes<T>& sizes, const KeyLabels& keys, const Block<T>& block,
                       int64_t g) {
  const int64_t first = g * KEY_GROUP, last = first + KEY_GROUP;  // keys
  const int64_t own_first = p.mem_len + block.position[0], own_last = p.mem_len + block.position[block.count - 1];
  if (sizes.ends_at_zero && first > own_last) return false;
  if (p.rank_mask.query_rank == nullptr) return true;
  if (keys.least_rank[g] < block.most_rank && (p.rank_mask.query_floor == nullptr || keys.most_rank[g] >= block.least_floor))
    return true;
  return p.rank_mask.sees_self != nullptr && own_first < last && own_last >= first;
}

// Adds the segment term to whole vectors of scores and hides keys by rank; returns the lane-wise maximum.
template <typename T, bool SEGMENTS, bool RANKS>
INLINE Vec<T> mask_vectors(T* score, int64_t count, const int32_t* ids, int32_t id, T different, const int32_t* ranks,
                           int32_t most, int32_t floor) {
  const Vec<T> hidden = broadcast(-static_cast<T>(INFINITY));
  Vec<T> top = hidden;
  for (int64_t j = 0; j < count; j += LANES<T>) {
    Vec<T> s = load(score + j);
    if (SEGMENTS) s += select<T>(load_ints(ids + j, T()) != id, broadcast(different), Vec<T>{});
    if (RANKS) {
      const IntVec<T> rank = load_ints(ranks + j, T());
      s = select<T>((rank < most) & (rank >= floor), s, hidden);
    }
    if (SEGMENTS || RANKS) store(score + j, s);
    top = maximum<T>(s, top);
  }
  return top;
}

// Scores of row r against keys first .. first+count-1, in `score`: adds the segment term, hides what the row may not
// see (-inf) and finds the largest. Returns how many leading keys can be visible, 0 if none is; past them, up to whole
// vectors, is -inf too.
template <typename T>
static int64_t mask_row(const RelAttention& p, const Sizes<T>& sizes, const KeyLabels& keys, const Block<T>& block,
                        int64_t r, int64_t first, int64_t count, T* score, T& largest) {
  const int64_t b = block.b, row = block.row[r], own = p.mem_len + block.position[r] - first;
  int64_t seen = count;
  if (sizes.ends_at_zero) seen = smaller(seen, own + 1);
  if (seen <= 0) return 0;
  const int64_t whole = round_up(seen, LANES<T>);
  for (int64_t j = seen; j < whole; ++j) score[j] = -static_cast<T>(INFINITY);

  if (p.mask.data != nullptr) {
    const bool* mask = static_cast<const bool*>(p.mask.data) + row_start(p.mask, b, block.h, row);
    for (int64_t j = 0; j < seen; ++j)
      if (!mask[(first + j) * p.mask.stride[3]]) score[j] = -static_cast<T>(INFINITY);
  }

  const int32_t id = p.segments.query_ids == nullptr ? 0 : p.segments.query_ids[b * p.length + row];
  bool all = true, any = true, sees_own = false;
  int32_t most = 0, floor = INT32_MIN;
  if (p.rank_mask.query_rank != nullptr) {
    most = p.rank_mask.query_rank[b * p.length + row];
    if (p.rank_mask.query_floor != nullptr) floor = p.rank_mask.query_floor[b * p.length + row];
    any = false;
    for (int64_t g = first / KEY_GROUP; g * KEY_GROUP < first + seen; ++g) {
      all = all && keys.most_rank[g] < most && keys.least_rank[g] >= floor;
      any = any || (keys.least_rank[g] < most && keys.most_rank[g] >= floor);
    }
    sees_own = p.rank_mask.sees_self != nullptr && p.rank_mask.sees_self[b * p.length + row] && own >= 0 && own < seen;
  }
  if (!any && !sees_own) return 0;
  T own_score = sees_own ? score[own] : T(0);
  if (sees_own && p.segments.query_ids != nullptr && keys.id[first + own] != id) own_score += block.different[r];

  const int32_t *ids = keys.id + first, *ranks = keys.rank + first;
  const T different = block.different[r];
  Vec<T> top;
  if (p.segments.query_ids == nullptr && all) {
    top = mask_vectors<T, false, false>(score, whole, ids, id, different, ranks, most, floor);
  } else if (p.segments.query_ids == nullptr) {
    top = mask_vectors<T, false, true>(score, whole, ids, id, different, ranks, most, floor);
  } else if (all) {
    top = mask_vectors<T, true, false>(score, whole, ids, id, different, ranks, most, floor);
  } else {
    top = mask_vectors<T, true, true>(score, whole, ids, id, different, ranks, most, floor);
  }
  largest = maximum_of<T>(top);
  if (sees_own) {
    score[own] = own_score;
    if (own_score > largest) largest = own_score;
  }
  return seen;
}
