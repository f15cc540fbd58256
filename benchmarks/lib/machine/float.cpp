// Arithmetic in float32 and float64, approximations as accurate as the hardware's or better.

#include <cmath>

#include "comparisons.h"
#include "lanes.h"
#include "numbers.h"
#include "operations.h"

namespace machine {
namespace {

struct Div {
  template <class T>
  static T run(T a, T b) {
    return a / b;
  }
};
struct Fma {
  static float run(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static double run(double a, double b, double c) { return __builtin_fma(a, b, c); }
};
struct Negate {
  static float run(float a) { return as_float(as_bits(a) ^ 0x80000000u); }
  static double run(double a) { return -a; }
};
struct Absolute {
  template <class T>
  static T run(T a) {
    return std::fabs(a);
  }
};
struct Reciprocal {
  template <class T>
  static T run(T a) {
    return 1 / a;
  }
};
struct Root {
  template <class T>
  static T run(T a) {
    return std::sqrt(a);
  }
};
struct ReciprocalRoot {
  template <class T>
  static T run(T a) {
    return 1 / std::sqrt(a);
  }
};
struct Exp2 {
  static float run(float a) { return exp2_approximately(a); }
};
struct Log2 {
  static float run(float a) { return std::log2(a); }
};
struct Sine {
  static float run(float a) { return std::sin(a); }
};
struct Cosine {
  static float run(float a) { return std::cos(a); }
};
struct Tanh {
  static float run(float a) { return std::tanh(a); }
};
struct CopySign {
  template <class T>
  static T run(T a, T b) {
    return std::copysign(b, a);
  }
};

// For two operands: a number rather than NaN, unless NAN_WINS; -0 is less than +0.
template <bool NAN_WINS>
struct Min {
  template <class T>
  static T run(T a, T b) {
    const T ordered = a < b || (a == b && std::signbit(a)) ? a : b;
    const bool first = a != a, second = b != b;
    if (NAN_WINS) return first ? a : second ? b : ordered;
    return first ? b : second ? a : ordered;
  }
};
// For magnitudes, with the product's sign
struct MinXorSign {
  static float run(float a, float b) {
    const float smaller = Min<false>::run(std::fabs(a), std::fabs(b));
    return std::signbit(a) != std::signbit(b) ? -smaller : smaller;
  }
};
template <bool NAN_WINS>
struct Max {
  template <class T>
  static T run(T a, T b) {
    const T ordered = a > b || (a == b && !std::signbit(a)) ? a : b;
    const bool first = a != a, second = b != b;
    if (NAN_WINS) return first ? a : second ? b : ordered;
    return first ? b : second ? a : ordered;
  }
};

struct Flush {
  static float in(float x) { return flushed(x); }
  static float out(float x) { return flushed(x); }
};
struct Keep {
  template <class T>
  static T in(T x) {
    return x;
  }
  template <class T>
  static T out(T x) {
    return x;
  }
};
struct Saturate {
  static float in(float x) { return x; }
  static float out(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
};
struct FlushSaturate {
  static float in(float x) { return flushed(x); }
  static float out(float x) { return Saturate::out(flushed(x)); }
};

template <class F, class Mode>
struct With {
  template <class... T>
  static auto run(T... in) {
    return Mode::out(F::run(Mode::in(in)...));
  }
};

template <class F, class... T>
void all_modes(SimpleTable& table, const std::string& name, Class kind) {
  table[name + ".f32"] = simple<With<F, Keep>, float, T...>(kind);
  table[name + ".ftz.f32"] = simple<With<F, Flush>, float, T...>(kind);
  table[name + ".sat.f32"] = simple<With<F, Saturate>, float, T...>(kind);
  table[name + ".ftz.sat.f32"] = simple<With<F, FlushSaturate>, float, T...>(kind);
}

template <class F, class... T>
void flushing(SimpleTable& table, const std::string& name, const std::string& type, Class kind) {
  table[name + type] = simple<With<F, Keep>, float, T...>(kind);
  table[name + ".ftz" + type] = simple<With<F, Flush>, float, T...>(kind);
}

void add_arithmetic(SimpleTable& table) {
  for (const std::string round : {"", ".rn"}) {
    all_modes<Add, float, float>(table, "add" + round, Class::Float);
    all_modes<Sub, float, float>(table, "sub" + round, Class::Float);
    all_modes<Mul, float, float>(table, "mul" + round, Class::Float);
    table["add" + round + ".f64"] = simple<Add, double, double, double>(Class::Float);
    table["sub" + round + ".f64"] = simple<Sub, double, double, double>(Class::Float);
    table["mul" + round + ".f64"] = simple<Mul, double, double, double>(Class::Float);
  }
  all_modes<Fma, float, float, float>(table, "fma.rn", Class::Float);
  all_modes<Fma, float, float, float>(table, "mad.rn", Class::Float);
  table["fma.rn.f64"] = table["mad.rn.f64"] = simple<Fma, double, double, double, double>(Class::Float);
  flushing<Min<false>, float, float>(table, "min", ".f32", Class::Float);
  flushing<Max<false>, float, float>(table, "max", ".f32", Class::Float);
  flushing<Min<true>, float, float>(table, "min", ".NaN.f32", Class::Float);
  flushing<Max<true>, float, float>(table, "max", ".NaN.f32", Class::Float);
  table["min.xorsign.abs.f32"] = simple<MinXorSign, float, float, float>(Class::Float);
  table["min.f64"] = simple<Min<false>, double, double, double>(Class::Float);
  table["max.f64"] = simple<Max<false>, double, double, double>(Class::Float);
  flushing<Negate, float>(table, "neg", ".f32", Class::Float);
  flushing<Absolute, float>(table, "abs", ".f32", Class::Float);
  table["neg.f64"] = simple<Negate, double, double>(Class::Float);
  table["abs.f64"] = simple<Absolute, double, double>(Class::Float);
  table["copysign.f32"] = simple<CopySign, float, float, float>(Class::Float);
  table["copysign.f64"] = simple<CopySign, double, double, double>(Class::Float);
}

void add_special(SimpleTable& table) {
  for (const std::string name : {"div.full", "div.approx", "div.rn"})
    flushing<Div, float, float>(table, name, ".f32", Class::Special);
  for (const std::string name : {".approx", ".rn"}) {
    flushing<Reciprocal, float>(table, "rcp" + name, ".f32", Class::Special);
    flushing<Root, float>(table, "sqrt" + name, ".f32", Class::Special);
  }
  table["div.rn.f64"] = simple<Div, double, double, double>(Class::Special);
  table["rcp.rn.f64"] = simple<Reciprocal, double, double>(Class::Special);
  table["rcp.approx.ftz.f64"] = simple<Reciprocal, double, double>(Class::Special);
  table["sqrt.rn.f64"] = simple<Root, double, double>(Class::Special);
  table["rsqrt.approx.f64"] = simple<ReciprocalRoot, double, double>(Class::Special);
  flushing<ReciprocalRoot, float>(table, "rsqrt.approx", ".f32", Class::Special);
  flushing<Exp2, float>(table, "ex2.approx", ".f32", Class::Special);
  flushing<Log2, float>(table, "lg2.approx", ".f32", Class::Special);
  flushing<Sine, float>(table, "sin.approx", ".f32", Class::Special);
  flushing<Cosine, float>(table, "cos.approx", ".f32", Class::Special);
  table["tanh.approx.f32"] = simple<Tanh, float, float>(Class::Special);
}

template <class F, class T, class Mode>
void compare(SimpleTable& table, const std::string& name, const std::string& type) {
  table["setp." + name + type] = {
      comparison<With<F, Mode>, T>, {1, sizeof(T) == 8 ? 64 : 32, sizeof(T) == 8 ? 64 : 32}, Class::Selection};
}

struct FlushIn {
  static float in(float x) { return flushed(x); }
  static bool out(bool x) { return x; }
};

template <class T, class Mode>
void comparisons(SimpleTable& table, const std::string& type) {
  compare<Equal, T, Mode>(table, "eq", type);
  compare<Unequal, T, Mode>(table, "ne", type);
  compare<Less, T, Mode>(table, "lt", type);
  compare<LessEqual, T, Mode>(table, "le", type);
  compare<Greater, T, Mode>(table, "gt", type);
  compare<GreaterEqual, T, Mode>(table, "ge", type);
  compare<OrNan<Equal>, T, Mode>(table, "equ", type);
  compare<OrNan<Unequal>, T, Mode>(table, "neu", type);
  compare<OrNan<Less>, T, Mode>(table, "ltu", type);
  compare<OrNan<LessEqual>, T, Mode>(table, "leu", type);
  compare<OrNan<Greater>, T, Mode>(table, "gtu", type);
  compare<OrNan<GreaterEqual>, T, Mode>(table, "geu", type);
  compare<Numbers, T, Mode>(table, "num", type);
  compare<OrNan<Never>, T, Mode>(table, "nan", type);
}

}  // namespace

void add_float(SimpleTable& table) {
  add_arithmetic(table);
  add_special(table);
  comparisons<float, Keep>(table, ".f32");
  comparisons<float, FlushIn>(table, ".ftz.f32");
  comparisons<double, Keep>(table, ".f64");
}

}  // namespace machine
