// Vectors of VECTOR_BYTES bytes through the compiler's vector extension: one source for AVX-512, AVX2, NEON and plain
// C++.
#pragma once

#include "instruction_set.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

template <typename T>
struct VectorOf;

template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(VECTOR_BYTES)));
  typedef float loose __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
  typedef int32_t integer __attribute__((vector_size(VECTOR_BYTES)));
};

template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(VECTOR_BYTES)));
  typedef double loose __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
  typedef int64_t integer __attribute__((vector_size(VECTOR_BYTES)));
};

template <typename T>
using Vec = typename VectorOf<T>::type;
template <typename T>
using IntVec = typename VectorOf<T>::integer;

template <typename T>
constexpr int64_t LANES = VECTOR_BYTES / sizeof(T);

template <typename T>
INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename VectorOf<T>::loose*>(p);
}

template <typename T>
INLINE void store(T* p, Vec<T> x) {
  *reinterpret_cast<typename VectorOf<T>::loose*>(p) = x;
}

template <typename T>
INLINE void add(T* to, Vec<T> x) {
  store(to, load(to) + x);
}

template <typename T>
INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}

// 32-bit numbers in the lower halves of 64-bit lanes
typedef uint64_t WideVec __attribute__((vector_size(VECTOR_BYTES)));

// Their products, 64 bits each: one instruction, which Clang finds by itself.
INLINE WideVec multiply_halves(WideVec x, uint32_t by) {
#if defined(HAS_NEON)
  return (WideVec)vmull_n_u32(vmovn_u64((uint64x2_t)x), by);
#elif VECTOR_BYTES == 64 && !defined(__clang__)
  typedef int32_t words __attribute__((vector_size(VECTOR_BYTES)));
  typedef long long products __attribute__((vector_size(VECTOR_BYTES)));
  return (WideVec)__builtin_ia32_pmuludq512_mask((words)x, (words)(WideVec{} + by), products{}, 0xff);
#elif VECTOR_BYTES == 32 && !defined(__clang__)
  typedef int32_t words __attribute__((vector_size(VECTOR_BYTES)));
  return (WideVec)__builtin_ia32_pmuludq256((words)x, (words)(WideVec{} + by));
#else
  return (x & 0xffffffffu) * by;
#endif
}

INLINE void store_halves(uint32_t* p, WideVec x) {
  typedef uint32_t half __attribute__((vector_size(VECTOR_BYTES / 2), aligned(4), may_alias));
  *reinterpret_cast<half*>(p) = __builtin_convertvector(x, half);
}

template <typename T>
INLINE Vec<T> select(IntVec<T> condition, Vec<T> yes, Vec<T> no) {
  return condition ? yes : no;
}

// b where either is NaN
template <typename T>
INLINE Vec<T> maximum(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}

// int32 values as lanes of T's width
INLINE IntVec<float> load_ints(const int32_t* p, float) {
  typedef int32_t loose __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
  return *reinterpret_cast<const loose*>(p);
}

INLINE IntVec<double> load_ints(const int32_t* p, double) {
  typedef int32_t half __attribute__((vector_size(VECTOR_BYTES / 2), aligned(4), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const half*>(p), IntVec<double>);
}

// Not lambdas: GCC compiles those without the file's target, and would then pass vectors to them in another way.
template <typename T>
struct Add {
  INLINE Vec<T> apply(Vec<T> a, Vec<T> b) { return a + b; }
};
template <typename T>
struct Maximum {
  INLINE Vec<T> apply(Vec<T> a, Vec<T> b) { return maximum<T>(a, b); }
};

// The shuffles' lanes as constants: from loops GCC makes instructions that put them together lane by lane.
template <int64_t... LANE>
struct Indices {};
#if defined(__clang__)
template <typename T, T... LANE>
using IndicesOf = Indices<LANE...>;
template <int64_t N>
using UpTo = __make_integer_seq<IndicesOf, int64_t, N>;
#else
template <int64_t N>
using UpTo = Indices<__integer_pack(N)...>;
#endif

// Stores of a vector, and of its lower or upper half
template <typename T>
struct StoreAll {
  INLINE void apply(T* p, Vec<T> x) { store(p, x); }
};
template <typename T, int64_t HALF>
struct StoreHalf {
  INLINE void apply(T* p, Vec<T> x) { apply(p, x, UpTo<LANES<T> / 2>()); }
  template <int64_t... LANE>
  INLINE void apply(T* p, Vec<T> x, Indices<LANE...>) {
#if defined(__clang__) || __GNUC__ >= 12
    typedef T half __attribute__((vector_size(VECTOR_BYTES / 2), aligned(alignof(T)), may_alias));
    *reinterpret_cast<half*>(p) = __builtin_shufflevector(x, x, (HALF * LANES<T> / 2 + LANE)...);
#else
    memcpy(p, reinterpret_cast<const char*>(&x) + HALF * VECTOR_BYTES / 2, VECTOR_BYTES / 2);
#endif
  }
};

// Lanes of two vectors, counted through both
template <typename V, int64_t... LANE>
INLINE V shuffle(V a, V b, Indices<LANE...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, LANE...);
#else
  return __builtin_shuffle(a, b, decltype(a < b){LANE...});
#endif
}

