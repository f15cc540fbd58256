// Additions, subtractions and multiply-adds of many words: each leaves a carry (or borrow) that the next one takes.

#include "lanes.h"

namespace machine {
namespace {

enum class Sum { Add, Sub, MadLow, MadHigh };

template <class T, Sum SUM>
T product(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  const Wide whole = static_cast<Wide>(a) * b;
  return static_cast<T>(SUM == Sum::MadLow ? whole : whole >> (8 * sizeof(T)));
}

// refs: d, a, b[, c]
template <class T, Sum SUM, bool TAKES, bool LEAVES>
void carried(Warp& warp, const Inst& inst) {
  using U = std::make_unsigned_t<T>;
  alignas(64) Stored<U> out[LANES];
  uint32_t leaves = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    const U a = warp.at<Stored<U>>(inst.refs[1])[lane], b = warp.at<Stored<U>>(inst.refs[2])[lane];
    const U first = SUM == Sum::Add || SUM == Sum::Sub ? a : product<T, SUM>(a, b);
    U second = b;
    if constexpr (SUM == Sum::MadLow || SUM == Sum::MadHigh) second = warp.at<Stored<U>>(inst.refs[3])[lane];
    const U with = TAKES ? warp.carry >> lane & 1 : 0;
    const unsigned __int128 x = first, y = static_cast<unsigned __int128>(second) + with;
    const unsigned __int128 whole = SUM == Sum::Sub ? x - y : x + y;
    out[lane] = static_cast<U>(whole);
    leaves |= static_cast<uint32_t>(whole != static_cast<U>(whole)) << lane;
  }
  write(warp, inst.refs[0], out);
  if (LEAVES) warp.carry = (warp.carry & ~warp.exec) | (leaves & warp.exec);
}

template <class T, Sum SUM>
void add_sum(SimpleTable& table, const std::string& name, const std::string& part, const std::string& type) {
  std::vector<int> bits(SUM == Sum::Add || SUM == Sum::Sub ? 3 : 4, 8 * sizeof(T));
  table[name + part + ".cc" + type] = {carried<T, SUM, false, true>, bits, Class::Integer};
  table[name + "c" + part + type] = {carried<T, SUM, true, false>, bits, Class::Integer};
  table[name + "c" + part + ".cc" + type] = {carried<T, SUM, true, true>, bits, Class::Integer};
}

template <class T>
void add_type(SimpleTable& table, const std::string& type) {
  add_sum<T, Sum::Add>(table, "add", "", type);
  add_sum<T, Sum::Sub>(table, "sub", "", type);
  add_sum<T, Sum::MadLow>(table, "mad", ".lo", type);
  add_sum<T, Sum::MadHigh>(table, "mad", ".hi", type);
}

}  // namespace

void add_carry(SimpleTable& table) {
  add_type<uint32_t>(table, ".u32");
  add_type<int32_t>(table, ".s32");
  add_type<uint64_t>(table, ".u64");
  add_type<int64_t>(table, ".s64");
}

}  // namespace machine
