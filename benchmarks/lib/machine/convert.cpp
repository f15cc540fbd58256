// cvt: between all integer and floating-point types, in every rounding.

#include <cmath>

#include "lanes.h"
#include "numbers.h"

namespace machine {
namespace {

enum Type : uint8_t { U8, S8, U16, S16, U32, S32, U64, S64, HALF, BRAIN, SINGLE, DOUBLE, TYPES };
constexpr const char* TYPE_NAMES[] = {"u8",  "s8",  "u16", "s16",  "u32", "s32",
                                      "u64", "s64", "f16", "bf16", "f32", "f64"};
constexpr int TYPE_BITS[] = {8, 8, 16, 16, 32, 32, 64, 64, 16, 16, 32, 64};

bool is_float(int type) { return type >= HALF; }
bool is_signed(int type) { return type == S8 || type == S16 || type == S32 || type == S64; }

// How one conversion goes, packed into the instruction's value.
struct Spec {
  uint8_t into, from, round, integral, flush, saturate, pad[2];
};
static_assert(sizeof(Spec) == 8, "goes into an int64_t");

long double load(int type, uint64_t bits) {
  switch (type) {
    case U8:
      return static_cast<uint8_t>(bits);
    case S8:
      return static_cast<int8_t>(bits);
    case U16:
      return static_cast<uint16_t>(bits);
    case S16:
      return static_cast<int16_t>(bits);
    case U32:
      return static_cast<uint32_t>(bits);
    case S32:
      return static_cast<int32_t>(bits);
    case U64:
      return bits;
    case S64:
      return static_cast<int64_t>(bits);
    case HALF:
      return F16::get(bits);
    case BRAIN:
      return Bf16::get(bits);
    case SINGLE:
      return as_float(bits);
    default:
      return from_stored<double>(bits);
  }
}

long double integral(long double x, Round round) {
  switch (round) {
    case Round::Zero:
      return std::trunc(x);
    case Round::Down:
      return std::floor(x);
    case Round::Up:
      return std::ceil(x);
    default:
      return std::nearbyint(x);
  }
}

template <class T>
T narrowed(long double x, Round round) {
  T near = static_cast<T>(x);
  const bool above = near > x, below = near < x;
  const bool down = round == Round::Down || (round == Round::Zero && x > 0);
  const bool up = round == Round::Up || (round == Round::Zero && x < 0);
  if (above && down) near = std::nextafter(near, -INFINITY);
  if (below && up) near = std::nextafter(near, INFINITY);
  return near;
}

uint64_t to_integer(int type, long double x) {
  const int bits = TYPE_BITS[type] - is_signed(type);
  const long double most = std::ldexp(1.0L, bits) - 1, least = is_signed(type) ? -most - 1 : 0;
  if (x != x) return 0;
  x = std::fmin(std::fmax(x, least), most);
  return x < 0 ? static_cast<uint64_t>(static_cast<int64_t>(x)) : static_cast<uint64_t>(x);
}

uint64_t convert(const Spec& spec, uint64_t bits) {
  long double x = load(spec.from, bits);
  const Round round = static_cast<Round>(spec.round);
  if (spec.flush && spec.from == SINGLE) x = flushed(static_cast<float>(x));
  if (spec.integral) x = integral(x, round);
  if (!is_float(spec.into)) {
    return to_integer(spec.into, x);  // narrow results fill their register, with their sign if they have one
  }
  if (spec.saturate) x = x > 0 ? std::fmin(x, 1.0L) : 0;
  if (spec.into == DOUBLE) return to_stored<double>(narrowed<double>(x, round));
  if (spec.into == SINGLE) {
    const float result = narrowed<float>(x, round);
    return as_bits(spec.flush ? flushed(result) : result);
  }
  const float odd = to_odd(static_cast<double>(x));
  return spec.into == HALF ? F16::make(odd, round) : Bf16::make(odd, round);
}

template <class R, class T>
void any(Warp& warp, const Inst& inst) {
  Spec spec;
  std::memcpy(&spec, &inst.value, sizeof spec);
  alignas(64) R out[LANES];
  const T* in = warp.at<T>(inst.refs[1]);
  for (int lane = 0; lane < LANES; ++lane) out[lane] = convert(spec, in[lane]);
  write(warp, inst.refs[0], out);
}

void add_any(SimpleTable& table, int into, int from) {
  const Handler run = TYPE_BITS[into] == 64 ? TYPE_BITS[from] == 64 ? any<uint64_t, uint64_t> : any<uint64_t, uint32_t>
                      : TYPE_BITS[from] == 64 ? any<uint32_t, uint64_t>
                                              : any<uint32_t, uint32_t>;
  const char* rounds[] = {"n", "z", "m", "p", "na"};
  for (int round = -1; round < 5; ++round) {
    for (int integral = 0; integral < 2; ++integral) {
      for (int modes = 0; modes < 4; ++modes) {
        if (integral && (round < 0 || round == 4)) continue;
        std::string name = "cvt";
        if (round >= 0) name += std::string(".r") + rounds[round] + (integral ? "i" : "");
        if (modes & 1) name += ".ftz";
        if (modes & 2) name += ".sat";
        name += std::string(".") + TYPE_NAMES[into] + "." + TYPE_NAMES[from];
        const Spec spec = {static_cast<uint8_t>(into),
                           static_cast<uint8_t>(from),
                           static_cast<uint8_t>(std::max(round, 0)),
                           static_cast<uint8_t>(integral || !is_float(into)),
                           static_cast<uint8_t>(modes & 1),
                           static_cast<uint8_t>(modes >> 1),
                           {0, 0}};
        Simple made{run, {TYPE_BITS[into] == 64 ? 64 : 32, TYPE_BITS[from] == 64 ? 64 : 32}, Class::Conversion};
        std::memcpy(&made.value, &spec, sizeof spec);
        table[name] = made;
      }
    }
  }
}

// The most frequent conversions, as vector code.
template <class R>
struct To {  // narrow results fill their register, with their sign if they have one
  template <class T>
  static std::conditional_t<std::is_integral_v<R> && sizeof(R) < 4, int32_t, R> run(T a) {
    return static_cast<R>(a);
  }
};
template <class Half>
struct Widen {
  static float run(uint16_t a) { return Half::get(a); }
};
template <class Half, Round ROUND>
struct Narrow {
  static uint16_t run(float a) { return Half::make(a, ROUND); }
};
template <class Half, Round ROUND, bool RELU>
struct Pair {
  static uint32_t run(float high, float low) {
    if (RELU) high = high < 0 ? 0 : high, low = low < 0 ? 0 : low;
    return static_cast<uint32_t>(Half::make(high, ROUND)) << 16 | Half::make(low, ROUND);
  }
};
template <Round ROUND>
struct Tf32 {
  static float run(float a) { return as_float(rounded_bits(as_bits(a), 13, ROUND)); }
};

template <class R, class... T>
void integers_to(SimpleTable& table, const char* into) {
  const char* from[] = {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"};
  int index = 0;
  ((table[std::string("cvt.") + into + "." + from[index++]] =
        simple<To<R>, decltype(To<R>::run(T())), T>(Class::Conversion)),
   ...);
}

template <class R>
void integers(SimpleTable& table, const char* into) {
  integers_to<R, uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t>(table, into);
}

template <class Half>
void halves(SimpleTable& table, const std::string& type) {
  table["cvt.f32." + type] = simple<Widen<Half>, float, uint16_t>(Class::Conversion);
  table["cvt.rn." + type + ".f32"] = simple<Narrow<Half, Round::Nearest>, uint16_t, float>(Class::Conversion);
  table["cvt.rn." + type + "x2.f32"] =
      simple<Pair<Half, Round::Nearest, false>, uint32_t, float, float>(Class::Conversion);
  table["cvt.rz." + type + "x2.f32"] =
      simple<Pair<Half, Round::Zero, false>, uint32_t, float, float>(Class::Conversion);
  table["cvt.rn.relu." + type + "x2.f32"] =
      simple<Pair<Half, Round::Nearest, true>, uint32_t, float, float>(Class::Conversion);
}

}  // namespace

// The low half of refs[2] goes to refs[1], from where it is converted.
void convert_low(Warp& warp, const Inst& inst) {
  const uint64_t* wide = warp.at<uint64_t>(inst.refs[2]);
  uint32_t* low = warp.at<uint32_t>(inst.refs[1]);
  for (int lane = 0; lane < LANES; ++lane) low[lane] = static_cast<uint32_t>(wide[lane]);
  inst.inner(warp, inst);
}

void add_convert(SimpleTable& table) {
  for (int into = 0; into < TYPES; ++into)
    for (int from = 0; from < TYPES; ++from) add_any(table, into, from);
  integers<uint8_t>(table, "u8");
  integers<int8_t>(table, "s8");
  integers<uint16_t>(table, "u16");
  integers<int16_t>(table, "s16");
  integers<uint32_t>(table, "u32");
  integers<int32_t>(table, "s32");
  integers<uint64_t>(table, "u64");
  integers<int64_t>(table, "s64");
  halves<F16>(table, "f16");
  halves<Bf16>(table, "bf16");
  table["cvt.rn.f32.s32"] = simple<To<float>, float, int32_t>(Class::Conversion);
  table["cvt.rn.f32.u32"] = simple<To<float>, float, uint32_t>(Class::Conversion);
  table["cvt.rna.tf32.f32"] = simple<Tf32<Round::Away>, float, float>(Class::Conversion);
  table["cvt.rn.tf32.f32"] = simple<Tf32<Round::Nearest>, float, float>(Class::Conversion);
  table["cvt.rz.tf32.f32"] = simple<Tf32<Round::Zero>, float, float>(Class::Conversion);
}

}  // namespace machine
