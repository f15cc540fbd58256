// The host's version of csrc/cuda/primitives.cuh: the same names with the same meaning, for threads that are fibers.
// Whatever the hardware forbids without saying so ends the launch with a sentence (machine.h).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <typeinfo>

#include "machine.h"
#include "numbers.h"

#define KERNEL void
#define DEVICE inline
#define THREADS_PER_BLOCK(threads, blocks)

namespace xlnet_kernels::cuda {

using Stream = void*;
using simt::Index;
using simt::Place;

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

DEVICE int thread_index() { return simt::view.thread; }
DEVICE Index block_index() { return simt::view.block; }
DEVICE Index grid_size() { return simt::view.grid; }
DEVICE char* shared_memory() { return simt::view.shared; }

DEVICE void sync_block(Place place = Place::here()) { simt::meet_block(place); }
DEVICE void sync_warp(Place place = Place::here()) {
  simt::meet("sync_warp", place, nullptr, [](void* const*) {});
}

namespace simt_detail {

template <typename T>
struct Shuffle {
  T value, result;
  int from;
  static void complete(void* const* lanes) {
    for (int lane = 0; lane < simt::LANES; ++lane) {
      Shuffle& to = *static_cast<Shuffle*>(lanes[lane]);
      to.result = static_cast<Shuffle*>(lanes[to.from % simt::LANES])->value;
    }
  }
};

struct Ballot {
  bool condition;
  uint32_t result;
  static void complete(void* const* lanes) {
    uint32_t set = 0;
    for (int lane = 0; lane < simt::LANES; ++lane) {
      set |= uint32_t(static_cast<Ballot*>(lanes[lane])->condition) << lane;
    }
    for (int lane = 0; lane < simt::LANES; ++lane) static_cast<Ballot*>(lanes[lane])->result = set;
  }
};

struct Ldmatrix {
  const char* row;
  uint32_t* in;
  template <bool TRANSPOSED>
  static void complete(void* const* lanes) {
    for (int lane = 0; lane < simt::LANES; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        const auto row = [&](int r) { return static_cast<Ldmatrix*>(lanes[8 * matrix + r])->row; };
        uint16_t pair[2];
        for (int i = 0; i < 2; ++i) {
          const int along = 2 * (lane % 4) + i, across = lane / 4;
          std::memcpy(&pair[i], TRANSPOSED ? row(along) + 2 * across : row(across) + 2 * along, 2);
        }
        static_cast<Ldmatrix*>(lanes[lane])->in[matrix] = pair[0] | uint32_t(pair[1]) << 16;
      }
    }
  }
};

}  // namespace simt_detail

template <typename T>
DEVICE T shuffle(T value, int lane, Place place = Place::here()) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "what __shfl_sync takes");
  simt_detail::Shuffle<T> mine{value, {}, lane & 31};
  simt::meet("shuffle", place, &mine, mine.complete);
  return mine.result;
}
template <typename T>
DEVICE T shuffle_xor(T value, int mask, Place place = Place::here()) {
  return shuffle(value, (thread_index() ^ mask) & 31, place);
}
DEVICE uint32_t ballot(bool condition, Place place = Place::here()) {
  simt_detail::Ballot mine{condition, 0};
  simt::meet("ballot", place, &mine, mine.complete);
  return mine.result;
}

DEVICE uint32_t shared_address(const void* pointer, Place place = Place::here()) {
  return uint32_t(simt::shared_offset(pointer, 1, "shared_address", place));
}

DEVICE void ldmatrix(uint32_t (&in)[4], const void* row, Place place = Place::here()) {
  simt::shared_offset(row, 16, "ldmatrix", place);
  simt_detail::Ldmatrix mine{static_cast<const char*>(row), in};
  simt::meet("ldmatrix", place, &mine, mine.complete<false>);
}
DEVICE void ldmatrix_transposed(uint32_t (&in)[4], const void* row, Place place = Place::here()) {
  simt::shared_offset(row, 16, "ldmatrix_transposed", place);
  simt_detail::Ldmatrix mine{static_cast<const char*>(row), in};
  simt::meet("ldmatrix_transposed", place, &mine, mine.complete<true>);
}

template <typename T>
DEVICE void mma(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Place place = Place::here()) {
  constexpr auto complete = std::is_same_v<T, float>  ? simt::mma_tf32
                            : std::is_same_v<T, Half> ? simt::mma_half
                                                      : simt::mma_bfloat16;
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>);
  simt::Fragments mine{sum, a, b};
  simt::meet("mma", place, &mine, complete);
}

