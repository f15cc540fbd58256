// Arithmetic in float16 and bfloat16, one number or two in a register.

#include <cmath>

#include "comparisons.h"
#include "lanes.h"
#include "numbers.h"
#include "operations.h"

namespace machine {
namespace {

struct Fma {
  static double run(double a, double b, double c) { return a * b + c; }
};  // the product is exact in double
struct FmaRelu {
  static double run(double a, double b, double c) { return std::fmax(a * b + c, 0.0); }
};
struct Negate {
  static double run(double a) { return -a; }
};
struct Absolute {
  static double run(double a) { return std::fabs(a); }
};
struct Exp2 {
  static double run(double a) { return exp2_approximately(static_cast<float>(a)); }
};
struct Tanh {
  static double run(double a) { return std::tanh(a); }
};
template <bool NAN_WINS>
struct Min {
  static double run(double a, double b) {
    if (NAN_WINS && (a != a || b != b)) return NAN;
    if (a != a || b != b) return a != a ? b : a;
    return a < b || (a == b && std::signbit(a)) ? a : b;
  }
};
template <bool NAN_WINS>
struct Max {
  static double run(double a, double b) {
    if (NAN_WINS && (a != a || b != b)) return NAN;
    if (a != a || b != b) return a != a ? b : a;
    return a > b || (a == b && !std::signbit(a)) ? a : b;
  }
};

template <class F, class Half>
struct One {  // in double, where a product, or the sum of two float16, is exact
  template <class... T>
  static uint16_t run(T... in) {
    return Half::make(to_odd(F::run(static_cast<double>(Half::get(in))...)));
  }
};

template <class F, class Half>
struct Two {
  template <class... T>
  static uint32_t run(T... in) {
    const uint32_t low = One<F, Half>::run(static_cast<uint16_t>(in)...);
    const uint32_t high = One<F, Half>::run(static_cast<uint16_t>(in >> 16)...);
    return low | high << 16;
  }
};

template <class F, class Half, class... T>
void both(SimpleTable& table, const std::string& name, const std::string& type, Class kind = Class::Float) {
  table[name + type] = simple<One<F, Half>, uint16_t, std::conditional_t<true, uint16_t, T>...>(kind);
  table[name + type + "x2"] = simple<Two<F, Half>, uint32_t, std::conditional_t<true, uint32_t, T>...>(kind);
}

template <class F, class Half>
struct Halves {
  static bool run(uint16_t a, uint16_t b) { return F::run(Half::get(a), Half::get(b)); }
};

// Both numbers of a register, a predicate for each.
template <class F, class Half>
void compare_two(Warp& warp, const Inst& inst) {
  const uint32_t *a = warp.at<uint32_t>(inst.refs[1]), *b = warp.at<uint32_t>(inst.refs[2]);
  uint32_t low = 0, high = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    const auto holds = [&](int shift) {
      return static_cast<uint32_t>(Halves<F, Half>::run(a[lane] >> shift, b[lane] >> shift)) << lane;
    };
    low |= holds(0), high |= holds(16);
  }
  write_predicate(warp, inst.refs[0], low);
  write_predicate(warp, inst.refs[3], high);
}

// Both numbers of a register, all bits of a half where it holds.
template <class F, class Half>
struct Masks {
  static uint32_t run(uint32_t a, uint32_t b) {
    const auto mask = [&](int shift) { return Halves<F, Half>::run(a >> shift, b >> shift) ? 0xffffu << shift : 0; };
    return mask(0) | mask(16);
  }
};

template <class Half>
void add_type(SimpleTable& table, const std::string& type) {
  for (const std::string round : {"", ".rn"}) {
    both<Add, Half, int, int>(table, "add" + round, type);
    both<Sub, Half, int, int>(table, "sub" + round, type);
    both<Mul, Half, int, int>(table, "mul" + round, type);
  }
  both<Fma, Half, int, int, int>(table, "fma.rn", type);
  both<FmaRelu, Half, int, int, int>(table, "fma.rn.relu", type);
  both<Negate, Half, int>(table, "neg", type);
  both<Absolute, Half, int>(table, "abs", type);
  both<Min<false>, Half, int, int>(table, "min", type);
  both<Max<false>, Half, int, int>(table, "max", type);
  both<Min<true>, Half, int, int>(table, "min.NaN", type);
  both<Max<true>, Half, int, int>(table, "max.NaN", type);
  both<Exp2, Half, int>(table, type == ".bf16" ? "ex2.approx.ftz" : "ex2.approx", type, Class::Special);
  both<Tanh, Half, int>(table, "tanh.approx", type, Class::Special);
  const auto compare = [&](const char* name, Handler run) {
    table[std::string("setp.") + name + type] = {run, {1, 32, 32}, Class::Selection};
  };
  table["setp.lt" + type + "x2"] = {compare_two<Less, Half>, {1, 32, 32}, Class::Selection};
  table["set.lt.u32" + type + "x2"] = simple<Masks<Less, Half>, uint32_t, uint32_t, uint32_t>(Class::Selection);
  compare("eq", comparison<Halves<Equal, Half>, uint16_t>);
  compare("ne", comparison<Halves<Unequal, Half>, uint16_t>);
  compare("neu", comparison<Halves<OrNan<Unequal>, Half>, uint16_t>);
  compare("lt", comparison<Halves<Less, Half>, uint16_t>);
  compare("le", comparison<Halves<LessEqual, Half>, uint16_t>);
  compare("gt", comparison<Halves<Greater, Half>, uint16_t>);
  compare("ge", comparison<Halves<GreaterEqual, Half>, uint16_t>);
  compare("nan", comparison<Halves<OrNan<Never>, Half>, uint16_t>);
}

}  // namespace

void add_half(SimpleTable& table) {
  add_type<F16>(table, ".f16");
  add_type<Bf16>(table, ".bf16");
}

}  // namespace machine
