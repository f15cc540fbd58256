// AVX512-BF16's instruction in plain C++, so that every processor can run and test these kernels.
#pragma once

#include "../pack.h"
#include "pairs.h"
#include "products.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

template <int ROWS>
static __attribute__((noinline)) void multiply_panel(const Product& x, int64_t m, int64_t n) {
  constexpr int VECTORS = PAIR_COLUMNS / LANES<float>;
  float* c = x.c + m * x.c_stride + n / PAIR_COLUMNS * x.c_panel;
  const uint16_t *a = x.a + m * x.a_stride, *b = x.b + n / PAIR_COLUMNS * x.b_panel;
  Vec<float> sum[ROWS][VECTORS];
  for (int i = 0; i < ROWS; ++i)
    for (int v = 0; v < VECTORS; ++v)
      sum[i][v] = load((x.initial != nullptr ? x.initial + n : c + i * x.c_stride) + v * LANES<float>);
  for (int64_t k = 0; k < x.depth; k += 2, b += 2 * PAIR_COLUMNS) {
    for (int v = 0; v < VECTORS; ++v) {
      const PairVec right = load_pairs(b + 2 * v * LANES<float>);
      for (int i = 0; i < ROWS; ++i) {
        const uint16_t* left = a + i * x.a_stride + k;
        sum[i][v] += as_work(static_cast<uint32_t>(left[1]) << 16) * second_of(right);
        sum[i][v] += as_work(static_cast<uint32_t>(left[0]) << 16) * first_of(right);
      }
    }
  }
  for (int i = 0; i < ROWS; ++i)
    for (int v = 0; v < VECTORS; ++v) store(c + i * x.c_stride + v * LANES<float>, sum[i][v]);
}

static void multiply_emulated(const Product& x) {
  x.as_single_products([](const Product& part) {
    for (int64_t n = 0; n < part.columns; n += PAIR_COLUMNS)
      for (int64_t m = 0; m < part.rows; m += 8) multiply_panel<8>(part, m, n);
  });
}

static void no_tiles(TileState*) {}

static const Products emulated_products{"emulated_bf16", false, true, multiply_emulated, no_tiles, no_tiles};

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
