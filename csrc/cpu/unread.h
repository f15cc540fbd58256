// Unread rows: keys, values and rows of rel_key that no query row of a chunk reads, padding for example. Unread rows
// with NaN or infinity count as zeros, because zero times NaN would be NaN. Problems without such numbers pay for one
// pass over the rows that are copied.
#pragma once

#include "chunks.h"
#include "mask.h"
#include "pack.h"
#include "scratch.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

template <typename T>
static bool is_finite_row(const RelAttention& p, const Tensor4& t, int64_t b, int64_t h, int64_t row) {
  T some[64];
  for (int64_t d0 = 0; d0 < p.head_dim; d0 += 64) {
    const int64_t count = smaller(p.head_dim - d0, 64);
    read(p.dtype, t.data, row_start(t, b, h, row) + d0 * t.stride[3], t.stride[3], count, some);
    for (int64_t d = 0; d < count; ++d)
      if (!is_finite(some[d])) return false;
  }
  return true;
}

// Whether any row of a chunk sees key_of(own), `own` being the key at the row's position
template <typename F>
static bool is_seen(const RelAttention& p, const Chunk& chunk, int64_t b, F key_of) {
  for (int64_t sorted = chunk.begin; sorted < chunk.end; ++sorted) {
    const int64_t own = p.mem_len + position_at(p, b, sorted);
    if (sees_key(p, b, chunk.h, row_index_at(p, b, sorted), own, key_of(own))) return true;
  }
  return false;
}

// Calls use(sequence). If that returns false (not finite), calls it again with zeros for the rows that find() flags.
template <typename Use, typename Find>
static void with_unread_as_zeros(RowSequence sequence, Use use, Find find) {
  if (use(sequence)) return;
  sequence.unread = find();
  if (sequence.unread != nullptr) use(sequence);
}

// Flags of a chunk's unread rows
struct Unread {
  bool *keys, *rel_rows;  // by packed row

  Unread(Carver& carver, int64_t max_keys, int64_t max_window_rows)
      : keys(carver.take<bool>(max_keys)), rel_rows(carver.take<bool>(max_window_rows)) {}

  // Finds them among the first `count` keys, or values, of a sequence: null if there are none.
  template <typename T>
  const bool* find_keys(const RelAttention& p, const Chunk& chunk, const RowSequence& sequence, int64_t count) const {
    return find<T>(p, chunk, sequence, count, keys,
                   [&](int64_t j) { return is_seen(p, chunk, chunk.b, [&](int64_t) { return chunk.first_key + j; }); });
  }

  // Finds them in the window of rel_key, which the chunks of `sequences` sequences share.
  template <typename T>
  const bool* find_rel_rows(const RelAttention& p, const Chunk& chunk, int64_t sequences, int64_t count) const {
    return find<T>(p, chunk, window_of(p, chunk.rel_first), count, rel_rows, [&](int64_t t) {
      for (int64_t b = chunk.b; b < smaller(chunk.b + sequences, p.batch); ++b)
        if (is_seen(p, chunk, b, [&](int64_t own) { return own - p.rel_key.max_distance + chunk.rel_first + t; }))
          return true;
      return false;
    });
  }

 private:
  template <typename T, typename F>
  static const bool* find(const RelAttention& p, const Chunk& chunk, const RowSequence& sequence, int64_t count,
                          bool* unread, F is_read) {
    bool any = false;
    for (int64_t j = 0; j < count; ++j) {
      int64_t row, left;
      const Tensor4* tensor = sequence.find(j, row, left);
      unread[j] = tensor != nullptr && !is_finite_row<T>(p, *tensor, chunk.b, chunk.h, row) && !is_read(j);
      any = any || unread[j];
    }
    return any ? unread : nullptr;
  }
};

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