template <int64_t STEP, int64_t... LANE>
Indices<(LANE ^ STEP)...> partners(Indices<LANE...>);

// Lanes that interleave two vectors: their first halves, or with OFFSET = N / 2 their second ones
template <int64_t OFFSET, int64_t... LANE>
Indices<(LANE / 2 + LANE % 2 * int64_t(sizeof...(LANE)) + OFFSET)...> interleaved(Indices<LANE...>);

template <typename T, typename F, int64_t STEP>
INLINE Vec<T> fold_from(Vec<T> x) {
  if constexpr (STEP == 0) {
    return x;
  } else {
    return fold_from<T, F, STEP / 2>(F::apply(x, shuffle(x, x, decltype(partners<STEP>(UpTo<LANES<T>>()))())));
  }
}

// Folds the lanes of x
template <typename T, typename F>
INLINE T fold(Vec<T> x) {
  return fold_from<T, F, LANES<T> / 2>(x)[0];
}

template <typename T>
INLINE T sum(Vec<T> x) {
  return fold<T, Add<T>>(x);
}

template <typename T>
INLINE T maximum_of(Vec<T> x) {
  return fold<T, Maximum<T>>(x);
}

// LANES vectors, transposed: result[d][lane] = from[lane][d]. `from` is changed.
template <typename T>
INLINE void transpose(Vec<T>* from, Vec<T>* result) {
  constexpr int64_t N = LANES<T>;
  const decltype(interleaved<0>(UpTo<N>())) low;
  const decltype(interleaved<N / 2>(UpTo<N>())) high;
#pragma GCC unroll 4
  for (int64_t step = 1; step < N; step *= 2) {  // log2(N) perfect shuffles
#pragma GCC unroll 16
    for (int64_t i = 0; i < N / 2; ++i) {
      result[2 * i] = shuffle(from[i], from[i + N / 2], low);
      result[2 * i + 1] = shuffle(from[i], from[i + N / 2], high);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < N; ++i) from[i] = result[i];
  }
}

// The LANES x LANES block at `rows` (row stride in elements), transposed
template <typename T>
INLINE void transpose_block(const T* rows, int64_t stride, Vec<T>* result) {
  Vec<T> from[LANES<T>];
#pragma GCC unroll 16
  for (int64_t lane = 0; lane < LANES<T>; ++lane) from[lane] = load(rows + lane * stride);
  transpose<T>(from, result);
}

// 2^x for x <= 0 (a hair above 0 is fine), NaN for NaN. x = n + f with |f| <= 1/2, and 2^f by its Taylor polynomial in
// f ln 2, whose last term is below half an ulp. n is added to the exponent's bits. The smallest x taken is the one
// whose result has no bits left: all below it, -inf first, give exactly 0 (a subnormal result is off by less than
// 2^-126).
INLINE Vec<float> exp2(Vec<float> x) {
  const Vec<float> magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  x = maximum<float>(broadcast(-127.0f), x);
  const Vec<float> shifted = x + magic;
  const Vec<float> f = x - (shifted - magic);
  Vec<float> y = broadcast(1.5252733804e-5f);
  y = y * f + 1.5403530393e-4f;
  y = y * f + 1.3333558146e-3f;
  y = y * f + 9.6181291076e-3f;
  y = y * f + 5.5504108665e-2f;
  y = y * f + 2.4022650696e-1f;
  y = y * f + 6.9314718056e-1f;
  y = y * f + 1.0f;
  return (Vec<float>)((IntVec<float>)y + ((IntVec<float>)shifted << 23));  // the rest of magic falls off the top
}

INLINE Vec<double> exp2(Vec<double> x) {
  const Vec<double> magic = broadcast(6755399441055744.0);  // 1.5 * 2^52
  x = maximum<double>(broadcast(-1023.0), x);
  const Vec<double> shifted = x + magic;
  const Vec<double> t = (x - (shifted - magic)) * 0.69314718055994530942;
  Vec<double> y = broadcast(1.0 / 6227020800.0);  // 1 / 13!
  constexpr double inverse_factorial[] = {
      1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
      1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
  for (double coefficient : inverse_factorial) y = y * t + coefficient;
  return (Vec<double>)((IntVec<double>)y + ((IntVec<double>)shifted << 52));
}

template <typename T>
INLINE bool is_finite(T x) {
  return x - x == 0;
}

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
