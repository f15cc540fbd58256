// Number formats and matrix products of a warp, as the hardware has them.
#pragma once

#include "../machine/numbers.h"

namespace simt {

using machine::as_bits, machine::as_float, machine::Bf16, machine::F16;

// To the nearest, ties away from zero.
inline uint32_t round_to_tf32(float x) {
  return x != x ? 0x7fffffffu : machine::rounded_bits(as_bits(x), 13, machine::Round::Away);
}

// One lane's part of a product.
struct Fragments {
  float* sum;
  const uint32_t *a, *b;
};
void mma_half(void* const* lanes);
void mma_bfloat16(void* const* lanes);
void mma_tf32(void* const* lanes);

}  // namespace simt
