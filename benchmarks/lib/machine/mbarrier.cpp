// mbarriers: barriers in shared memory that count arrivals and the bytes of copies.

#include "async.h"
#include "memory.h"

namespace machine {
namespace {

uint64_t address_of(Warp& warp, const Inst& inst, int lane) {
  const uint64_t base =
      inst.extent[0] == 64 ? warp.at<uint64_t>(inst.refs[0])[lane] : warp.at<uint32_t>(inst.refs[0])[lane];
  const uint64_t address = (base + inst.value) & ~SHARED_WINDOW;
  shared_range(warp, address, 8, 8, lane);
  return address;
}

void check_phase(Block& block, Mbarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.pending = barrier.expected;
  ++barrier.phase;
  barrier.completed.resize(AGENTS, 0);
  barrier.known.resize(AGENTS, 0);
  for (int agent = 0; agent < AGENTS; ++agent)
    barrier.completed[agent] = std::max(barrier.completed[agent], barrier.known[agent]);
  barrier.known.clear();
  ++block.progress;
}

void arrive(Warp& warp, Mbarrier& barrier, uint32_t count, int lane) {
  if (count > barrier.pending) throw Fault{"undefined", "more arrivals at an mbarrier than it expects", lane};
  flush(warp);
  ++warp.launch->totals.barriers;
  if (warp.block->shadow) warp.block->shadow->release(warp.index, barrier.known);
  barrier.pending -= count;
  check_phase(*warp.block, barrier);
}

template <class F>
void each_lane(Warp& warp, F&& f) {
  for (int lane = 0; lane < LANES; ++lane)
    if (warp.exec >> lane & 1) f(lane);
}

bool is_complete(const Mbarrier& barrier, uint64_t phase, bool parity) {
  return parity ? (barrier.phase & 1) != (phase & 1) : barrier.phase > phase;
}

}  // namespace

Mbarrier& mbarrier_at(Block& block, uint64_t address, int lane) {
  const auto found = block.async->mbarriers.find(address);
  if (found == block.async->mbarriers.end())
    throw Fault{"uninitialized", "no mbarrier was initialized at " + hex(address), lane};
  return found->second;
}

// A copy's bytes have landed.
void complete_bytes(Block& block, uint64_t address, uint32_t bytes) {
  Mbarrier& barrier = mbarrier_at(block, address, -1);
  barrier.bytes -= bytes;
  barrier.known.resize(AGENTS, 0);
  if (block.shadow) barrier.known[COPIES] = block.shadow->now++;
  check_phase(block, barrier);
}

// refs: address, result, count; the same for all of them
void mbarrier_init(Warp& warp, const Inst& inst) {
  each_lane(warp, [&](int lane) {
    const uint64_t address = address_of(warp, inst, lane);
    if (warp.block->shadow) warp.block->shadow->write(warp, address, 8, lane, false, nullptr);
    const uint32_t count = warp.at<uint32_t>(inst.refs[2])[lane];
    if (!count || count >= 1u << 20)
      throw Fault{"undefined", "an mbarrier for " + std::to_string(count) + " arrivals", lane};
    Mbarrier made;
    made.expected = made.pending = count;
    warp.block->async->mbarriers[address] = made;
  });
}

void mbarrier_inval(Warp& warp, const Inst& inst) {
  each_lane(warp, [&](int lane) {
    const uint64_t address = address_of(warp, inst, lane);
    mbarrier_at(*warp.block, address, lane);
    warp.block->async->mbarriers.erase(address);
    if (warp.block->shadow) warp.block->shadow->write(warp, address, 8, lane, false, nullptr);
  });
}

// mode bit 0: the number is of bytes to expect, and one arrives
void mbarrier_arrive(Warp& warp, const Inst& inst) {
  each_lane(warp, [&](int lane) {
    const uint64_t address = address_of(warp, inst, lane);
    if (warp.block->shadow) warp.block->shadow->read(warp, address, 8, lane);
    Mbarrier& barrier = mbarrier_at(*warp.block, address, lane);
    const uint32_t number = warp.at<uint32_t>(inst.refs[2])[lane];
    warp.at<uint64_t>(inst.refs[1])[lane] = barrier.phase;
    if (inst.mode & 1) barrier.bytes += number;
    arrive(warp, barrier, inst.mode & 1 ? 1 : number, lane);
  });
}

void mbarrier_expect(Warp& warp, const Inst& inst) {
  each_lane(warp, [&](int lane) {
    mbarrier_at(*warp.block, address_of(warp, inst, lane), lane).bytes += warp.at<uint32_t>(inst.refs[2])[lane];
  });
}

// mode bit 1: by parity, bit 2: test_wait, which never waits
void mbarrier_wait(Warp& warp, const Inst& inst) {
  const bool parity = inst.mode & 2;
  uint32_t over = 0;
  uint64_t open = 0, open_phase = 0;
  each_lane(warp, [&](int lane) {
    const uint64_t address = address_of(warp, inst, lane);
    if (warp.block->shadow) warp.block->shadow->read(warp, address, 8, lane);
    Mbarrier& barrier = mbarrier_at(*warp.block, address, lane);
    const uint64_t phase = parity ? warp.at<uint32_t>(inst.refs[2])[lane] : warp.at<uint64_t>(inst.refs[2])[lane];
    if (is_complete(barrier, phase, parity)) {
      over |= 1u << lane;
      if (warp.block->shadow) warp.block->shadow->acquire(warp.index, barrier.completed);
    } else {
      open = address;
      open_phase = phase;
    }
  });
  const bool waits = over != warp.exec && !(inst.mode & 4) && warp.launch->random.below(8);
  if (waits) {  // the instruction is executed again when the phase is over
    async_of(warp).waits_for = open;
    async_of(warp).waits_phase = open_phase;
    async_of(warp).waits_parity = parity;
    warp.state = State::Waiting;
    warp.pc = warp.at_instruction;
    return;
  }
  uint32_t& into = *warp.at<uint32_t>(inst.refs[1]);
  into = (into & ~warp.exec) | over;
}

bool wait_is_over(Warp& warp) {
  const WarpAsync& own = async_of(warp);
  const auto found = warp.block->async->mbarriers.find(own.waits_for);
  return found == warp.block->async->mbarriers.end() || is_complete(found->second, own.waits_phase, own.waits_parity);
}

// cp.async.mbarrier.arrive: arrives when the lane's copies so far have landed; mode 1 (noinc): counted as an arrival.
void mbarrier_copies(Warp& warp, const Inst& inst) {
  const Inst all = [] {
    Inst made;
    made.mode = 1;
    return made;
  }();
  copy_wait(warp, all);
  each_lane(warp, [&](int lane) {
    Mbarrier& barrier = mbarrier_at(*warp.block, address_of(warp, inst, lane), lane);
    barrier.pending += !inst.mode;
    arrive(warp, barrier, 1, lane);
  });
}

}  // namespace machine
