// Comparisons of integers, predicates, selections and moves.

#include "comparisons.h"
#include "lanes.h"
#include "operations.h"

namespace machine {
namespace {

struct Same {
  template <class T>
  static T run(T a) {
    return a;
  }
};
template <class T>
void choose(Warp& warp, const Inst& inst) {
  alignas(64) T out[LANES];
  const T *a = warp.at<T>(inst.refs[1]), *b = warp.at<T>(inst.refs[2]);
  const uint32_t lanes = *warp.at<uint32_t>(inst.refs[3]);
  for (int lane = 0; lane < LANES; ++lane) out[lane] = lanes >> lane & 1 ? a[lane] : b[lane];
  write(warp, inst.refs[0], out);
}

template <class F, int INPUTS>
void predicates(Warp& warp, const Inst& inst) {
  const uint32_t a = *warp.at<uint32_t>(inst.refs[1]);
  if constexpr (INPUTS == 1) write_predicate(warp, inst.refs[0], F::run(a));
  if constexpr (INPUTS == 2) write_predicate(warp, inst.refs[0], F::run(a, *warp.at<uint32_t>(inst.refs[2])));
}

template <class T>
void compare(SimpleTable& table, const std::string& type) {
  const int bits = sizeof(T) == 8 ? 64 : 32;
  const auto add = [&](const char* name, Handler run) {
    table[std::string("setp.") + name + type] = {run, {1, bits, bits}, Class::Selection};
  };
  add("eq", comparison<Equal, T>);
  add("ne", comparison<Unequal, T>);
  add(std::is_signed_v<T> ? "lt" : "lo", comparison<Less, T>);
  add(std::is_signed_v<T> ? "le" : "ls", comparison<LessEqual, T>);
  add(std::is_signed_v<T> ? "gt" : "hi", comparison<Greater, T>);
  add(std::is_signed_v<T> ? "ge" : "hs", comparison<GreaterEqual, T>);
  if (std::is_signed_v<T>) return;
  add("lt", comparison<Less, T>);
  add("le", comparison<LessEqual, T>);
  add("gt", comparison<Greater, T>);
  add("ge", comparison<GreaterEqual, T>);
}

template <class U>
void moves(SimpleTable& table, std::initializer_list<const char*> types) {
  const int bits = sizeof(U) == 8 ? 64 : 32;
  for (const std::string type : types) {
    table["mov" + type] = simple<Same, U, U>(Class::Move);
    table["selp" + type] = {choose<Stored<U>>, {bits, bits, bits, 1}, Class::Selection};
  }
}

void add_predicates(SimpleTable& table) {
  table["and.pred"] = {predicates<And, 2>, {1, 1, 1}, Class::Selection};
  table["or.pred"] = {predicates<Or, 2>, {1, 1, 1}, Class::Selection};
  table["xor.pred"] = {predicates<Xor, 2>, {1, 1, 1}, Class::Selection};
  table["not.pred"] = {predicates<Not, 1>, {1, 1}, Class::Selection};
  table["mov.pred"] = {predicates<Same, 1>, {1, 1}, Class::Selection};
}

}  // namespace

// setp with two results, or joined with another predicate: mode 1 and, 2 or, 3 xor; bits: the other one is negated.
void set_predicates(Warp& warp, const Inst& inst) {
  const uint32_t other = *warp.at<uint32_t>(inst.refs[4]) ^ (inst.bits ? ALL : 0);
  inst.inner(warp, inst);
  const uint32_t found = *warp.at<uint32_t>(inst.refs[0]);
  const auto joined = [&](uint32_t bits) {
    return inst.mode == 0 ? bits : inst.mode == 1 ? bits & other : inst.mode == 2 ? bits | other : bits ^ other;
  };
  write_predicate(warp, inst.refs[0], joined(found));
  write_predicate(warp, inst.refs[3], joined(~found));
}

void add_selection(SimpleTable& table) {
  compare<int16_t>(table, ".s16");
  compare<uint16_t>(table, ".u16");
  compare<uint16_t>(table, ".b16");
  compare<int32_t>(table, ".s32");
  compare<uint32_t>(table, ".u32");
  compare<uint32_t>(table, ".b32");
  compare<int64_t>(table, ".s64");
  compare<uint64_t>(table, ".u64");
  compare<uint64_t>(table, ".b64");
  moves<uint16_t>(table, {".b16", ".u16", ".s16", ".f16", ".bf16"});
  moves<uint32_t>(table, {".b32", ".u32", ".s32", ".f32"});
  moves<uint64_t>(table, {".b64", ".u64", ".s64", ".f64"});
  add_predicates(table);
}

}  // namespace machine
