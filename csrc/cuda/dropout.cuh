// Philox-4x32-10 as xlnet_kernels/dropout.py defines it.
#pragma once

#include "../rel_attention.h"
#include "tile.cuh"

namespace xlnet_kernels::cuda {

struct Philox {
  uint32_t key[2], head, offset, threshold;  // threshold 0: none
};

// Of a sequence's head, which is number `head` of the call
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

// Bit 2 n + parity: whether row i keeps column j0 + 8 n + 2 t + parity, n < COLUMNS / 8. j0 is a multiple of COLUMNS.
template <int COLUMNS>
DEVICE uint32_t kept_columns(const Philox& philox, int i, int j0, int t) {
  uint32_t kept = 0;
#pragma unroll
  for (int l = 0; l < 4; ++l) {  // columns that are 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 modulo 16
    const int parity = l % 2, odd = l / 2;
    uint32_t words[4] = {uint32_t(j0 / 64 * 16 + 8 * odd + 2 * t + parity), uint32_t(i), philox.head, philox.offset};
    philox_rounds(words, philox.key[0], philox.key[1]);
    const int first = j0 % 64 / 16;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const int n = 2 * (word - first) + odd;
      if (word >= first && n < COLUMNS / 8 && words[word] >= philox.threshold) kept |= 1u << (2 * n + parity);
    }
  }
  return kept;
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
