// A lane's two rows of a tile in backward: their statistics for softmax, and which keys they see.
#pragma once

#include "../backward_block.cuh"
#include "../dropout.cuh"
#include "../segments.cuh"
#include "../softmax.cuh"
#include "backward_memory.cuh"

namespace xlnet_kernels::cuda {

// A lane's two rows, eight apart; those that are not inside see nothing.
template <typename S>
struct TileRows {
  const RelAttention& p;
  const SortedRows& of_run;
  const StageRows& copied;
  int first_of_tile, first;

  DEVICE TileRows(const RelAttention& p, const SortedRows& of_run, const StageRows& copied, int tile, Lane lane)
      : p(p),
        of_run(of_run),
        copied(copied),
        first_of_tile(S::POSITIONS ? of_run.first : tile * S::BLOCK_M),
        first(first_of_tile + 16 * lane.warp + lane.g) {}
  // Where it is in the tensors
  DEVICE int index(int r) const { return S::POSITIONS ? of_run.index[in_tile(r)] : first + 8 * r; }
  DEVICE bool inside(int r) const { return S::POSITIONS ? index(r) >= 0 : first + 8 * r < int(p.length); }
  // Its number in the tile, which is its place in the stage
  DEVICE int in_tile(int r) const { return first - first_of_tile + 8 * r; }
  // One of the statistics of row r of this head.
  DEVICE float value(const KeyTile<S>& tile, int r, RowValue of, float otherwise) const {
    if (!inside(r)) return otherwise;
    return S::HAS_ROW_VALUES ? copied.value[of][in_tile(r)] : tile.row_values[of * tile.all_rows + index(r)];
  }
  DEVICE int32_t segment(int b, int r) const {
    if (p.segments.query_ids == nullptr || !inside(r)) return 0;
    return S::HAS_ROW_VALUES ? copied.segment[in_tile(r)] : p.segments.query_ids[b * p.length + index(r)];
  }
  // Only where there is a RankMask, and of a row that is inside.
  DEVICE int32_t rank(int b, int r) const {
    return S::HAS_ROW_VALUES ? copied.rank[in_tile(r)] : p.rank_mask.query_rank[b * p.length + index(r)];
  }
  // The run knows where a row is: to look it up again would take registers.
  DEVICE QueryRow load(int b, int r) const {
    const int row = first + 8 * r;
    if constexpr (!S::POSITIONS) return load_query_row(p, b, row);
    const int position = row_position(p, b, smaller(row, int(p.length) - 1));
    return load_labels(p, b, inside(r), larger(0, index(r)), position);
  }
};

// Segments of a consumer's keys: the first one's, and whether others are of another one.
struct KeySegments {
  int32_t first;
  bool are_several;

  KeySegments() = default;
  DEVICE KeySegments(const int32_t* of_key, int lane)
      : first(of_key[0]), are_several(ballot(of_key[lane] != first || of_key[lane + WARP] != first)) {}
  // Whether some key is of another segment than a row.
  DEVICE bool differ(const RowLabels& row) const { return are_several || row.segment != first; }
};

// Bit 2 n + parity: whether a row keeps column 8 n + 2 t + parity; 16 bits for each row.
template <typename S>
DEVICE uint32_t draw_dropout(const KeyTile<S>& tile, const TileRows<S>& rows, int t) {
  const Philox philox = load_philox(rows.p.dropout, tile.b, tile.head);
  uint32_t kept = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) kept |= kept_columns<S::BLOCK_N>(philox, rows.index(r), tile.j0, t) << (16 * r);
  return kept;
}

// Their segments; 0 where there are none.
template <typename S>
DEVICE void load_segments(const KeyTile<S>& tile, const TileRows<S>& rows, RowLabels (&labels)[2]) {
  for (int r = 0; r < 2; ++r) labels[r].segment = rows.segment(tile.b, r);
}

// P = exp2(score - row_max + log_inverse), dS = P (dP - delta). Of rows beyond the last one whatever is finite. Loaded
// where it is needed: registers are scarce.
struct RowStatistics {
  float row_max[2], log_inverse[2], delta[2];

  template <typename S>
  DEVICE RowStatistics(const KeyTile<S>& tile, const TileRows<S>& rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float inverse = rows.value(tile, r, INVERSE, 1);
      row_max[r] = rows.value(tile, r, ROW_MAX, 0);
      log_inverse[r] = log2_approximately(inverse);
      delta[r] = divide_approximately(rows.value(tile, r, DELTA, 0), inverse);
    }
  }
};

// The largest row_max, in magnitude, that may be subtracted, with log_inverse, before a score is rounded: P is then
// within about 2^-13 of what it is otherwise, less than 16 bits tell.
constexpr float LARGEST_BASE = 1024;

