// Number formats and matrix products of a warp, as the hardware has them.
#pragma once

#include <cstdint>
#include <cstring>

namespace simt {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

constexpr uint32_t SIGN = 0x80000000u, INFINITE = 0x7f800000u;

inline float half_to_float(uint16_t half) {
  // 2^112 corrects the exponent's bias, of subnormal numbers too.
  const uint32_t finite = bits_of(float_of(uint32_t(half & 0x7fff) << 13) * 0x1p112f);
  const uint32_t special = (half & 0x7c00) == 0x7c00 ? INFINITE : 0;  // infinite and NaN
  return float_of(finite | special | uint32_t(half & 0x8000) << 16);
}

// To the nearest, ties to even.
inline uint16_t round_to_half(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & ~SIGN;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (magnitude > INFINITE) return 0x7fff;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00;  // 65520, half way from the largest number to 65536
  if (magnitude < 0x38800000u) {                       // below 2^-14: adding 0.5 rounds to multiples of 2^-24
    return sign | uint16_t(bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));
  }
  return sign | uint16_t((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000u) >> 13);
}

inline uint16_t round_to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & ~SIGN) > INFINITE) return 0x7fff;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

constexpr uint32_t TF32_BITS = ~0x1fffu;

// To the nearest, ties away from zero.
inline uint32_t round_to_tf32(float x) {
  const uint32_t bits = bits_of(x);
  return (bits & ~SIGN) > INFINITE ? 0x7fffffffu : (bits + 0x1000) & TF32_BITS;
}

// What one lane brings to a product.
struct Fragments {
  float* sum;
  const uint32_t *a, *b;
};
void mma_half(void* const* lanes);
void mma_bfloat16(void* const* lanes);
void mma_tf32(void* const* lanes);

}  // namespace simt
