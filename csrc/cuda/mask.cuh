// The mask: labels of keys on their way to shared memory, and -inf for scores of pairs that visibility.cuh hides.
#pragma once

#include "visibility.cuh"

namespace xlnet_kernels::cuda {

// Labels of a tile of keys, in shared memory: zeros where there are none, and for keys beyond the last.
struct KeyLabels {
  int32_t *rank, *segment;
  float* bias;  // u.k
};

DEVICE KeyLabels key_labels_at(void* memory, int count) {
  int32_t* const words = static_cast<int32_t*>(memory);
  return {words, words + count, reinterpret_cast<float*>(words + 2 * count)};
}

template <int THREADS>
DEVICE void clear_key_labels(const KeyLabels& labels, int count) {
  for (int k = thread_index(); k < count; k += THREADS) {
    labels.rank[k] = labels.segment[k] = 0;
    labels.bias[k] = 0;
  }
}

// Starts to copy the labels of COUNT keys from j0 on, of those kinds that there are and someone asks for; `thread` of
// THREADS.
template <int THREADS, int COUNT>
DEVICE void copy_key_labels(const Call& call, const KeyLabels& labels, int b, int h, int j0, int thread,
                            bool asks_rank = true, bool asks_segment = true) {
  const RelAttention& p = call.p;
  const int keys = int(p.mem_len + p.key_len);
  const auto copy = [&](auto* to, const auto* from, int64_t row) {
    if (from == nullptr) return;
#pragma unroll
    for (int first = 0; first < COUNT; first += THREADS) {
      const int k = first + thread;
      if (first + THREADS <= COUNT || k < COUNT) copy_async<4>(to + k, from + row * keys + j0 + k, j0 + k < keys);
    }
  };
  if (asks_rank) copy(labels.rank, p.rank_mask.key_rank, b);
  if (asks_segment) copy(labels.segment, p.segments.key_ids, b);
  copy(labels.bias, call.workspace.key_bias, b * p.heads + h);
}
template <int THREADS, int COUNT>
DEVICE void copy_key_labels(const Call& call, const KeyLabels& labels, int b, int h, int j0) {
  copy_key_labels<THREADS, COUNT>(call, labels, b, h, j0, thread_index());
}

// Ranks as float16 numbers, of which one instruction compares two: the same order up to the largest magnitude, to which
// others are cut. Two keys share a word. A lane's words of 32 keys, columns 8 n + 2 t and their neighbours for n < 4,
// come one after the other.
DEVICE uint32_t rank_as_half(int32_t rank) {
  const int32_t cut = larger(-LARGEST_RANK, smaller(rank, LARGEST_RANK));
  return cut < 0 ? 0x8000u | uint32_t(-cut) : uint32_t(cut);
}
// The first key of a tile's word.
DEVICE int first_of_pair(int word) { return word / 16 * 32 + word % 4 * 8 + word % 16 / 4 * 2; }

// Starts to copy those of COUNT keys from j0 on, multiples of 32; `thread` of a block or a warp.
template <int COUNT>
DEVICE void copy_rank_pairs(const Call& call, uint32_t* to, int b, int j0, int thread) {
  if (call.p.rank_mask.key_rank == nullptr || thread >= COUNT / 8) return;
  const int tile = b * tiles_of(call.p.mem_len + call.p.key_len, BOUNDS_TILE) + j0 / BOUNDS_TILE;
  const Bytes16* const from = reinterpret_cast<const Bytes16*>(call.workspace.rank_pairs) + tile * (BOUNDS_TILE / 8);
  copy_async<16>(to + 4 * thread, from + j0 % BOUNDS_TILE / 8 + thread, true);
}

// -inf for those scores of 8 N keys that ranks hide from this lane's rows, where there are no floors.
template <int N>
DEVICE void hide_by_rank(float (&score)[N][4], const RowLabels (&labels)[2], const int32_t* key_rank, int t) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (key_rank[8 * n + 2 * t + i % 2] >= labels[i / 2].rank) score[n][i] = -INFINITY;
}

// Hides by rank, two keys at once; `ranks`: the rows' own, row g + 8 in the upper half. change(pair, n, r): the pair of
// ranks of columns 8 n + 2 t and its neighbour as row r is to see them.
template <int N, typename Change>
DEVICE void hide_by_rank(float (&score)[N][4], uint32_t ranks, const uint32_t* pairs, int t, Change change) {
  const uint32_t rank[2] = {(ranks & 0xffff) * 0x10001, (ranks >> 16) * 0x10001};
#pragma unroll
  for (int n = 0; n < N; n += 4) {
    const Bytes16 keys = *reinterpret_cast<const Bytes16*>(pairs + 4 * n + 4 * t);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        hide_unless_less(score[n + i][2 * r], score[n + i][2 * r + 1], change(keys.word[i], n + i, r), rank[r]);
  }
}
template <int N>
DEVICE void hide_by_rank(float (&score)[N][4], uint32_t ranks, const uint32_t* pairs, int t) {
  hide_by_rank(score, ranks, pairs, t, [](uint32_t pair, int, int) { return pair; });
}

// Hides by rank where rows, sorted_row and sorted_row + 8, see their own keys as well: those have a rank below all.
template <int N>
DEVICE void hide_by_rank_but_own(float (&score)[N][4], uint32_t ranks, const uint32_t* pairs, const RelAttention& p,
                                 int b, int sorted_row, int j0, int t) {
  constexpr uint32_t BELOW_ALL = 0xfc00fc00;  // -inf, twice
  int own_n[2];
  uint32_t half[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int column = load_query_row(p, b, sorted_row + 8 * r).own_key - j0 - 2 * t;
    own_n[r] = column >= 0 && column % 8 < 2 ? column / 8 : -1;
    half[r] = column % 2 ? 0xffff0000 : 0x0000ffff;
  }
  hide_by_rank(score, ranks, pairs, t, [&](uint32_t pair, int n, int r) {
    const uint32_t changed = n == own_n[r] ? half[r] : 0;
    return (pair & ~changed) | (BELOW_ALL & changed);
  });
}

// -inf for those scores of 8 N keys from j0 on, whose ranks are `key_rank`, that this lane's rows, sorted_row and
// sorted_row + 8, do not see.
template <int N>
DEVICE void apply_mask(float (&score)[N][4], Visibility visibility, const RelAttention& p, const RowLabels (&labels)[2],
                       int b, int h, int sorted_row, int j0, const int32_t* key_rank, int t) {
  if (visibility == Visibility::by_rank) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!labels[i / 2].sees_by_rank(key_rank[8 * n + 2 * t + i % 2])) score[n][i] = -INFINITY;
  } else if (visibility == Visibility::some) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const QueryRow row = load_query_row(p, b, sorted_row + 8 * r);
      const RowVisibility keys(p, row, b, h);
      // this lane's own key and the first within its reach, as columns of the tile less 2 t
      const int own = row.own_key - j0 - 2 * t, first = keys.reach.begin - j0 - 2 * t;
      const uint32_t within = keys.reach.end - keys.reach.begin;
      const uint32_t bits = p.mask.data ? keys.unmasked_columns<8 * N>(j0, t) : ~0u;
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int parity = 0; parity < 2; ++parity) {
          const int k = 8 * n + parity;
          const bool by_labels =
              (labels[r].sees_by_rank(key_rank[k + 2 * t]) || k == own) && uint32_t(k - first) < within;
          if (!by_labels || !(bits >> (2 * n + parity) & 1)) score[n][2 * r + parity] = -INFINITY;
        }
    }
  }
}

}  // namespace xlnet_kernels::cuda
