#pragma once
// Floating-point formats and how they round, written so that a loop over lanes becomes vector code.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace machine {

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float flushed(float x) {
  const uint32_t bits = as_bits(x);
  return as_float((bits & 0x7f800000u) ? bits : bits & 0x80000000u);
}

enum class Round : uint8_t { Nearest, Zero, Down, Up, Away };  // Away: to nearest, ties away from zero

// For a double that need not be a float: the neighbour whose last bit is odd, which rounds on as the double would.
inline float to_odd(double x) {
  const float near = static_cast<float>(x);
  uint32_t bits = as_bits(near);
  const double back = near;
  const bool inexact = back != x && x == x;
  bits -= inexact && std::fabs(back) > std::fabs(x);
  return as_float(bits | static_cast<uint32_t>(inexact));
}

// Keeps what float has above `drop` low bits, in any rounding.
inline uint32_t rounded_bits(uint32_t bits, int drop, Round round) {
  const uint32_t below = (1u << drop) - 1, odd = bits >> drop & 1, negative = bits >> 31;
  uint32_t add = 0;
  if (round == Round::Nearest) add = (below >> 1) + odd;
  if (round == Round::Away) add = (below >> 1) + 1;
  if (round == Round::Down) add = negative ? below : 0;
  if (round == Round::Up) add = negative ? 0 : below;
  const bool special = (bits & 0x7f800000u) == 0x7f800000u;
  return special ? bits : (bits + add) & ~below;
}

struct Bf16 {
  static float get(uint16_t bits) { return as_float(static_cast<uint32_t>(bits) << 16); }
  static uint16_t make(float x, Round round = Round::Nearest) {
    const uint16_t rounded = rounded_bits(as_bits(x), 16, round) >> 16;
    return x != x ? 0x7fff : rounded;
  }
};

struct F16 {
  static float get(uint16_t half) {
    const uint32_t magnitude = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
    const uint32_t scaled = as_bits(as_float(magnitude) * as_float(0x77800000u));  // times 2^112
    const uint32_t special = magnitude | 0x7f800000u;
    return as_float(sign | (magnitude >= 0x0f800000u ? special : scaled));
  }
  static uint16_t make(float x, Round round = Round::Nearest) {
    const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    // Small numbers have fewer bits: an addition of 0.5 in their scale rounds them to a multiple of 2^-24.
    const uint32_t small = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
    const uint32_t normal = (rounded_bits(bits, 13, round) & 0x7fffffffu) - 0x38000000u;
    const bool tiny = magnitude < 0x38800000u;
    uint32_t result = tiny ? small : normal >> 13;
    const bool up = round == Round::Nearest || round == Round::Away || (round == Round::Up) != (sign != 0);
    const uint32_t most = round == Round::Zero ? 0x7bff : up ? 0x7c00 : 0x7bff;
    if (!tiny && normal >= 0x0f800000u) result = most;
    if (magnitude == 0x7f800000u) result = 0x7c00;
    if (tiny && round != Round::Nearest) {  // rare enough to be exact in another way
      const double exact = std::ldexp(static_cast<double>(as_float(magnitude)), 24);
      const bool away = (round == Round::Up && !sign) || (round == Round::Down && sign);
      result = static_cast<uint32_t>(away ? std::ceil(exact) : std::floor(exact));
    }
    if (magnitude > 0x7f800000u) return 0x7fff;
    return static_cast<uint16_t>(sign | result);
  }
};

inline float tf32(float x) { return as_float(as_bits(x) & 0xffffe000u); }  // what tensor cores read of a register

// 2^x to about 1 unit in the last place, as ex2.approx.
inline float exp2_approximately(float x) {
  const float clamped = x < -160.f ? -160.f : x > 130.f ? 130.f : x;
  const float whole = std::floor(clamped + 0.5f), part = clamped - whole;
  float power = 1.525273e-5f;
  power = power * part + 1.540353e-4f;
  power = power * part + 1.333356e-3f;
  power = power * part + 9.618129e-3f;
  power = power * part + 5.550411e-2f;
  power = power * part + 2.4022651e-1f;
  power = power * part + 6.931472e-1f;
  power = power * part + 1.f;
  const int exponent = static_cast<int>(whole), half = exponent / 2;  // two factors: one alone would overflow
  const float low = as_float(static_cast<uint32_t>(half + 127) << 23);
  const float high = as_float(static_cast<uint32_t>(exponent - half + 127) << 23);
  return x != x ? x : power * low * high;
}

}  // namespace machine
