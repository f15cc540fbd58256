// Keys and values that no row of their sequence sees, such as those of padding, and rows of rel_key that no visible
// pair reads. They count as zeros wherever a product would take them, because zero times NaN or infinity is NaN.
//
// Keys are found by labels and masks alone, without a look at the numbers. Rows of rel_key are looked for among those
// that are not finite, because that question costs more than reading them.
#pragma once

#include <type_traits>

#include "visibility.cuh"

namespace xlnet_kernels::cuda {

// A bit for each key, or row of rel_key, of one head: whether it is unread. Null: none is.
struct UnreadRows {
  const uint32_t* words;

  DEVICE bool has(int row) const { return words != nullptr && words[row / 32] >> row % 32 & 1; }
  // Warp: whether any of all `count` is
  DEVICE bool any(int count, int lane) const {
    uint32_t found = 0;
    for (int i = lane; words != nullptr && i < tiles_of(count, 32); i += WARP) found |= words[i];
    return ballot(found != 0) != 0;
  }
};

// Bits of COUNT keys from `first` on, a multiple of COUNT; more may follow in the word
template <int COUNT>
DEVICE auto unread_bits(UnreadRows keys, int first) {
  static_assert(COUNT <= BOUNDS_TILE && BOUNDS_TILE % COUNT == 0);
  using Bits = std::conditional_t<(COUNT > 32), uint64_t, uint32_t>;
  Bits bits = 0;
  if (keys.words == nullptr) return bits;
  bits = keys.words[first / 32] >> first % 32;
  if constexpr (COUNT > 32) bits |= Bits(keys.words[first / 32 + 1]) << 32;
  return bits;
}

DEVICE UnreadRows unread_keys(const Call& call, int b, int h) {
  const uint32_t* const words = call.workspace.unread_keys;
  if (words == nullptr) return {nullptr};
  return {words + int64_t(call.mask_heads == 1 ? b : b * call.mask_heads + h) * call.key_words};
}
DEVICE UnreadRows unread_rel_rows(const Call& call, int b, int h) {
  const uint32_t* const words = call.workspace.unread_rel_rows;
  if (words == nullptr) return {nullptr};
  const int64_t head = call.shared_rel_key ? h : b * call.p.heads + h;
  return {words + head * tiles_of(call.p.rel_len, 32)};
}

// Whether the dense mask, if there is one, shows key j to any row. Lanes have neighbouring keys; one beyond the last
// has true.
DEVICE bool is_unmasked_somewhere(const RelAttention& p, int b, int h, int j) {
  constexpr int TOGETHER = 16;
  const int length = int(p.length);
  const int64_t* stride = p.mask.stride;
  const bool is_key = j < p.mem_len + p.key_len;
  const bool* mask = static_cast<const bool*>(p.mask.data) + b * stride[0] + h * stride[1] + j * stride[3];
  bool found = p.mask.data == nullptr || !is_key;
#pragma unroll 1
  for (int end = length; end > 0 && ballot(!found); end -= TOGETHER)
#pragma unroll
    for (int i = 1; i <= TOGETHER; ++i)
      if (p.mask.data != nullptr && is_key && end >= i) found |= mask[(end - i) * stride[2]];
  return found;
}

// Warp: the row of the highest rank, which sees most keys.
DEVICE QueryRow load_row_of_highest_rank(const RelAttention& p, int b, int lane) {
  int32_t highest = LOWEST;
  int own = 0;
#pragma unroll 4
  for (int i = lane; i < p.length; i += WARP) {
    const int32_t rank = p.rank_mask.query_rank[b * p.length + row_index(p, b, i)];
    if (rank > highest) highest = rank, own = i;
  }
  return load_query_row(p, b, shuffle(own, first_bit(ballot(highest == warp_max(highest)))));
}

// Warp: bit k says that key first + k is there and that no row sees it. Later rows are asked first, because a causal
// mask shows most keys to them.
DEVICE uint32_t find_unread_keys(const RelAttention& p, int b, int h, int first, int lane) {
  constexpr int EACH = 8, ROWS = EACH * WARP;
  const int j = first + lane, keys = int(p.mem_len + p.key_len);
  const int32_t rank = p.rank_mask.key_rank && j < keys ? p.rank_mask.key_rank[int64_t(b) * keys + j] : LOWEST;
  uint32_t may_be_read = ballot(is_unmasked_somewhere(p, b, h, j)), unread = ballot(j < keys);
  if (p.rank_mask.query_rank) {
    const QueryRow row = load_row_of_highest_rank(p, b, lane);
    unread &= ~ballot(j < keys && RowVisibility(p, row, b, h).sees(j));
    may_be_read &= ballot(p.rank_mask.sees_self || rank < row.rank);
  }
  for (int begin = (int(p.length) - 1) / ROWS * ROWS; begin >= 0 && (unread & may_be_read); begin -= ROWS) {
    RowSummary own;
#pragma unroll
    for (int i = 0; i < EACH; ++i) own.add(load_query_row(p, b, begin + i * WARP + lane));
    const uint32_t candidates = ballot(own.of_warp().may_see(p, j, rank)) & unread & may_be_read;
    for (uint32_t left = candidates; left != 0; left &= left - 1) {
      const uint32_t bit = left & -left;
      for (int i = 0; i < EACH && unread & bit; ++i) {
        const QueryRow row = load_query_row(p, b, begin + i * WARP + lane);
        if (ballot(RowVisibility(p, row, b, h).sees(first + first_bit(bit)))) unread &= ~bit;
      }
    }
  }
  return unread;
}

// Warp: whether a visible pair of a row of batches b .. end - 1 reads a row of rel_key.
DEVICE bool is_rel_row_read(const RelAttention& p, int b, int end, int h, int rel_row, int lane) {
  for (; b < end; ++b)
    for (int first = 0; first < p.length; first += WARP) {
      const QueryRow row = load_query_row(p, b, first + lane);
      const int j = row.position + int(p.mem_len - p.rel_key.max_distance) + rel_row;
      if (ballot(j >= 0 && j < p.mem_len + p.key_len && RowVisibility(p, row, b, h).sees(j))) return true;
    }
  return false;
}

// Warp: of rows of rel_key from `first` on that are not finite, bit by bit, those that no visible pair of batches
// b .. end - 1 reads.
DEVICE uint32_t unread_among(uint32_t not_finite, const RelAttention& p, int b, int end, int h, int first, int lane) {
  uint32_t unread = not_finite;
  for (uint32_t left = unread; left != 0; left &= left - 1) {
    const uint32_t bit = left & -left;
    if (is_rel_row_read(p, b, end, h, first + first_bit(bit), lane)) unread &= ~bit;
  }
  return unread;
}

}  // namespace xlnet_kernels::cuda
