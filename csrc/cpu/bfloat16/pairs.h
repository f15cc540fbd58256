// Pairs of bfloat16 numbers, side by side in a 32-bit lane: loaded, stored, taken apart, rounded.
#pragma once

#include "../arithmetic.h"
#include "../vector.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

constexpr int64_t PAIR_COLUMNS = 16;  // columns of a panel of pairs
constexpr int64_t DEPTH_STEP = 32;    // products' depth is whole steps

typedef uint32_t PairVec __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t HalfVec __attribute__((vector_size(VECTOR_BYTES / 2)));

INLINE PairVec load_pairs(const uint16_t* p) {
  typedef uint32_t loose __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
  return *reinterpret_cast<const loose*>(p);
}
INLINE void store_pairs(uint16_t* p, PairVec x) {
  typedef uint32_t loose __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
  *reinterpret_cast<loose*>(p) = x;
}

// Both numbers of each pair, as float32
INLINE Vec<float> first_of(PairVec pairs) { return (Vec<float>)(pairs << 16); }
INLINE Vec<float> second_of(PairVec pairs) { return (Vec<float>)(pairs & 0xffff0000u); }

typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES)));
template <int64_t FIRST, int64_t... LANE>
Indices<(2 * LANE + FIRST)...> every_second(Indices<LANE...>);
using HalfLanes = UpTo<VECTOR_BYTES / 2>;

// LANES numbers, one in the low half of each lane. Vectors of 8 bytes are widened and narrowed by shuffles: GCC takes
// their conversion apart.
INLINE PairVec load_halves(const uint16_t* p) {
  if constexpr (VECTOR_BYTES == 16) {
    uint64_t four;
    memcpy(&four, p, 8);
    typedef uint64_t Two __attribute__((vector_size(VECTOR_BYTES)));
    return (PairVec)shuffle((Halves)Two{four, 0}, Halves{}, decltype(interleaved<0>(HalfLanes()))());
  } else {
    typedef uint16_t loose __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const loose*>(p), PairVec);
  }
}
INLINE void store_halves(uint16_t* p, PairVec x) {
  typedef uint16_t loose __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
  if constexpr (VECTOR_BYTES == 16) {
    const Halves low = shuffle((Halves)x, (Halves)x, decltype(every_second<0>(HalfLanes()))());
    memcpy(p, &low, 8);
  } else {
    *reinterpret_cast<loose*>(p) = __builtin_convertvector(x, HalfVec);
  }
}

// The upper halves of the lanes of two vectors, one after the other
INLINE void store_upper_halves(uint16_t* p, PairVec first, PairVec second) {
  typedef uint16_t loose __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
  *reinterpret_cast<loose*>(p) = shuffle((Halves)first, (Halves)second, decltype(every_second<1>(HalfLanes()))());
}

// Sets the vector after the `visible` scores to -inf where pairs of vectors reach beyond them.
INLINE void end_pairs(float* score, int64_t visible) {
  const int64_t whole = round_up(visible, LANES<float>);
  if (whole % (2 * LANES<float>) != 0) store(score + whole, broadcast(-static_cast<float>(INFINITY)));
}

// x rounded to bfloat16, to the nearest, in the upper half of each lane; the lower half is anything. Ties, one number
// in 65536, go away from zero. NaN stays NaN unless its upper bits are all set, which no arithmetic makes.
INLINE PairVec round_to_bfloat16(Vec<float> x) { return (PairVec)x + 0x8000u; }

// The low part of x, whose high part is x rounded: their sum is x but for 2^-18 of it.
INLINE PairVec low_part(Vec<float> x, PairVec rounded) { return round_to_bfloat16(x - second_of(rounded)); }

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