// Scores become exponents of P: scale, segments and what is subtracted from a row in one multiply-add, or, where
// row_max is large, one after the other, so that P of a single visible key is 1.
template <typename S>
DEVICE void make_exponents(float (&score)[8][4], const KeyTile<S>& tile, const TileRows<S>& rows,
                           const RowStatistics& statistics, const KeySegments& segments, const int32_t* key_segment,
                           int t) {
  const float scale = float(rows.p.scale) * LOG2_E;
  RowLabels labels[2] = {};
  float different[2] = {};
  if (rows.p.segments.embed) {
    load_segments(tile, rows, labels);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (segments.differ(labels[r])) different[r] = rows.value(tile, r, DIFFERENT, 0);
  }
  float base[2], row_max[2], log_inverse[2];
  bool is_large[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    is_large[r] = !(fabsf(statistics.row_max[r]) <= LARGEST_BASE);
    base[r] = is_large[r] ? 0 : statistics.row_max[r] - statistics.log_inverse[r];
    row_max[r] = is_large[r] ? statistics.row_max[r] : 0;
    log_inverse[r] = is_large[r] ? statistics.log_inverse[r] : 0;
  }
  if (segments.are_several) {
    add_segments(score, scale, key_segment, labels, different, t, base);
  } else {
    const float added[2] = {different[0] - base[0], different[1] - base[1]};
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] = score[n][i] * scale + added[i / 2];
  }
  if (!ballot(is_large[0] || is_large[1])) return;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) score[n][i] = score[n][i] - row_max[i / 2] + log_inverse[i / 2];
}

// Adds the sums of dS over keys of another segment.
template <typename T, typename S>
DEVICE void add_segment_gradient(float* sums, const KeyTile<S>& tile, const TileRows<S>& rows,
                                 const KeySegments& segments, const int32_t* key_segment, const Fragment (&dS)[4],
                                 int t) {
  RowLabels labels[2];
  load_segments(tile, rows, labels);
  if (!segments.are_several && !ballot(segments.differ(labels[0]) || segments.differ(labels[1]))) return;
  float sum[4] = {};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    Fragment of = dS[k];
    if (segments.are_several)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        of.word[i] &= (is_different(key_segment, labels, 2 * k + i / 2, i % 2 * 2, t) ? 0xffffu : 0) |
                      (is_different(key_segment, labels, 2 * k + i / 2, i % 2 * 2 + 1, t) ? 0xffff0000u : 0);
    multiply<T>(sum, of, ones<T>(), 0, false);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (t == 0 && rows.inside(r) && segments.differ(labels[r]))
      add_atomically(sums + tile.first_row + rows.index(r), sum[2 * r]);
}

constexpr uint32_t BELOW_ALL = 0xfc00, ABOVE_ALL = 0x7c00;  // ranks as float16: -inf and inf

// The rank of a row, twice in a word.
template <typename S>
DEVICE uint32_t row_rank(const KeyTile<S>& tile, const TileRows<S>& rows, int r, PairVisibility visibility) {
  uint32_t rank = rows.inside(r) ? ABOVE_ALL : BELOW_ALL;
  if (visibility.visibility == Visibility::by_rank && rows.inside(r)) rank = rank_as_half(rows.rank(tile.b, r));
  return rank * 0x10001;
}

// The ranks of 32 keys from j0 on as a row is to see them, by pairs of columns 8 n + 2 t and its neighbour. Where more
// than ranks decides, they are such that a comparison with the row's finds it. `copied`: ranks of these keys by pairs
// in shared memory, not yet changed for a row; without use where there is no room for them (HAS_RANK_PAIRS).
template <typename S>
DEVICE void load_key_ranks(uint32_t (&ranks)[4], const Call& call, const KeyTile<S>& tile, int j0,
                           const TileRows<S>& rows, int r, PairVisibility visibility, const int32_t* key_rank,
                           const uint32_t* copied, int t) {
  const RelAttention& p = call.p;
  if (visibility.visibility == Visibility::some) {
    const QueryRow row = rows.load(tile.b, r);
    const uint32_t bits = RowVisibility(p, row, tile.b, tile.h).columns<32>(j0, key_rank, t);
#pragma unroll
    for (int n = 0; n < 4; ++n)
      ranks[n] = (bits >> (2 * n) & 1 ? 0 : ABOVE_ALL) | (bits >> (2 * n + 1) & 1 ? 0 : ABOVE_ALL << 16);
    return;
  }
  Bytes16 pairs{};
  if (p.rank_mask.key_rank) {
    const Bytes16* from;
    if constexpr (S::HAS_RANK_PAIRS) {
      from = reinterpret_cast<const Bytes16*>(copied) + t;
    } else {
      const int tiles = tiles_of(int(p.mem_len + p.key_len), BOUNDS_TILE);
      // b anew each time, because the part of the address that all tiles share would take registers
      const int first = kept_in_register(tile.b) * tiles * BOUNDS_TILE + j0;
      from = reinterpret_cast<const Bytes16*>(call.workspace.rank_pairs) + first / 8 + t;
    }
    pairs = *from;
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) ranks[n] = pairs.word[n];
  if (!visibility.owns) return;
  const int own = rows.load(tile.b, r).own_key - j0 - 2 * t;  // a column, less 2 t
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (own == 8 * n) ranks[n] = (ranks[n] & 0xffff0000) | BELOW_ALL;
    if (own == 8 * n + 1) ranks[n] = (ranks[n] & 0xffff) | BELOW_ALL << 16;
  }
}

}  // namespace xlnet_kernels::cuda