DEVICE void hide_unless_less(float& lower, float& upper, uint32_t a, uint32_t b) {
  if (!(simt::F16::get(uint16_t(a)) < simt::F16::get(uint16_t(b)))) lower = -INFINITY;
  if (!(simt::F16::get(uint16_t(a >> 16)) < simt::F16::get(uint16_t(b >> 16)))) upper = -INFINITY;
}

DEVICE uint32_t bits_of(float x) { return simt::as_bits(x); }
DEVICE float float_of(uint32_t bits) { return simt::as_float(bits); }

DEVICE uint32_t round_to_tf32(float x) { return simt::round_to_tf32(x); }

template <typename T>
DEVICE uint32_t pack(float low, float high) {
  static_assert(std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>);
  using Format = std::conditional_t<std::is_same_v<T, Half>, simt::F16, simt::Bf16>;
  return Format::make(low) | uint32_t(Format::make(high)) << 16;
}

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }
DEVICE float to_float(Half x) { return simt::F16::get(x.bits); }

template <int BYTES>
DEVICE void copy_async(void* shared, const void* global, bool inside, Place place = Place::here()) {
  static_assert(BYTES == 4 || BYTES == 16);
  simt::copy_async(shared, global, BYTES, inside, place);
}
DEVICE void commit_copies(Place place = Place::here()) { simt::commit_copies(place); }
template <int PENDING>
DEVICE void wait_for_copies(Place place = Place::here()) {
  static_assert(PENDING >= 0);
  simt::wait_for_copies(PENDING, place);
}

constexpr bool HAS_VECTOR_RED = false;  // as on sm_80, so that lanes exchange what they add
// Fibers change places only where a primitive is called: plain additions are atomic.
DEVICE void add_atomically(float* to, float first, float second, Place place = Place::here()) {
  simt::check_global(to, 8, "add_atomically", place);
  simt::pass("add_atomically", place);
  to[0] += first;
  to[1] += second;
}
DEVICE void add_atomically(float* to, float value, Place place = Place::here()) {
  simt::check_global(to, 4, "add_atomically", place);
  simt::pass("add_atomically", place);
  *to += value;
}

DEVICE int32_t count_up(int32_t* counter, Place place = Place::here()) {
  simt::check_global(counter, 4, "count_up", place);
  simt::pass("count_up", place);
  return (*counter)++;
}
// Blocks run one after the other: who waits in vain waits for ever, and the launch ends.
DEVICE void store_release(int32_t* to, int32_t value, Place place = Place::here()) {
  simt::check_global(to, 4, "store_release", place);
  simt::pass("store_release", place);
  *to = value;
}
DEVICE int32_t load_acquire(const int32_t* from, Place place = Place::here()) {
  simt::check_global(from, 4, "load_acquire", place);
  simt::pass("load_acquire", place);
  return *from;
}
DEVICE void pause(int, Place place = Place::here()) { simt::pass("pause", place); }

DEVICE float exp2_approximately(float x) {
  const float result = std::exp2(x);
  return std::fpclassify(result) == FP_SUBNORMAL ? 0.0f : result;
}
DEVICE int first_bit(uint32_t word) { return __builtin_ctz(word); }
DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
DEVICE int64_t multiply_wide(int a, int b) { return int64_t(a) * b; }
template <typename T>
DEVICE T kept_in_register(T x) {
  return x;
}

inline int shared_memory_of_block(int device) { return device == 0 ? simt::MAX_SHARED_BYTES : -1; }

constexpr bool HAS_WARPGROUPS = false;  // no wgmma here
inline int compute_capability() { return 80; }

template <typename Arguments>
inline const char* launch(void (*kernel)(Arguments), Index grid, int threads, int shared_bytes, Stream,
                          const Arguments& arguments) {
  static_assert(std::is_trivially_copyable_v<Arguments> && sizeof(Arguments) <= 4096, "what a kernel can be given");
  const auto call = [](const simt::Launch& launch) {
    reinterpret_cast<void (*)(Arguments)>(launch.kernel)(*static_cast<const Arguments*>(launch.arguments));
  };
  return simt::run(
      {reinterpret_cast<void (*)()>(kernel), typeid(Arguments).name(), grid, threads, shared_bytes, call, &arguments});
}

}  // namespace xlnet_kernels::cuda
