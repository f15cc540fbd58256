#pragma once
// Templates by which an operation on one lane becomes an instruction of 32.

#include <type_traits>

#include "program.h"

namespace machine {

template <class T>
using Stored = std::conditional_t<sizeof(T) <= 4, uint32_t, uint64_t>;

// A register's contents as T; narrow types take the low bits.
template <class T>
inline T from_stored(Stored<T> bits) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(bits);
  } else {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
}

template <class T>
inline Stored<T> to_stored(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<std::make_unsigned_t<T>>(value);
  } else {
    Stored<T> bits;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
  }
}

template <class S>
inline void write(Warp& warp, Ref ref, const S* values) {
  S* into = warp.at<S>(ref);
  const uint32_t exec = warp.exec;
  if (exec == ALL) {
    std::memcpy(into, values, LANES * sizeof(S));
  } else {
    for (int lane = 0; lane < LANES; ++lane) into[lane] = exec >> lane & 1 ? values[lane] : into[lane];
  }
}

inline void write_predicate(Warp& warp, Ref ref, uint32_t lanes) {
  uint32_t& into = *warp.at<uint32_t>(ref);
  into = (into & ~warp.exec) | (lanes & warp.exec);
}

// R d = F(A a, B b, ...), with operands at refs[0], refs[1], ...
template <class F, class R, class... T, size_t... I>
inline void each_lane(Warp& warp, const Inst& inst, std::index_sequence<I...>) {
  alignas(64) Stored<R> out[LANES];
  const std::tuple<const Stored<T>*...> in{warp.at<Stored<T>>(inst.refs[I + 1])...};
  for (int lane = 0; lane < LANES; ++lane) out[lane] = to_stored<R>(F::run(from_stored<T>(std::get<I>(in)[lane])...));
  write(warp, inst.refs[0], out);
}

template <class F, class R, class... T>
void lanewise(Warp& warp, const Inst& inst) {
  each_lane<F, R, T...>(warp, inst, std::index_sequence_for<T...>());
}

// A predicate from a comparison of two operands; it may be joined with another, and its opposite kept too.
template <class F, class T>
void comparison(Warp& warp, const Inst& inst) {
  const Stored<T>*a = warp.at<Stored<T>>(inst.refs[1]), *b = warp.at<Stored<T>>(inst.refs[2]);
  uint32_t bits = 0;
  for (int lane = 0; lane < LANES; ++lane)
    bits |= static_cast<uint32_t>(F::run(from_stored<T>(a[lane]), from_stored<T>(b[lane]))) << lane;
  write_predicate(warp, inst.refs[0], bits);
}

template <class... T>
std::vector<int> widths() {
  return {(std::is_same_v<T, bool> ? 1 : sizeof(T) <= 4 ? 32 : 64)...};
}

template <class F, class R, class... T>
Simple simple(Class kind) {
  return {lanewise<F, R, T...>, widths<R, T...>(), kind};
}

}  // namespace machine
