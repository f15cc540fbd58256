// Control and data flow of a kernel: where lanes that part meet again, which registers may share a place, and which
// may be read before they are written.

#include <algorithm>
#include <map>

#include "program.h"

namespace machine {
namespace {

bool starts(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

bool is_branch(const Statement& of) { return of.target >= 0; }

bool ends_path(const Statement& of) {
  return (is_branch(of) || of.op == "ret" || of.op == "exit" || of.op == "trap") && of.predicate < 0;
}

void collect(const Operand& of, std::vector<int>& into) {
  if (of.reg >= 0) into.push_back(of.reg);
  for (const Operand& part : of.parts) collect(part, into);
}

bool writes_first(const Statement& of) {
  if (of.operands.empty() || of.operands[0].kind == Kind::Address) return false;
  if (starts(of.op, "bar.red") || starts(of.op, "barrier.cta.red")) return true;
  for (const char* none : {"bar", "nanosleep", "bra", "call", "setmaxnreg", "cp.", "st", "red."})
    if (starts(of.op, none)) return false;
  return !starts(of.op, "wgmma.wait");
}

struct Blocks {
  std::vector<int> begin, of;  // begin of each, and one more; the block of each statement
  std::vector<std::vector<int>> after;

  explicit Blocks(const Function& function) {
    const auto& code = function.statements;
    const int count = code.size();
    std::vector<char> leads(count + 1, 0);
    leads[0] = 1;
    for (int i = 0; i < count; ++i) {
      if (is_branch(code[i])) leads[code[i].target] = 1;
      if (is_branch(code[i]) || ends_path(code[i])) leads[i + 1] = 1;
    }
    of.resize(count);
    for (int i = 0; i < count; ++i) {
      if (leads[i]) begin.push_back(i);
      of[i] = begin.size() - 1;
    }
    const int blocks = begin.size();
    begin.push_back(count);
    after.resize(blocks);
    for (int block = 0; block < blocks; ++block) {
      const Statement& last = code[begin[block + 1] - 1];
      if (is_branch(last) && last.target < count) after[block].push_back(of[last.target]);
      if (!ends_path(last) && block + 1 < blocks) after[block].push_back(block + 1);
    }
  }
  int count() const { return after.size(); }
};

// The block that every way out of each block comes by next; count(): none but the exit.
std::vector<int> post_dominators(const Blocks& blocks) {
  const int exit = blocks.count();
  std::vector<std::vector<int>> before(exit + 1);
  for (int block = 0; block < exit; ++block) {
    for (int next : blocks.after[block]) before[next].push_back(block);
    if (blocks.after[block].empty()) before[exit].push_back(block);
  }
  std::vector<int> order, number(exit + 1, -1), result(exit + 1, -1);
  std::vector<std::pair<int, size_t>> todo = {{exit, 0}};
  std::vector<char> seen(exit + 1, 0);
  seen[exit] = 1;
  while (!todo.empty()) {  // postorder of the graph turned round
    auto& [block, next] = todo.back();
    if (next < before[block].size()) {
      const int to = before[block][next++];
      if (!seen[to]) seen[to] = 1, todo.push_back({to, 0});
    } else {
      number[block] = order.size();
      order.push_back(block);
      todo.pop_back();
    }
  }
  result[exit] = exit;
  for (bool changed = true; changed;) {
    changed = false;
    for (auto block = order.rbegin(); block != order.rend(); ++block) {
      if (*block == exit) continue;
      int meet = blocks.after[*block].empty() ? exit : -1;
      for (int next : blocks.after[*block]) {
        if (result[next] < 0) continue;
        int other = next;
        if (meet < 0) meet = next;
        while (meet != other) {
          while (number[meet] < number[other]) meet = result[meet];
          while (number[other] < number[meet]) other = result[other];
        }
      }
      if (meet >= 0 && result[*block] != meet) result[*block] = meet, changed = true;
    }
  }
  for (int& of : result) of = of < 0 ? exit : of;  // of endless loops
  return result;
}

using Bits = std::vector<uint64_t>;

bool has(const Bits& bits, int index) { return bits[index >> 6] >> (index & 63) & 1; }
void set(Bits& bits, int index) { bits[index >> 6] |= 1ull << (index & 63); }

struct Liveness {
  std::vector<Bits> in, out;

  Liveness(const Function& function, const Blocks& blocks) {
    const int count = blocks.count();
    const Bits none((function.registers.size() + 63) / 64);
    std::vector<Bits> uses(count, none), kills(count, none);
    in.assign(count, none);
    out.assign(count, none);
    std::vector<int> defined, used;
    for (int block = 0; block < count; ++block) {
      for (int i = blocks.begin[block]; i < blocks.begin[block + 1]; ++i) {
        const Statement& of = function.statements[i];
        registers_of(of, defined, used);
        for (int reg : used)
          if (!has(kills[block], reg)) set(uses[block], reg);
        if (of.predicate >= 0) continue;  // may leave what was there
        for (int reg : defined) set(kills[block], reg);
      }
    }
    for (bool changed = true; changed;) {
      changed = false;
      for (int block = count - 1; block >= 0; --block) {
        for (int next : blocks.after[block])
          for (size_t word = 0; word < none.size(); ++word) out[block][word] |= in[next][word];
        for (size_t word = 0; word < none.size(); ++word) {
          const uint64_t now = uses[block][word] | (out[block][word] & ~kills[block][word]);
          changed |= now != in[block][word];
          in[block][word] = now;
        }
      }
    }
  }
};

struct Interval {
  int reg, first, last;
};

std::vector<Interval> intervals(const Function& function, const Blocks& blocks, const Liveness& live) {
  const int count = function.registers.size();
  std::vector<Interval> result(count);
  for (int reg = 0; reg < count; ++reg) result[reg] = {reg, INT32_MAX, -1};
  const auto touch = [&](int reg, int at) {
    result[reg].first = std::min(result[reg].first, at);
    result[reg].last = std::max(result[reg].last, at);
  };
  std::vector<int> defined, used;
  for (int block = 0; block < blocks.count(); ++block) {
    for (int i = blocks.begin[block]; i < blocks.begin[block + 1]; ++i) {
      registers_of(function.statements[i], defined, used);
      for (int reg : defined) touch(reg, i);
      for (int reg : used) touch(reg, i);
    }
    for (int reg = 0; reg < count; ++reg) {
      if (has(live.in[block], reg)) touch(reg, blocks.begin[block]);
      if (has(live.out[block], reg)) touch(reg, blocks.begin[block + 1]);
    }
  }
  return result;
}

uint32_t slot_bytes(int bits) { return bits == 1 ? 4 : bits <= 32 ? 128 : bits == 64 ? 256 : 512; }

// Registers of wgmma: they must not change while it is under way, which may be longer than they are alive.
std::vector<char> of_wgmma(const Function& function) {
  std::vector<char> result(function.registers.size(), 0);
  std::vector<int> found;
  for (const Statement& statement : function.statements) {
    if (!starts(statement.op, "wgmma.mma_async")) continue;
    found.clear();
    collect(statement.operands[0], found);
    if (statement.operands[1].kind == Kind::Vector) collect(statement.operands[1], found);  // else a descriptor
    for (int reg : found) result[reg] = 1;
  }
  return result;
}

// Registers that are never alive at once share a place; special ones, tracked ones and wgmma's keep theirs.
void place(const Function& function, std::vector<Interval> spans, Flow& flow) {
  flow.slots.assign(function.registers.size(), 0);
  std::sort(spans.begin(), spans.end(), [](const Interval& a, const Interval& b) { return a.first < b.first; });
  const std::vector<char> apart = of_wgmma(function);
  std::map<uint32_t, std::vector<uint32_t>> free;
  std::multimap<int, std::pair<uint32_t, uint32_t>> taken;  // by last use: size and place
  std::map<uint32_t, std::vector<Ref*>> by_size;
  std::map<uint32_t, uint32_t> count;
  for (const Interval& span : spans) {
    const Register& reg = function.registers[span.reg];
    const uint32_t size = slot_bytes(reg.bits);
    while (!taken.empty() && taken.begin()->first < span.first) {
      free[taken.begin()->second.first].push_back(taken.begin()->second.second);
      taken.erase(taken.begin());
    }
    const bool shared = reg.special < 0 && flow.tracked[span.reg] < 0 && !apart[span.reg];
    uint32_t index;
    if (shared && !free[size].empty()) {
      index = free[size].back();
      free[size].pop_back();
    } else {
      index = count[size]++;
    }
    if (shared) taken.insert({span.last, {size, index}});
    flow.slots[span.reg] = index;
    by_size[size].push_back(&flow.slots[span.reg]);
  }
  uint32_t base = 0;
  for (auto size = by_size.rbegin(); size != by_size.rend(); ++size) {  // large ones first: all stay aligned
    for (Ref* slot : size->second) *slot = base + *slot * size->first;
    base += count[size->first] * size->first;
  }
  flow.file_bytes = (base + 127) / 128 * 128 + 128;
}

// Words of an instruction's name.
bool names(const Statement& of, const char* word) { return of.op.find(word) != std::string::npos; }

// Loads and stores of memory that is not global.
bool loads_own(const Statement& of) {
  const bool loads = (starts(of.op, "ld.") && !names(of, ".param") && !names(of, ".global") && !names(of, ".const"));
  return loads || starts(of.op, "ldmatrix") || starts(of.op, "wgmma.mma_async");
}
bool stores_own(const Statement& of) {
  return (starts(of.op, "st.") && !names(of, ".param") && !names(of, ".global")) || starts(of.op, "stmatrix");
}

// Numbers the registers that may be undefined somewhere: those that some way from the beginning leaves unwritten, and
// whatever is computed from them, also by way of memory.
void find_undefined(const Function& function, const Bits& unwritten, Flow& flow) {
  const auto track = [&](int reg) {
    const bool fresh = flow.tracked[reg] < 0 && function.registers[reg].special < 0;
    if (fresh) flow.tracked[reg] = flow.tracked_count++;
    return fresh;
  };
  for (size_t reg = 0; reg < function.registers.size(); ++reg)
    if (has(unwritten, reg)) track(reg);
  std::vector<int> defined, used;
  for (bool changed = flow.tracked_count > 0; changed;) {
    changed = false;
    for (const Statement& of : function.statements) {
      registers_of(of, defined, used);
      bool any = flow.undefined_memory && loads_own(of);
      for (int reg : used) any |= flow.tracked[reg] >= 0;
      if (any && stores_own(of) && !flow.undefined_memory) flow.undefined_memory = changed = true;
      for (int reg : defined)
        if (any) changed |= track(reg);
    }
  }
}

}  // namespace

void registers_of(const Statement& statement, std::vector<int>& defined, std::vector<int>& used) {
  defined.clear();
  used.clear();
  if (statement.predicate >= 0) used.push_back(statement.predicate);
  const bool first = writes_first(statement);
  for (size_t i = 0; i < statement.operands.size(); ++i)
    collect(statement.operands[i], i == 0 && first ? defined : used);
  if (!starts(statement.op, "wgmma.mma_async")) return;
  // The sums are read too, unless the instruction says from the start that they are not.
  const size_t scale = 3 + (statement.op.find(".sp") != std::string::npos);
  const Operand& keep = statement.operands.at(scale);
  if (keep.kind != Kind::Immediate || keep.value != 0) collect(statement.operands[0], used);
}

Flow analyze(const Function& function) {
  Flow flow;
  const Blocks blocks(function);
  const Liveness live(function, blocks);
  const std::vector<int> meets = post_dominators(blocks);
  flow.reconverge.assign(function.statements.size(), -1);
  for (size_t i = 0; i < function.statements.size(); ++i) {
    const int meet = meets[blocks.of[i]];
    if (is_branch(function.statements[i]) && meet < blocks.count()) flow.reconverge[i] = blocks.begin[meet];
  }
  flow.tracked.assign(function.registers.size(), -1);
  find_undefined(function, live.in[0], flow);
  place(function, intervals(function, blocks, live), flow);
  return flow;
}

}  // namespace machine
