// Unwritten values: they may be moved, exchanged and computed with, as valgrind lets them, and end the launch
// where something that can be seen depends on them: what global memory gets, an address, a branch, a descriptor.

#include "undefined.h"

#include "decoder.h"
#include "memory.h"
#include "shadow.h"

namespace machine {
namespace {

[[noreturn]] void visible(uint32_t lanes, const std::string& what) {
  throw Fault{"uninitialized", what + " depends on a value that was never written", __builtin_ctz(lanes)};
}

uint32_t undefined(const Warp& warp, const Inst& inst, size_t ref) {
  return inst.tracked[ref] < 0 ? 0 : warp.undefined[inst.tracked[ref]];
}

void become(Warp& warp, int index, uint32_t lanes) {
  if (index >= 0) warp.undefined[index] = (warp.undefined[index] & ~warp.exec) | (lanes & warp.exec);
}

void become_all(Warp& warp, const Inst& inst, uint32_t lanes) {
  for (int index : inst.writes) become(warp, index, lanes);
}

uint32_t read_undefined(const Warp& warp, const Inst& inst) {
  uint32_t lanes = 0;
  for (int index : inst.reads) lanes |= warp.undefined[index];
  return lanes & warp.exec;
}

// Lane by lane, any operand that is undefined makes the result so.
void computed(Warp& warp, const Inst& inst) { become_all(warp, inst, read_undefined(warp, inst)); }

// One of two: selp.
void chosen(Warp& warp, const Inst& inst) {
  const uint32_t first = *warp.at<uint32_t>(inst.refs[3]);
  become(warp, inst.tracked[0],
         undefined(warp, inst, 3) | (first & undefined(warp, inst, 1)) | (~first & undefined(warp, inst, 2)));
}

// Lanes in which an operand of and (or) is known to be all zeros (ones), whatever the other one is.
template <class T>
uint32_t deciding(Warp& warp, const Inst& inst, size_t ref, bool is_and) {
  if constexpr (std::is_same_v<T, bool>) {
    const uint32_t lanes = *warp.at<uint32_t>(inst.refs[ref]);
    return (is_and ? ~lanes : lanes) & ~undefined(warp, inst, ref);
  } else {
    uint32_t lanes = 0;
    for (int lane = 0; lane < LANES; ++lane)
      lanes |= static_cast<uint32_t>(warp.at<T>(inst.refs[ref])[lane] == (is_and ? T(0) : ~T(0))) << lane;
    return lanes & ~undefined(warp, inst, ref);
  }
}

template <class T, bool AND>
void joined(Warp& warp, const Inst& inst) {
  const uint32_t settled = deciding<T>(warp, inst, 1, AND) | deciding<T>(warp, inst, 2, AND);
  become(warp, inst.tracked[0], read_undefined(warp, inst) & ~settled);
}

// setp whose result is joined with another predicate, refs[4].
void compared(Warp& warp, const Inst& inst) {
  const uint32_t other = *warp.at<uint32_t>(inst.refs[4]) ^ (inst.bits ? ALL : 0);
  const uint32_t settled = inst.mode == 1 ? ~other : inst.mode == 2 ? other : 0;
  const uint32_t found = undefined(warp, inst, 1) | undefined(warp, inst, 2), joins = undefined(warp, inst, 4);
  become_all(warp, inst, (found & ~(settled & ~joins)) | joins);
}

void shuffled(Warp& warp, const Inst& inst) {
  if (const uint32_t lanes = undefined(warp, inst, 4) & warp.exec) visible(lanes, "which lanes shfl names");
  int source[LANES];
  shuffle_sources(warp, inst, source);
  const uint32_t from = undefined(warp, inst, 1), how = undefined(warp, inst, 2) | undefined(warp, inst, 3);
  uint32_t lanes = 0;
  for (int lane = 0; lane < LANES; ++lane) lanes |= (from >> source[lane] & 1) << lane;
  become(warp, inst.tracked[0], lanes | how);
  become(warp, inst.tracked[5], how);
}

// vote, match and redux: one lane's value is all lanes' result.
void gathered(Warp& warp, const Inst& inst) {
  if (const uint32_t lanes = undefined(warp, inst, 2) & warp.exec) visible(lanes, "which lanes take part");
  become_all(warp, inst, undefined(warp, inst, 1) & warp.exec ? ALL : 0);
}

bool is_global(const Access& access, int lane) {
  return access.space == Space::Global && !(access.address[lane] >> 56);
}

// Whether the bytes of shared or local memory at a lane's address are undefined. None: global memory,
// or an address that the access itself will refuse.
uint8_t* bytes_at(Warp& warp, const Access& access, int lane) {
  if (is_global(access, lane)) return nullptr;
  const uint64_t window = access.address[lane] >> 56, address = access.address[lane] & (SHARED_WINDOW - 1);
  if (access.space == Space::Shared || window == SHARED_WINDOW >> 56) {
    auto& of = warp.block->shadow->undefined;
    return address + access.bytes <= of.size() ? of.data() + address : nullptr;
  }
  const uint64_t bytes = warp.launch->function->local_bytes, at = lane * bytes + address;
  return address + access.bytes <= bytes && at < warp.undefined_local.size() ? warp.undefined_local.data() + at
                                                                             : nullptr;
}

Access access_of(Warp& warp, const Inst& inst, int address_ref) {
  if (const uint32_t lanes = undefined(warp, inst, address_ref) & warp.exec) visible(lanes, "an address");
  Access access;
  access.bytes = inst.size * inst.count;
  access.space = inst.space < 2 ? Space::Global : inst.space == 2 ? Space::Shared : Space::Local;
  addresses(warp, inst, address_ref, access);
  return access;
}

void loaded(Warp& warp, const Inst& inst) {
  const Access access = access_of(warp, inst, inst.count);
  for (int part = 0; part < inst.count; ++part) {
    uint32_t lanes = 0;
    for (int lane = 0; lane < LANES && inst.space != 1 && inst.space != 4; ++lane) {
      const uint8_t* bytes = warp.exec >> lane & 1 ? bytes_at(warp, access, lane) : nullptr;
      for (int i = 0; bytes && i < inst.size; ++i) lanes |= static_cast<uint32_t>(bytes[part * inst.size + i]) << lane;
    }
    become(warp, inst.tracked[part], lanes);
  }
}

void stored(Warp& warp, const Inst& inst) {
  const Access access = access_of(warp, inst, inst.count);
  for (int lane = 0; lane < LANES; ++lane) {
    uint8_t* bytes = warp.exec >> lane & 1 ? bytes_at(warp, access, lane) : nullptr;
    for (int part = 0; part < inst.count && warp.exec >> lane & 1; ++part) {
      const bool none = undefined(warp, inst, part) >> lane & 1;
      if (none && is_global(access, lane)) visible(1u << lane, "what is stored to global memory");
      if (bytes) std::fill(bytes + part * inst.size, bytes + (part + 1) * inst.size, none);
    }
  }
}

struct MatrixRows {  // 8 rows of 16 bytes for each matrix
  uint8_t* row[LANES];
  MatrixRows(Warp& warp, const Inst& inst) {
    Access access = access_of(warp, inst, inst.count);
    access.bytes = 16;
    access.space = Space::Shared;
    for (int lane = 0; lane < LANES; ++lane) {
      access.address[lane] &= SHARED_WINDOW - 1;
      row[lane] = bytes_at(warp, access, lane);
    }
  }
};

// The two numbers that each lane has of a matrix: the row of 16 bytes they lie in, and where.
template <class F>
void each_number(const Inst& inst, F&& f) {
  for (int matrix = 0; matrix < inst.count; ++matrix)
    for (int lane = 0; lane < LANES; ++lane)
      for (int half = 0; half < 2; ++half) {
        const int i = lane / 4, j = lane % 4 * 2 + half;
        f(matrix, lane, matrix * 8 + (inst.mode ? j : i), 2 * (inst.mode ? i : j));
      }
}

void matrix_loaded(Warp& warp, const Inst& inst) {
  const MatrixRows rows(warp, inst);
  uint32_t lanes[4] = {};
  each_number(inst, [&](int matrix, int lane, int row, int byte) {
    if (rows.row[row]) lanes[matrix] |= static_cast<uint32_t>(rows.row[row][byte] | rows.row[row][byte + 1]) << lane;
  });
  for (int matrix = 0; matrix < inst.count; ++matrix) become(warp, inst.tracked[matrix], lanes[matrix]);
}

void matrix_stored(Warp& warp, const Inst& inst) {
  const MatrixRows rows(warp, inst);
  each_number(inst, [&](int matrix, int lane, int row, int byte) {
    const bool none = undefined(warp, inst, matrix) >> lane & 1;
    if (rows.row[row]) rows.row[row][byte] = rows.row[row][byte + 1] = none;
  });
}

// Rows (of a) and columns (of b) of a product that have an undefined number: bits.
uint32_t undefined_rows(const Warp& warp, const Inst& inst, int first, int count, bool columns) {
  uint32_t found = 0;
  for (int reg = 0; reg < count; ++reg)
    for (int lane = 0; lane < LANES; ++lane)
      found |= (undefined(warp, inst, first + reg) >> lane & 1) << (lane / 4 + (columns ? 0 : reg % 2 * 8));
  return found;
}

void set_sums(Warp& warp, const Inst& inst, int count, bool half, uint32_t rows, uint32_t columns, int kept) {
  for (int reg = 0; reg < count; ++reg) {
    uint32_t lanes = kept < 0 ? 0 : undefined(warp, inst, kept + reg);
    for (int lane = 0; lane < LANES; ++lane) {
      const int row = lane / 4 + (half ? reg % 2 : reg / 2 % 2) * 8, column = lane % 4 * 2 + (half ? 0 : reg % 2);
      lanes |= ((rows >> row | columns >> column | (half ? columns >> (column + 1) : 0)) & 1) << lane;
    }
    become(warp, inst.tracked[reg], lanes);
  }
}

void multiplied(Warp& warp, const Inst& inst) {
  const int a = inst.bits, b = a + inst.count, c = b + inst.size;
  const uint32_t rows = undefined_rows(warp, inst, a, inst.count, false);
  set_sums(warp, inst, inst.bits, inst.bits == 2 && inst.extent[0] == 16, rows,
           undefined_rows(warp, inst, b, inst.size, true), c);
}

// Values in shared memory are checked when they are read: see undefined_operand.
void wgmma_multiplied(Warp& warp, const Inst& inst) {
  const int a = inst.value, b = a + inst.count;
  uint32_t deciding = undefined(warp, inst, b) | undefined(warp, inst, b + 1);
  if (inst.count == 1) deciding |= undefined(warp, inst, a);
  if (deciding) visible(deciding, "a descriptor");
  const uint32_t rows = inst.count == 4 ? undefined_rows(warp, inst, a, 4, false) : 0;
  const bool keeps = *warp.at<uint32_t>(inst.refs.back()) & warp.exec;
  set_sums(warp, inst, inst.value, inst.bits, rows, 0, keeps ? 0 : -1);
}

void matrix_moved(Warp& warp, const Inst& inst) { become_all(warp, inst, read_undefined(warp, inst) ? ALL : 0); }

// Everything else: what it reads is an address, a barrier's number, the lanes that take part, ...
void seen(Warp& warp, const Inst& inst) {
  if (const uint32_t lanes = read_undefined(warp, inst)) visible(lanes, "what the instruction does");
  become_all(warp, inst, 0);
}

bool is_lanewise(const Inst& inst) {
  for (Class kind : {Class::Float, Class::Integer, Class::Conversion, Class::Move, Class::Selection, Class::Special})
    if (inst.kind == kind) return true;
  return false;
}

// Undefined values through an instruction: called before the instruction itself.
Handler undefined_rule(const Inst& inst, const std::string& op) {
  const std::pair<Handler, Handler> by_handler[] = {
      {load_param, loaded},
      {load_global, loaded},
      {load_shared, loaded},
      {load_local, loaded},
      {load_generic, loaded},
      {store_global, stored},
      {store_shared, stored},
      {store_local, stored},
      {store_generic, stored},
      {shuffle, shuffled},
      {vote, gathered},
      {match, gathered},
      {reduce_lanes, gathered},
      {load_matrix, matrix_loaded},
      {store_matrix, matrix_stored},
      {move_matrix, matrix_moved},
      {multiply_matrices, multiplied},
      {wgmma_multiply, wgmma_multiplied},
      {set_predicates, compared},
  };
  for (const auto& [handler, rule] : by_handler)
    if (inst.run == handler) return rule;
  const std::pair<const char*, Handler> by_name[] = {
      {"and.pred", joined<bool, true>},    {"or.pred", joined<bool, false>},    {"and.b32", joined<uint32_t, true>},
      {"or.b32", joined<uint32_t, false>}, {"and.b64", joined<uint64_t, true>}, {"or.b64", joined<uint64_t, false>}};
  for (const auto& [name, rule] : by_name)
    if (op == name) return rule;
  if (op.rfind("selp.", 0) == 0) return chosen;
  if (op.find(".cc") != std::string::npos) return seen;  // carries are not followed
  return is_lanewise(inst) ? computed : seen;
}

}  // namespace

// Registers that an instruction touches: those that may be undefined, and those of 32 bits, for wgmma in flight.
void Decoder::notes_registers() {
  std::vector<int> defined, used;
  registers_of(*at_, defined, used);
  for (int reg : defined)
    if (flow_.tracked[reg] >= 0) inst_->writes.push_back(flow_.tracked[reg]);
  if (at_->predicate >= 0) inst_->guard = flow_.tracked[at_->predicate];
  for (Ref ref : inst_->refs) {
    const auto found = tracked_.find(ref);
    inst_->tracked.push_back(found == tracked_.end() ? -1 : found->second);
  }
  for (int reg : used)
    if (flow_.tracked[reg] >= 0 && reg != at_->predicate) inst_->reads.push_back(flow_.tracked[reg]);
  const bool generic = inst_->kind == Class::Global && inst_->space == 0;
  const bool memory =
      flow_.undefined_memory && (generic || inst_->kind == Class::Shared || inst_->kind == Class::Local);
  if (memory || !inst_->reads.empty() || !inst_->writes.empty()) inst_->undefined = undefined_rule(*inst_, at_->op);
  for (const std::vector<int>& list : {defined, used})
    for (int reg : list)
      if (function_.registers[reg].bits == 32) inst_->accesses.push_back({flow_.slots[reg], 128});
  for (int reg : defined)
    if (function_.registers[reg].bits == 32) inst_->results.push_back(flow_.slots[reg]);
}

void check_guard(Warp& warp, const Inst& inst) {
  const uint32_t lanes = warp.undefined[inst.guard] & warp.active;
  if (!lanes) return;
  if (!is_lanewise(inst)) visible(lanes, "whether the instruction is executed");
  for (int index : inst.writes) warp.undefined[index] |= lanes;
}

void undefined_operand(Warp& warp, const Inst& inst) {
  for (int reg = 0; reg < inst.value; ++reg) become(warp, inst.tracked[reg], ALL);
}

}  // namespace machine
