// The segment term, (q_i + b).s[different?(i, j)]. Softmax ignores a term that all keys of a row share: scores get
// (q + b).(s1 - s0) where segments differ, the log-sum-exp gets (q + b).s0.
#pragma once

#include "chunks.h"
#include "pack.h"
#include "scratch.h"
#include "tile_sizes.h"
#include "vector.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

// Biases and embeddings of one head, in the work type
template <typename T>
struct SegmentTerms {
  T *bias, *same, *different;  // b, s0, s1 - s0; zeros where there are none

  SegmentTerms(Carver& carver, const Sizes<T>& sizes) { carver.take(sizes.padded_dim, bias, same, different); }

  void load(const RelAttention& p, int64_t h, int64_t padded_dim) const {
    read_parameter(p, p.segments.bias, h, padded_dim, bias);
    read_parameter(p, p.segments.embed, h, padded_dim, same);
    read_parameter(p, p.segments.embed, p.heads + h, padded_dim, different);
    for (int64_t d = 0; d < padded_dim; ++d) different[d] -= same[d];
  }
};

// The term's part of a block of rows
template <typename T>
struct SegmentRows {
  T* query;                               // q + b, scaled as all queries are
  T same[MAX_ROWS], different[MAX_ROWS];  // (q + b).s0, (q + b).(s1 - s0)

  // Replaces q in row r of `query` by q + b, scaled. Leaves it alone without segments, because nothing reads it then.
  void load_row(const RelAttention& p, const SegmentTerms<T>& terms, int64_t r, T scale, int64_t padded_dim) {
    same[r] = different[r] = 0;
    if (p.segments.embed == nullptr) return;
    T* q = query + r * padded_dim;
    Vec<T> same_products{}, different_products{};
    for (int64_t d = 0; d < padded_dim; d += LANES<T>) {
      const Vec<T> scaled = (load(q + d) + load(terms.bias + d)) * scale;
      store(q + d, scaled);
      same_products += scaled * load(terms.same + d);
      different_products += scaled * load(terms.different + d);
    }
    same[r] = sum<T>(same_products);
    different[r] = sum<T>(different_products);
  }
};

// Segments of a chunk's keys, padded to whole vectors; not loaded for calls without segments
struct KeySegments {
  int32_t* id;

  KeySegments(Carver& carver, int64_t padded_keys) : id(carver.take<int32_t>(padded_keys)) {}

  void load(const RelAttention& p, const Chunk& chunk) const {
    if (p.segments.key_ids == nullptr) return;
    const int32_t* from = p.segments.key_ids + chunk.b * (p.mem_len + p.key_len) + chunk.first_key;
    for (int64_t j = 0; j < chunk.padded_keys; ++j) id[j] = j < chunk.keys ? from[j] : 0;
  }
};

// One row against the keys of a tile
template <typename T>
struct SegmentRow {
  bool used;  // the call has segments
  const int32_t* key_id;
  int32_t query_id;
  T different;

  SegmentRow(const RelAttention& p, const KeySegments& keys, int64_t first, int64_t b, int64_t row_index, T different)
      : used(p.segments.query_ids != nullptr),
        key_id(keys.id + first),
        query_id(used ? p.segments.query_ids[b * p.length + row_index] : 0),
        different(different) {}

  INLINE_MEMBER IntVec<T> differs(int64_t j) const { return load_ints(key_id + j, T()) != query_id; }
  INLINE_MEMBER Vec<T> add(Vec<T> score, int64_t j) const {
    return score + select<T>(differs(j), broadcast(different), Vec<T>{});
  }
  T add_one(T score, int64_t j) const { return !used || key_id[j] == query_id ? score : score + different; }
};

// Sums over keys, from which backward has the term's gradients
template <typename T>
struct SegmentSums {
  Vec<T> dS{}, dS_different{};  // over all keys, over keys of another segment
  Vec<T> P_different{};         // of probabilities, over the latter

  INLINE_MEMBER void add(IntVec<T> differs, Vec<T> some_dS, Vec<T> P) {
    dS += some_dS;
    dS_different += select<T>(differs, some_dS, Vec<T>{});
    P_different += select<T>(differs, P, Vec<T>{});
  }
};

// SegmentSums of each row of a block, added up over lanes
template <typename T>
struct SegmentRowSums {
  T dS[MAX_ROWS], dS_different[MAX_ROWS], P_different[MAX_ROWS];

  void start(int64_t r) { dS[r] = dS_different[r] = P_different[r] = 0; }
  // To and from memory for as many numbers a row
  static constexpr int64_t NUMBERS = 3;
  void keep(int64_t r, T* to) const { to[0] = dS[r], to[1] = dS_different[r], to[2] = P_different[r]; }
  void resume(int64_t r, const T* from) { dS[r] = from[0], dS_different[r] = from[1], P_different[r] = from[2]; }
  INLINE_MEMBER void add(int64_t r, const SegmentSums<T>& sums) {
    dS[r] += sum<T>(sums.dS);
    dS_different[r] += sum<T>(sums.dS_different);
    P_different[r] += sum<T>(sums.P_different);
  }

  // Sum of dS over keys of another segment, without delta's rounding error: a row's dS adds up to grad_lse but for that
  // error, which is spread in proportion to P. It is subtracted because sums over rows would not average it out.
  T different(int64_t r, T grad_lse) const { return dS_different[r] - (dS[r] - grad_lse) * P_different[r]; }
};

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
