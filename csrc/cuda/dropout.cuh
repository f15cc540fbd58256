// Philox-4x32-10 as xlnet_kernels/dropout.py defines it.
#pragma once

#include "../rel_attention.h"
#include "tile.cuh"

namespace xlnet_kernels::cuda {

struct Philox {
  uint32_t key[2], head, offset, threshold;  // threshold 0: none
};

// Random numbers of a sequence's head, which is number `head` of the call
DEVICE Philox load_philox(const Dropout& dropout, int b, int head) {
  if (dropout.threshold == 0) return {{0, 0}, 0, 0, 0};
  const uint64_t seed = dropout.state[0], offset = dropout.state[1];
  const uint32_t shard = offset >> 32, first_head = shard & 0xFFFFF, other_heads = shard >> 20;
  // Sequences beyond 2^20 have no shards. Cut to what there is room for, or ptxas spills 500 bytes more in forward.
  const uint32_t number = head + (b & 0xFFFFF) * other_heads + first_head;
  return {{uint32_t(seed), uint32_t(seed >> 32)}, number, uint32_t(offset), dropout.threshold};
}

DEVICE void philox_rounds(uint32_t (&counter)[4], uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
    const uint32_t low = counter[0] * 0xD2511F53u, high = multiply_high(counter[0], 0xD2511F53u);
    const uint32_t low2 = counter[2] * 0xCD9E8D57u, high2 = multiply_high(counter[2], 0xCD9E8D57u);
    counter[0] = high2 ^ counter[1] ^ key0;
    counter[1] = low2;
    counter[2] = high ^ counter[3] ^ key1;
    counter[3] = low;
  }
}

// A byte of columns j0 to j0 + 63 of row i is dropped if it is less: 0 to 256.
DEVICE uint32_t byte_threshold(const Philox& philox, int i, int j0) {
  const uint32_t phase =
      philox.key[0] + philox.head * 0xC2B2AE35u + uint32_t(i) * 0x85EBCA6Bu + uint32_t(j0 / 64) * 0x9E3779B9u;
  return (philox.threshold >> 24) + (((philox.threshold & 0xffffff) + (phase >> 8)) >> 24);
}

// The bytes of columns j0 + 16 w + {2 t, 2 t + 1, 2 t + 8, 2 t + 9} of row i, a word each, w < 4.
DEVICE void draw_bytes(const Philox& philox, int i, int j0, int t, uint32_t (&words)[4]) {
  words[0] = j0 / 64 * 4 + t, words[1] = i, words[2] = philox.head, words[3] = philox.offset;
  philox_rounds(words, philox.key[0], philox.key[1]);
}

// Bit 2 n + parity: whether row i keeps column j0 + 8 n + 2 t + parity, n < COLUMNS / 8. j0 is a multiple of COLUMNS.
template <int COLUMNS>
DEVICE uint32_t kept_columns(const Philox& philox, int i, int j0, int t) {
  uint32_t words[4];
  draw_bytes(philox, i, j0, t, words);
  // added to a byte: bit 8 says whether that is not less than the threshold; two bytes at a time
  const uint32_t carry = (256 - byte_threshold(philox, i, j0)) * 0x10001;
  uint32_t kept = 0;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const uint32_t even = (words[word] & 0xff00ff) + carry, odd = (words[word] >> 8 & 0xff00ff) + carry;
    kept |= ((even >> 8 & 0x10001) | (odd >> 7 & 0x20002)) << (4 * word);
  }
  kept = (kept | kept >> 14) & 0xffff;
  return COLUMNS < 64 ? kept >> j0 % 64 / 4 & ((1u << COLUMNS / 4) - 1) : kept;
}

// Zeros for those weights that are dropped; bits: those of row g, 16 further on those of row g + 8.
template <typename T, int COUNT>
DEVICE void drop(Fragment (&weights)[COUNT], uint32_t bits) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t of_row = bits >> (16 * (i % 2));
      uint32_t& word = weights[k].word[i];
      if constexpr (sizeof(T) == 2) {  // two neighbours of eight columns
        const int n = 2 * k + i / 2;
        word &= (of_row >> (2 * n) & 1 ? 0xffffu : 0) | (of_row >> (2 * n + 1) & 1 ? 0xffff0000u : 0);
      } else if (!(of_row >> (2 * k + i / 2) & 1)) {
        word = 0;
      }
    }
}

}  // namespace xlnet_kernels::cuda
