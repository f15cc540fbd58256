// Integer and bit instructions.

#include <algorithm>

#include "lanes.h"
#include "operations.h"

namespace machine {
namespace {

struct Min {
  template <class T>
  static T run(T a, T b) {
    return a < b ? a : b;
  }
};
struct MinRelu {
  template <class T>
  static T run(T a, T b) {
    return std::max<T>(a < b ? a : b, 0);
  }
};
struct MaxRelu {
  template <class T>
  static T run(T a, T b) {
    return std::max<T>(a < b ? b : a, 0);
  }
};
struct Max {
  template <class T>
  static T run(T a, T b) {
    return a < b ? b : a;
  }
};
struct Negate {
  template <class T>
  static T run(T a) {
    return T(0) - a;
  }
};
struct Absolute {
  template <class T>
  static T run(T a) {
    return a < 0 ? T(0) - std::make_unsigned_t<T>(a) : a;
  }
};
struct LogicalNot {
  template <class T>
  static T run(T a) {
    return a == 0;
  }
};

template <class T>
using Wide =
    std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                       std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                                          std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

struct MulLow {
  template <class T>
  static T run(T a, T b) {
    return Wide<std::make_unsigned_t<T>>(a) * std::make_unsigned_t<T>(b);
  }
};
struct MulHigh {
  template <class T>
  static T run(T a, T b) {
    return Wide<T>(a) * b >> (8 * sizeof(T));
  }
};
struct MulWide {
  template <class T>
  static Wide<T> run(T a, T b) {
    return Wide<T>(a) * b;
  }
};
struct MadLow {
  template <class T>
  static T run(T a, T b, T c) {
    return MulLow::run(a, b) + std::make_unsigned_t<T>(c);
  }
};
struct MadHigh {
  template <class T>
  static T run(T a, T b, T c) {
    return MulHigh::run(a, b) + std::make_unsigned_t<T>(c);
  }
};
template <class T>
struct MadWide {
  static Wide<T> run(T a, T b, Wide<T> c) { return std::make_unsigned_t<Wide<T>>(Wide<T>(a) * b) + c; }
};
struct SaturatingAdd {
  static int32_t run(int32_t a, int32_t b) {
    return std::max<int64_t>(std::min<int64_t>(int64_t(a) + b, INT32_MAX), INT32_MIN);
  }
};
struct Sad {
  template <class T>
  static T run(T a, T b, T c) {
    return c + (a < b ? b - a : a - b);
  }
};

struct Divide {
  template <class T>
  static T run(T a, T b) {
    if (b == 0) return T(-1);
    return std::is_signed_v<T> && b == T(-1) ? T(0) - std::make_unsigned_t<T>(a) : a / b;
  }
};
struct Remainder {
  template <class T>
  static T run(T a, T b) {
    if (b == 0) return a;
    return std::is_signed_v<T> && b == T(-1) ? 0 : a % b;
  }
};
struct ShiftLeft {
  template <class T>
  static T run(T a, uint32_t by) {
    return by >= 8 * sizeof(T) ? 0 : a << by;
  }
};
struct ShiftRight {
  template <class T>
  static T run(T a, uint32_t by) {
    const uint32_t most = 8 * sizeof(T) - 1;
    return by > most ? (std::is_signed_v<T> ? a >> most : 0) : a >> by;
  }
};
template <bool LEFT, bool WRAP>
struct Funnel {
  static uint32_t run(uint32_t a, uint32_t b, uint32_t by) {
    const uint32_t shift = WRAP ? by & 31 : by > 32 ? 32 : by;
    const uint64_t both = uint64_t(b) << 32 | a;
    return LEFT ? both << shift >> 32 : both >> shift;
  }
};
struct PopCount {
  template <class T>
  static uint32_t run(T a) {
    return __builtin_popcountll(a);
  }
};
struct LeadingZeros {
  template <class T>
  static uint32_t run(T a) {
    return a == 0 ? 8 * sizeof(T) : sizeof(T) == 8 ? __builtin_clzll(a) : __builtin_clz(a);
  }
};
template <bool SHIFT>
struct FindBit {
  template <class T>
  static uint32_t run(T a) {
    const auto bits = static_cast<std::make_unsigned_t<T>>(a < 0 ? ~a : a);
    if (bits == 0) return ALL;
    const uint32_t place = 8 * sizeof(T) - 1 - LeadingZeros::run(bits);
    return SHIFT ? 8 * sizeof(T) - 1 - place : place;
  }
};
struct Reverse {
  template <class T>
  static T run(T a) {
    T result = 0;
    for (size_t bit = 0; bit < 8 * sizeof(T); ++bit) result |= (a >> bit & 1) << (8 * sizeof(T) - 1 - bit);
    return result;
  }
};
struct Extract {
  template <class T>
  static T run(T a, uint32_t position, uint32_t length) {
    const uint32_t width = 8 * sizeof(T), from = position & 255, count = length & 255;
    if (count == 0) return 0;
    const uint32_t top = std::min(from + count - 1, width - 1);
    const bool negative = std::is_signed_v<T> && (a >> top & 1);
    const auto bits = from >= width ? 0 : static_cast<std::make_unsigned_t<T>>(a) >> from;
    const auto mask = count >= width ? ~std::make_unsigned_t<T>(0) : (std::make_unsigned_t<T>(1) << count) - 1;
    const auto valid = from >= width ? 0 : mask & (~std::make_unsigned_t<T>(0) >> from);
    return negative ? (bits & valid) | ~valid : bits & valid;
  }
};
struct Insert {
  template <class T>
  static T run(T a, T b, uint32_t position, uint32_t length) {
    const uint32_t from = position & 255, count = length & 255;
    if (from >= 8 * sizeof(T)) return b;
    const T mask = (count >= 8 * sizeof(T) ? ~T(0) : (T(1) << count) - 1) << from;
    return (b & ~mask) | (a << from & mask);
  }
};
struct Logic3 {
  static uint32_t run(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
    uint32_t result = 0;
    for (int row = 0; row < 8; ++row) {
      const uint32_t chosen = (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
      result |= table >> row & 1 ? chosen : 0;
    }
    return result;
  }
};
struct Permute {
  static uint32_t run(uint32_t a, uint32_t b, uint32_t choose) {
    const uint64_t both = uint64_t(b) << 32 | a;
    uint32_t result = 0;
    for (int byte = 0; byte < 4; ++byte) {
      const uint32_t from = choose >> (4 * byte) & 15;
      uint32_t taken = both >> (8 * (from & 7)) & 255;
      if (from & 8) taken = taken & 128 ? 255 : 0;
      result |= taken << (8 * byte);
    }
    return result;
  }
};

// Arithmetic of one type; U: the unsigned type of its width, in which sums wrap.
template <class T, class U = std::make_unsigned_t<T>>
void arithmetic(SimpleTable& table, const std::string& type) {
  table["add" + type] = simple<Add, U, U, U>(Class::Integer);
  table["sub" + type] = simple<Sub, U, U, U>(Class::Integer);
  table["mul.lo" + type] = simple<MulLow, U, U, U>(Class::Integer);
  table["mul.hi" + type] = simple<MulHigh, T, T, T>(Class::Integer);
  table["mad.lo" + type] = simple<MadLow, U, U, U, U>(Class::Integer);
  table["mad.hi" + type] = simple<MadHigh, T, T, T, T>(Class::Integer);
  table["div" + type] = simple<Divide, T, T, T>(Class::Integer);
  table["rem" + type] = simple<Remainder, T, T, T>(Class::Integer);
  table["min" + type] = simple<Min, T, T, T>(Class::Integer);
  table["max" + type] = simple<Max, T, T, T>(Class::Integer);
  table["sad" + type] = simple<Sad, T, T, T, T>(Class::Integer);
  table["shr" + type] = simple<ShiftRight, T, T, uint32_t>(Class::Integer);
  if (sizeof(T) < 8) {
    using N = std::conditional_t<sizeof(T) == 8, int32_t, T>;
    table["mul.wide" + type] = simple<MulWide, Wide<N>, N, N>(Class::Integer);
    table["mad.wide" + type] = simple<MadWide<N>, Wide<N>, N, N, Wide<N>>(Class::Integer);
  }
  if (std::is_signed_v<T>) {
    table["neg" + type] = simple<Negate, U, U>(Class::Integer);
    table["abs" + type] = simple<Absolute, std::make_signed_t<T>, std::make_signed_t<T>>(Class::Integer);
  }
}

template <class U>
void bitwise(SimpleTable& table, const std::string& type) {
  table["and" + type] = simple<And, U, U, U>(Class::Integer);
  table["or" + type] = simple<Or, U, U, U>(Class::Integer);
  table["xor" + type] = simple<Xor, U, U, U>(Class::Integer);
  table["not" + type] = simple<Not, U, U>(Class::Integer);
  table["cnot" + type] = simple<LogicalNot, U, U>(Class::Integer);
  table["shl" + type] = simple<ShiftLeft, U, U, uint32_t>(Class::Integer);
  table["shr" + type] = simple<ShiftRight, U, U, uint32_t>(Class::Integer);
}

template <class U>
void wide_bits(SimpleTable& table, const std::string& bits) {
  using S = std::make_signed_t<U>;
  table["popc.b" + bits] = simple<PopCount, uint32_t, U>(Class::Integer);
  table["clz.b" + bits] = simple<LeadingZeros, uint32_t, U>(Class::Integer);
  table["brev.b" + bits] = simple<Reverse, U, U>(Class::Integer);
  table["bfi.b" + bits] = simple<Insert, U, U, U, uint32_t, uint32_t>(Class::Integer);
  table["bfe.u" + bits] = simple<Extract, U, U, uint32_t, uint32_t>(Class::Integer);
  table["bfe.s" + bits] = simple<Extract, S, S, uint32_t, uint32_t>(Class::Integer);
  table["bfind.u" + bits] = simple<FindBit<false>, uint32_t, U>(Class::Integer);
  table["bfind.s" + bits] = simple<FindBit<false>, uint32_t, S>(Class::Integer);
  table["bfind.shiftamt.u" + bits] = simple<FindBit<true>, uint32_t, U>(Class::Integer);
  table["bfind.shiftamt.s" + bits] = simple<FindBit<true>, uint32_t, S>(Class::Integer);
}

}  // namespace

void add_integer(SimpleTable& table) {
  arithmetic<int16_t>(table, ".s16");
  arithmetic<uint16_t>(table, ".u16");
  arithmetic<int32_t>(table, ".s32");
  table["min.relu.s32"] = simple<MinRelu, int32_t, int32_t, int32_t>(Class::Integer);
  table["max.relu.s32"] = simple<MaxRelu, int32_t, int32_t, int32_t>(Class::Integer);
  arithmetic<uint32_t>(table, ".u32");
  arithmetic<int64_t>(table, ".s64");
  arithmetic<uint64_t>(table, ".u64");
  bitwise<uint16_t>(table, ".b16");
  bitwise<uint32_t>(table, ".b32");
  bitwise<uint64_t>(table, ".b64");
  wide_bits<uint32_t>(table, "32");
  wide_bits<uint64_t>(table, "64");
  table["add.sat.s32"] = simple<SaturatingAdd, int32_t, int32_t, int32_t>(Class::Integer);
  table["lop3.b32"] = simple<Logic3, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>(Class::Integer);
  table["prmt.b32"] = simple<Permute, uint32_t, uint32_t, uint32_t, uint32_t>(Class::Integer);
  table["shf.l.wrap.b32"] = simple<Funnel<true, true>, uint32_t, uint32_t, uint32_t, uint32_t>(Class::Integer);
  table["shf.r.wrap.b32"] = simple<Funnel<false, true>, uint32_t, uint32_t, uint32_t, uint32_t>(Class::Integer);
  table["shf.l.clamp.b32"] = simple<Funnel<true, false>, uint32_t, uint32_t, uint32_t, uint32_t>(Class::Integer);
  table["shf.r.clamp.b32"] = simple<Funnel<false, false>, uint32_t, uint32_t, uint32_t, uint32_t>(Class::Integer);
}

}  // namespace machine
