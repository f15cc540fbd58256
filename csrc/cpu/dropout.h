// Dropout: Philox-4x32-10 as xlnet_kernels/dropout.py defines it; 64 columns, a group, take the words of four counters.
#pragma once

#include "arithmetic.h"
#include "kernels.h"
#include "pack.h"
#include "vector.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

constexpr int64_t DROPOUT_GROUP = 64, DROPOUT_BLOCK = 4 * DROPOUT_GROUP;  // columns that are drawn at a time

// Numbers that the factors of `keys` columns need
constexpr int64_t dropout_elements(int64_t keys) { return keys + DROPOUT_GROUP + DROPOUT_BLOCK; }

// A byte of these columns of row i is dropped if it is less: 0 to 256.
static int byte_threshold(const Dropout& dropout, uint32_t group, uint32_t row, uint32_t head) {
  const uint32_t seed = static_cast<uint32_t>(dropout.state[0]);
  const uint32_t phase = seed + head * 0xC2B2AE35u + row * 0x85EBCA6Bu + group * 0x9E3779B9u;
  return static_cast<int>((uint64_t(dropout.threshold) + (phase >> 8)) >> 24);
}

// Stores the bytes of one word of each of four counters in the order of their columns. Counter t has columns 2 t, 2 t +
// 1, 2 t + 8 and 2 t + 9.
INLINE void store_columns(uint8_t* to, const uint32_t* words) {
  typedef uint8_t bytes __attribute__((vector_size(16), aligned(1), may_alias));
  const bytes x = *reinterpret_cast<const bytes*>(words);
  *reinterpret_cast<bytes*>(to) = shuffle(x, x, Indices<0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15>());
}

// For each column of four groups `kept` where its byte is not below the threshold, else 0. Words are the lower halves
// of 64-bit lanes; the upper halves are not read.
template <typename T>
static void block_factors(const Dropout& dropout, uint64_t group, uint32_t row, uint32_t head, T kept, T* factors) {
  constexpr int64_t WIDTH = VECTOR_BYTES / sizeof(uint64_t), VECTORS = 16 / WIDTH;
  const uint64_t seed = dropout.state[0], offset = dropout.state[1];
  WideVec words[4][VECTORS];
#pragma GCC unroll 8
  for (int64_t v = 0; v < VECTORS; ++v) {
    for (int64_t l = 0; l < WIDTH; ++l) words[0][v][l] = group * 4 + v * WIDTH + l;
    words[1][v] = WideVec{} + row;
    words[2][v] = WideVec{} + head;
    words[3][v] = WideVec{} + offset;
  }
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v) {
      const WideVec a = multiply_halves(words[0][v], 0xD2511F53u), b = multiply_halves(words[2][v], 0xCD9E8D57u);
      words[0][v] = (b >> 32) ^ words[1][v] ^ key0;
      words[1][v] = b;
      words[2][v] = (a >> 32) ^ words[3][v] ^ key1;
      words[3][v] = a;
    }
  }
  uint32_t drawn[4][16];
#pragma GCC unroll 4
  for (int64_t word = 0; word < 4; ++word)
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v) store_halves(drawn[word] + v * WIDTH, words[word][v]);
  for (int64_t g = 0; g < 4; ++g, factors += DROPOUT_GROUP) {
    uint8_t columns[DROPOUT_GROUP];
#pragma GCC unroll 4
    for (int64_t word = 0; word < 4; ++word) store_columns(columns + 16 * word, drawn[word] + 4 * g);
    const int threshold = byte_threshold(dropout, static_cast<uint32_t>(group + g), row, head);
    for (int64_t j = 0; j < DROPOUT_GROUP; ++j) factors[j] = columns[j] >= threshold ? kept : T(0);
  }
}

// 1 / (1 - p) where columns first .. first+count-1 of row i are kept, 0 where they are dropped.
// `factors` has room for dropout_elements(count); returns where column `first` lies in it.
template <typename T>
static const T* dropout_factors(const RelAttention& p, int64_t b, int64_t h, int64_t i, int64_t first, int64_t count,
                                T* factors) {
  const T kept = static_cast<T>(p.dropout.kept_scale);
  const uint64_t offset = p.dropout.state[1];
  const int64_t first_head = offset >> 32 & 0xFFFFF, other_heads = offset >> 52;
  const int64_t head = b * (p.heads + other_heads) + h + first_head;
  const int64_t group0 = first / DROPOUT_GROUP, groups = (first + count - 1) / DROPOUT_GROUP - group0 + 1;
  for (int64_t g = 0; g < groups; g += DROPOUT_BLOCK / DROPOUT_GROUP)
    block_factors(p.dropout, group0 + g, static_cast<uint32_t>(i), static_cast<uint32_t>(head), kept,
                  factors + g * DROPOUT_GROUP);
  return factors + (first - group0 * DROPOUT_GROUP);
}

// Probabilities of row i against keys first .. first+count-1, dropped out
template <typename T>
static void apply_dropout(const RelAttention& p, int64_t b, int64_t h, int64_t i, int64_t first, int64_t count,
                          T* factors, T* P) {
  if (p.dropout.p == 0 || count == 0) return;
  const T* kept = dropout_factors(p, b, h, i, first, count, factors);
  for (int64_t j = 0; j < count; ++j) P[j] *= kept[j];
}

// Each element is a column of head 0, in rows of as many as a counter has numbers for: 2^36.
template <typename S>
static void drop_out_as(const Elements& elements, const Dropout& dropout, int64_t begin, int64_t end) {
  const float kept = static_cast<float>(dropout.kept_scale);
  const S* from = static_cast<const S*>(elements.from);
  S* to = static_cast<S*>(elements.to);
  for (int64_t first = begin; first < end; first += DROPOUT_BLOCK) {
    float factors[DROPOUT_BLOCK];
    const uint64_t group = first / DROPOUT_GROUP;
    block_factors(dropout, group, static_cast<uint32_t>(group >> 30), 0, kept, factors);
    const int64_t count = smaller(end - first, DROPOUT_BLOCK);
    for (int64_t i = 0; i < count; ++i) from_work(to_work(from[first + i]) * factors[i], to + first + i);
  }
}

static void drop_out(const Elements& elements, const Dropout& dropout, int64_t begin, int64_t end) {
  if (elements.dtype == DType::bfloat16) return drop_out_as<BFloat16>(elements, dropout, begin, end);
  drop_out_as<float>(elements, dropout, begin, end);
}

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
