// The score of a tile, term by term: position, content, then segments and mask in one pass over each row.
#pragma once

#include "gemm.h"
#include "mask.h"
#include "rows.h"
#include "segments.h"
#include "shift.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

// (q + v).r, into the band: each panel of rows needs just its own part of the window.
template <typename T>
static void position_scores(const RelAttention& p, const RowBlock<T>& block, const T* rel_panels, const Tile<T>& tile) {
  const int64_t rows = block.padded(PANEL_ROWS), end = tile.shift[0] + tile.count;
  for (int64_t column = 0; column < end; column += PANEL_WIDTH<T>) {
    const T* panels = rel_panels + (tile.window_start + column) * p.head_dim;
    for (int64_t r = 0; r < rows; r += PANEL_ROWS)
      panel_product<T, true>(block.position_panels + r * p.head_dim, panels, p.head_dim, tile.band + r, column,
                             tile.shift[r + PANEL_ROWS - 1], tile.shift[r] + tile.count);
  }
}

// (q + u).k, added in place to the shifted band
template <typename T>
static void content_scores(const RelAttention& p, const RowBlock<T>& block, const T* key_panels, const Tile<T>& tile) {
  const int64_t rows = block.padded(PANEL_ROWS);
  for (int64_t column = 0; column < tile.count; column += PANEL_WIDTH<T>) {
    const T* panels = key_panels + (tile.first + column) * p.head_dim;
    for (int64_t r = 0; r < rows; r += PANEL_ROWS)
      panel_product<T, false>(block.content_panels + r * p.head_dim, panels, p.head_dim, tile.score + r, column, 0,
                              tile.count);
  }
}

// Where a row of scores comes from: it may lie there as it is, ...
template <typename T>
struct StoredScores {
  T* score;
  static constexpr bool IS_STORED = true;

  INLINE_MEMBER Vec<T> at(int64_t j) const { return load(score + j); }
  T one(int64_t j) const { return score[j]; }
};

// ... or in two terms that are still to be added, and scaled
template <typename T>
struct SummedScores {
  T* score;  // content; the sum's place
  const T* position;
  T scale;
  static constexpr bool IS_STORED = false;

  INLINE_MEMBER Vec<T> at(int64_t j) const { return (load(score + j) + load(position + j)) * scale; }
  T one(int64_t j) const { return (score[j] + position[j]) * scale; }
  void store_from(int64_t begin, int64_t end) const {
    int64_t j = begin;
    for (; j + LANES<T> <= end; j += LANES<T>) store(score + j, at(j));
    for (; j < end; ++j) score[j] = one(j);
  }
};

// Segments and mask over vectors of scores from `begin` to `end`; takes the largest of each lane into `max`.
template <typename T, bool SEGMENTS, bool RANKS, typename Scores>
INLINE void add_segments_and_ranks(const SegmentRow<T> segments, const RankRow<T> ranks, const Scores scores,
                                   int64_t begin, int64_t end, Vec<T>& max) {
  for (int64_t j = begin; j < end; j += LANES<T>) {
    Vec<T> s = scores.at(j);
    if (SEGMENTS) s = segments.add(s, j);
    if (RANKS) s = ranks.hide(s, j);
    if (SEGMENTS || RANKS || !Scores::IS_STORED) store(scores.score + j, s);
    max = maximum<T>(s, max);
  }
}

template <typename T, typename Scores>
INLINE void segments_and_ranks(const SegmentRow<T>& segments, const RankRow<T>& ranks, const Scores scores,
                               int64_t begin, int64_t end, Vec<T>& max) {
  if (!segments.used && ranks.sees_all) {
    add_segments_and_ranks<T, false, false>(segments, ranks, scores, begin, end, max);
  } else if (!segments.used) {
    add_segments_and_ranks<T, false, true>(segments, ranks, scores, begin, end, max);
  } else if (ranks.sees_all) {
    add_segments_and_ranks<T, true, false>(segments, ranks, scores, begin, end, max);
  } else {
    add_segments_and_ranks<T, true, true>(segments, ranks, scores, begin, end, max);
  }
}

// Labels of a chunk's keys
struct KeyTerms {
  KeySegments segments;
  KeyRanks ranks;

  template <typename T>
  KeyTerms(Carver& carver, const Sizes<T>& sizes)
      : segments(carver, sizes.max_keys), ranks(carver, sizes.max_keys, (sizes.max_keys + KEY_GROUP - 1) / KEY_GROUP) {}

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

// Adds the segment term to row r of a tile and sets keys that are hidden from it to -inf. Past the visible keys, up to
// whole vectors, is -inf too.
template <typename T, typename Keys, typename Scores>
static VisibleKeys<T> segments_and_mask(const RelAttention& p, const KeyTerms& keys, const BlockRows<T>& block,
                                        int64_t r, const Keys& tile, const Scores scores) {
  const int64_t b = block.b, row_index = block.row_index[r], first = tile.first;
  const int64_t own_key = p.mem_len + block.position[r], own = own_key - tile.first_key;
  const Reach range(p, own_key, own_key);
  const int64_t before = larger(range.begin - tile.first_key, 0),
                count = smaller(tile.count, range.end - tile.first_key);
  if (count <= before) return {0, 0};
  T* score = scores.score;
  const SegmentRow<T> segments(p, keys.segments, first, b, row_index, block.segments.different[r]);
  const RankRow<T> ranks(p, keys.ranks, first, count, b, row_index, own);
  if (!ranks.sees_any && !ranks.sees_self) return {0, 0};

  const int64_t whole = round_up(count, LANES<T>);
  int64_t summed = 0;  // scores are stored from here on
  if constexpr (!Scores::IS_STORED) {
    if (p.mask.data == nullptr && before == 0 && is_finite(segments.different)) summed = count / LANES<T> * LANES<T>;
    scores.store_from(summed, count);
  }
  const auto hide_without_ranks = [&] {
    for (int64_t j = 0; j < before; ++j) score[j] = -static_cast<T>(INFINITY);
    for (int64_t j = count; j < whole; ++j) score[j] = -static_cast<T>(INFINITY);
    hide_by_dense_mask(p, b, block.h, row_index, tile.first_key, count, score);
  };
  hide_without_ranks();
  const StoredScores<T> stored{score};
  const T own_score = !ranks.sees_self ? T(0) : segments.add_one(own < summed ? scores.one(own) : score[own], own);
  Vec<T> max = broadcast(-static_cast<T>(INFINITY));
  if constexpr (!Scores::IS_STORED) segments_and_ranks(segments, ranks, scores, 0, summed, max);
  segments_and_ranks(segments, ranks, stored, summed, whole, max);
  VisibleKeys<T> visible{count, maximum_of<T>(max)};
  if (ranks.sees_self) {
    score[own] = own_score;
    if (own_score > visible.max) visible.max = own_score;
  }
  if (!is_finite(segments.different)) {  // added to -inf it may have made a hidden score NaN or inf
    hide_without_ranks();
    max = broadcast(-static_cast<T>(INFINITY));
    add_segments_and_ranks<T, false, false>(segments, ranks, stored, 0, whole, max);
    visible.max = maximum_of<T>(max);
  }
  return visible;
}

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
