// Branches, the ends of lanes, barriers of a block, fences, and when stores to global memory are seen.

#include "program.h"
#include "shadow.h"

namespace machine {
namespace {

// Goes on with lanes that wait, until some are there that have not ended.
void resume(Warp& warp) {
  while (!warp.stack.empty()) {
    const Frame frame = warp.stack.back();
    warp.stack.pop_back();
    warp.active = frame.mask & ~warp.exited;
    if (!warp.active) continue;
    warp.pc = frame.pc;
    warp.reconverge = frame.reconverge;
    return;
  }
  warp.active = 0;
  warp.state = State::Done;
}

uint32_t uniform(Warp& warp, Ref ref, const char* what) {
  const uint32_t* values = warp.at<uint32_t>(ref);
  const uint32_t value = values[__builtin_ctz(warp.exec)];
  for (int lane = 0; lane < LANES; ++lane)
    if ((warp.exec >> lane & 1) && values[lane] != value)
      throw Fault{"undefined", std::string(what) + " differs between lanes", lane};
  return value;
}

void complete(Block& block, NamedBarrier& barrier) {
  for (Warp* warp : barrier.waiting) {
    if (block.shadow) block.shadow->acquire(warp->index, barrier.known);
    warp->state = State::Running;
    warp->barrier = -1;
    if (warp->barrier_result == NONE) continue;
    const uint32_t exec = warp->live(), result = barrier.joined[warp->barrier_kind];
    uint32_t* into = warp->at<uint32_t>(warp->barrier_result);
    if (warp->barrier_kind) *into = (*into & ~exec) | (result ? exec : 0);
    for (int lane = 0; lane < LANES && !warp->barrier_kind; ++lane)
      if (exec >> lane & 1) into[lane] = result;
    warp->barrier_result = NONE;
  }
  barrier = NamedBarrier();
  ++block.progress;
}

// Threads that a barrier without a count waits for: those of warps that have not ended.
uint32_t everyone(const Block& block) {
  uint32_t threads = 0;
  for (const Warp& warp : block.warps)
    if (warp.state != State::Done) threads += LANES;
  return threads;
}

void arrive(Warp& warp, const Inst& inst, bool waits) {
  if (inst.mode) aligned(warp, "bar");
  flush(warp);
  const uint32_t index = uniform(warp, inst.refs[0], "the number of a barrier");
  const uint32_t threads = uniform(warp, inst.refs[1], "the size of a barrier");
  if (index >= 16) throw Fault{"undefined", "barrier " + std::to_string(index) + " of 16", -1};
  if (threads % LANES) throw Fault{"undefined", "a barrier for " + std::to_string(threads) + " threads", -1};
  NamedBarrier& barrier = warp.block->barriers[index];
  if (barrier.warps && barrier.expected != threads)
    throw Fault{"deadlock", "barrier " + std::to_string(index) + " is used for two sizes at once", -1};
  if (barrier.warps >> warp.index & 1)
    throw Fault{"deadlock", "a warp arrives twice at barrier " + std::to_string(index), -1};
  barrier.expected = threads;
  barrier.warps |= 1u << warp.index;
  barrier.arrived += LANES;  // hardware counts warps
  ++warp.launch->totals.barriers;
  if (warp.block->shadow) warp.block->shadow->release(warp.index, barrier.known);
  if (waits) {
    warp.state = State::AtBarrier;
    warp.barrier = index;
    barrier.waiting.push_back(&warp);
  }
  check_barrier(*warp.block, index);
}

}  // namespace

void check_barrier(Block& block, int index) {
  NamedBarrier& barrier = block.barriers[index];
  if (!barrier.warps) return;
  if (barrier.arrived >= (barrier.expected ? barrier.expected : everyone(block))) complete(block, barrier);
}

void branch(Warp& warp, const Inst& inst) {
  const uint32_t taken = warp.exec, rest = warp.active & ~taken;
  if (!rest) {
    warp.pc = inst.target;
    return;
  }
  if (inst.reconverge >= 0 && inst.reconverge != warp.reconverge)
    warp.stack.push_back({inst.reconverge, warp.reconverge, warp.active});
  const bool first = warp.launch->random.next() & 1;
  const Frame jumps = {inst.target, inst.reconverge, taken}, falls = {warp.pc, inst.reconverge, rest};
  warp.stack.push_back(first ? falls : jumps);
  const Frame& now = first ? jumps : falls;
  warp.pc = now.pc;
  warp.reconverge = now.reconverge;
  warp.active = now.mask;
}

void reconverge(Warp& warp) { resume(warp); }

void leave(Warp& warp, const Inst&) {
  warp.exited |= warp.exec;
  warp.active &= ~warp.exec;
  if (!warp.active) resume(warp);
  if (warp.state != State::Done) return;
  flush(warp);
  ++warp.block->progress;
  for (int index = 0; index < 16; ++index) check_barrier(*warp.block, index);
}

void trap(Warp& warp, const Inst&) { throw Fault{"trap", "the kernel executes trap", __builtin_ctz(warp.exec)}; }

void assertion(Warp& warp, const Inst&) {
  throw Fault{"assertion", "an assertion of the kernel fails", __builtin_ctz(warp.exec)};
}

void nothing(Warp&, const Inst&) {}

void memory_fence(Warp& warp, const Inst& inst) {
  flush(warp);
  if (inst.mode && warp.block->shadow) warp.block->shadow->fence_proxy(warp);
}

void barrier_sync(Warp& warp, const Inst& inst) { arrive(warp, inst, true); }
void barrier_arrive(Warp& warp, const Inst& inst) { arrive(warp, inst, false); }

// bar.red: refs[2] the result, refs[3] the predicate; count: 0 popc, 1 and, 2 or
void barrier_reduce(Warp& warp, const Inst& inst) {
  const uint32_t index = uniform(warp, inst.refs[0], "the number of a barrier");
  if (index >= 16) throw Fault{"undefined", "barrier " + std::to_string(index) + " of 16", -1};
  NamedBarrier& barrier = warp.block->barriers[index];
  const uint32_t yes = (*warp.at<uint32_t>(inst.refs[3]) ^ (inst.bits ? ALL : 0)) & warp.exec;
  barrier.joined[0] += __builtin_popcount(yes);
  barrier.joined[1] &= yes == warp.exec;
  barrier.joined[2] |= yes != 0;
  warp.barrier_result = inst.refs[2];
  warp.barrier_kind = inst.count;
  arrive(warp, inst, true);
}

void flush(Warp& warp) {
  for (; !warp.pending.empty(); warp.pending.pop_front()) warp.pending.front().land();
}

// A thread sees its own stores: those before and at the last one that overlaps land now.
void flush(Warp& warp, uint64_t low, uint64_t high) {
  size_t land = 0;
  for (size_t i = 0; i < warp.pending.size(); ++i)
    if (warp.pending[i].low < high && low < warp.pending[i].high) land = i + 1;
  for (; land; --land, warp.pending.pop_front()) warp.pending.front().land();
}

void later(Warp& warp, uint64_t low, uint64_t high, std::function<void()> land) {
  if (!warp.launch->late_stores) return land();
  warp.pending.push_back({low, high, std::move(land)});
  if (warp.pending.size() <= 64) return;
  warp.pending.front().land();
  warp.pending.pop_front();
}

}  // namespace machine
