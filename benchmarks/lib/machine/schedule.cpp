// A launch: blocks and warps take turns in a pseudo-random order until all have ended or one breaks a rule.

#include <algorithm>

#include "async.h"
#include "program.h"
#include "shadow.h"
#include "undefined.h"

namespace machine {
namespace {

constexpr uint32_t RESIDENT = 3;                // blocks that run side by side
constexpr uint64_t MOST_IDLE_TURNS = 20000000;  // without a barrier passed, a copy landed or a warp ended

struct Limits {
  uint32_t shared, registers;
};

// CUDA programming guide, table of technical specifications by compute capability.
Limits limits(int architecture) {
  if (architecture == 80) return {163 * 1024, 65536};
  if (architecture == 86 || architecture == 89 || architecture == 120) return {99 * 1024, 65536};
  return {227 * 1024, 65536};
}

[[noreturn]] void refuse(const std::string& message) { throw Fault{"limit", message, -1}; }

void check_limits(const Launch& launch) {
  const LaunchRequest& of = *launch.request;
  const Function& function = *launch.function;
  const uint64_t threads = static_cast<uint64_t>(of.block[0]) * of.block[1] * of.block[2];
  if (!threads || threads > 1024 || of.block[2] > 64) refuse(std::to_string(threads) + " threads in a block");
  if (!of.grid[0] || !of.grid[1] || !of.grid[2] || of.grid[0] > INT32_MAX || of.grid[1] > 65535 || of.grid[2] > 65535)
    refuse("a grid of " + std::to_string(of.grid[0]) + " x " + std::to_string(of.grid[1]) + " x " +
           std::to_string(of.grid[2]));
  const Limits most = limits(launch.architecture);
  if (launch.shared_bytes > most.shared)
    refuse(std::to_string(launch.shared_bytes) + " bytes of shared memory, of " + std::to_string(most.shared));
  for (int axis = 0; axis < 3; ++axis)
    if (function.required_threads[0] && function.required_threads[axis] != of.block[axis])
      refuse("a block of another size than the kernel's .reqntid");
  const uint64_t allowed =
      static_cast<uint64_t>(function.max_threads[0]) * function.max_threads[1] * function.max_threads[2];
  if (allowed && threads > allowed)
    refuse(std::to_string(threads) + " threads, of " + std::to_string(allowed) + " in .maxntid");
  if (static_cast<uint64_t>(function.max_registers) * ((threads + 31) / 32 * 32) > most.registers)
    refuse("registers of all threads: .maxnreg times threads is more than " + std::to_string(most.registers));
  if (of.cluster[0] * of.cluster[1] * of.cluster[2] != 1) refuse("the machine knows clusters of one block alone");
}

void fill(Warp& warp, int special, uint32_t (*value)(const Warp&, int lane)) {
  const Ref ref = warp.launch->program->special[special];
  if (ref == NONE) return;
  uint32_t* into = warp.at<uint32_t>(ref);
  for (int lane = 0; lane < LANES; ++lane) into[lane] = value(warp, lane);
}

uint32_t thread(const Warp& warp, int lane) { return warp.index * LANES + lane; }

template <int AXIS>
uint32_t thread_index(const Warp& warp, int lane) {
  const uint32_t* size = warp.launch->request->block;
  const uint32_t of = thread(warp, lane);
  return AXIS == 0 ? of % size[0] : AXIS == 1 ? of / size[0] % size[1] : of / size[0] / size[1];
}
template <int AXIS>
uint32_t block_size(const Warp& warp, int) {
  return warp.launch->request->block[AXIS];
}
template <int AXIS>
uint32_t block_index(const Warp& warp, int) {
  return warp.block->index[AXIS];
}
template <int AXIS>
uint32_t grid_size(const Warp& warp, int) {
  return warp.launch->request->grid[AXIS];
}
template <int VALUE>
uint32_t fixed(const Warp&, int) {
  return VALUE;
}
template <int KIND>
uint32_t lane_mask(const Warp&, int lane) {
  const uint32_t own = 1u << lane, below = own - 1;
  const uint32_t masks[] = {own, below, below | own, ~(below | own), ~below};
  return masks[KIND];
}

// In the order of SPECIAL; clocks are read as they are asked for.
using Filler = uint32_t (*)(const Warp&, int);
constexpr Filler FILLERS[] = {
    thread_index<0>,
    thread_index<1>,
    thread_index<2>,
    block_size<0>,
    block_size<1>,
    block_size<2>,
    block_index<0>,
    block_index<1>,
    block_index<2>,
    grid_size<0>,
    grid_size<1>,
    grid_size<2>,
    [](const Warp&, int lane) -> uint32_t { return lane; },
    [](const Warp& warp, int) -> uint32_t { return warp.index; },
    [](const Warp& warp, int) -> uint32_t { return warp.block->warps.size(); },
    fixed<0>,
    fixed<1>,
    lane_mask<0>,
    lane_mask<1>,
    lane_mask<2>,
    lane_mask<3>,
    lane_mask<4>,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    fixed<0>,
    fixed<0>,
    fixed<0>,
    fixed<1>,
    fixed<1>,
    fixed<1>,
    fixed<0>,
    fixed<1>,
    block_index<0>,
    block_index<1>,
    block_index<2>,
    grid_size<0>,
    grid_size<1>,
    grid_size<2>,
    nullptr,
    [](const Warp& warp, int) -> uint32_t { return warp.launch->request->shared_bytes; },
    [](const Warp& warp, int) -> uint32_t { return warp.launch->shared_bytes; },
};
static_assert(std::size(FILLERS) == std::size(SPECIAL), "one for each special register");

void begin(Launch& launch, Block& block, Warp& warp, int index) {
  const uint64_t threads =
      static_cast<uint64_t>(launch.request->block[0]) * launch.request->block[1] * launch.request->block[2];
  warp.launch = &launch;
  warp.block = &block;
  warp.index = index;
  warp.storage.assign(launch.program->file_bytes + 64, 0);
  warp.registers = warp.storage.data() + (-reinterpret_cast<uint64_t>(warp.storage.data()) & 63);
  warp.local.assign(launch.function->local_bytes * LANES + 64, 0);
  warp.constants = launch.program->constants.data();
  warp.code = launch.program->code.data();
  warp.undefined.assign(launch.program->tracked, ALL);
  if (launch.program->undefined_memory) warp.undefined_local.assign(warp.local.size(), 0);
  const uint64_t left = threads - static_cast<uint64_t>(index) * LANES;
  warp.present = left >= LANES ? ALL : (1u << left) - 1;
  warp.active = warp.present;
  if (launch.program->uses_wgmma) {
    warp.in_flight.assign(launch.program->file_bytes / 128 + 8, 0);
    warp.written.assign(warp.in_flight.size(), 0);
  }
  for (size_t special = 0; special < std::size(SPECIAL); ++special)
    if (FILLERS[special]) fill(warp, special, FILLERS[special]);
}

std::unique_ptr<Block> begin(Launch& launch, uint64_t number) {
  auto block = std::make_unique<Block>();
  const uint32_t* grid = launch.request->grid;
  block->launch = &launch;
  block->index[0] = number % grid[0];
  block->index[1] = number / grid[0] % grid[1];
  block->index[2] = number / grid[0] / grid[1];
  const uint64_t threads =
      static_cast<uint64_t>(launch.request->block[0]) * launch.request->block[1] * launch.request->block[2];
  block->warps.resize((threads + LANES - 1) / LANES);
  block->shared.assign(launch.shared_bytes + 64, 0xff);
  if (launch.check) {
    block->shadow = {new Shadow(launch.shared_bytes, block->warps.size()), [](Shadow* of) { delete of; }};
    if (launch.program->undefined_memory) block->shadow->undefined.assign(launch.shared_bytes, 0);
  }
  block->async = {new Async(), [](Async* of) { delete of; }};
  for (size_t index = 0; index < block->warps.size(); ++index) begin(launch, *block, block->warps[index], index);
  return block;
}

// Instructions until the warp waits or its turn is over.
void run(Launch& launch, Warp& warp, int turn) {
  const bool notes_writes = launch.program->uses_wgmma && launch.check;
  while (turn-- > 0 && warp.state == State::Running) {
    if (warp.pc == warp.reconverge) {
      reconverge(warp);
      continue;
    }
    const int at = warp.pc++;
    const Inst& inst = warp.code[at];
    warp.at_instruction = at;
    warp.exec = warp.active;
    ++launch.issued[at];
    ++warp.issued;
    if (inst.predicate != NONE) {
      if (inst.guard >= 0 && launch.check) check_guard(warp, inst);
      warp.exec &= *warp.at<uint32_t>(inst.predicate) ^ (inst.negated ? ALL : 0);
      if (!warp.exec) continue;
    }
    if (inst.kind == Class::Special) launch.totals.special_operations += __builtin_popcount(warp.exec);
    if (inst.undefined && launch.check) inst.undefined(warp, inst);
    if (warp.flights) check_flight(warp, inst);
    if (notes_writes) note_writes(warp, inst);
    inst.run(warp, inst);
  }
}

[[noreturn]] void stuck(Block& block) {
  for (Warp& warp : block.warps) {
    if (warp.state == State::Done || warp.state == State::Running) continue;
    const bool bar = warp.state == State::AtBarrier;
    block.launch->blamed = &warp;
    throw Fault{"deadlock",
                bar ? "barrier " + std::to_string(warp.barrier) + " is not reached by all that it waits for"
                    : "an mbarrier is waited for that never completes",
                -1};
  }
  throw Fault{"deadlock", "no warp can go on", -1};
}

// One turn of one warp of the block. False: all have ended.
bool turn(Launch& launch, Block& block) {
  Warp* ready[32];
  uint32_t count = 0, done = 0;
  for (Warp& warp : block.warps) {
    if (warp.state == State::Waiting && wait_is_over(warp)) warp.state = State::Running;
    if (warp.state == State::Running) ready[count++] = &warp;
    done += warp.state == State::Done;
  }
  if (done == block.warps.size()) return finish(block), false;
  if (advance_copies(block, count == 0)) return true;
  if (!count) stuck(block);
  Warp& chosen = *ready[launch.random.below(count)];
  launch.blamed = &chosen;
  launch.idle_turns = block.progress == block.seen_progress ? launch.idle_turns + 1 : 0;
  block.seen_progress = block.progress;
  if (launch.idle_turns > MOST_IDLE_TURNS) throw Fault{"deadlock", "warps run on without getting anywhere", -1};
  run(launch, chosen, 1 + (launch.random.next() & launch.random.next() & 255));
  return true;
}

void run_all(Launch& launch) {
  const uint32_t* grid = launch.request->grid;
  const uint64_t total = static_cast<uint64_t>(grid[0]) * grid[1] * grid[2];
  auto& resident = launch.resident;
  for (uint64_t next = 0; next < total || !resident.empty();) {
    for (; resident.size() < RESIDENT && next < total; ++next)
      resident.push_back(begin(launch, launch.last_block_first ? total - 1 - next : next));
    const uint32_t chosen = launch.random.below(resident.size());
    for (int turns = 0; turns < 32; ++turns) {
      if (turn(launch, *resident[chosen])) continue;
      resident.erase(resident.begin() + chosen);
      break;
    }
  }
}

// Every word of the parameters that points into a region, a tensor map's address among them, gets its number; of
// regions that lie in one another, that of the one that begins last.
void mark_pointers(Launch& launch) {
  launch.params.assign(launch.request->params, launch.request->params + launch.request->param_bytes);
  for (size_t at = 0; at + 8 <= launch.params.size(); at += 8) {
    uint64_t word;
    std::memcpy(&word, &launch.params[at], sizeof word);
    for (uint64_t number = std::min<uint64_t>(launch.regions.size(), MOST_REGIONS); number > 0; --number) {
      const Region& region = launch.regions[number - 1];
      if (word - region.address >= region.bytes) continue;
      word |= number << REGION_BIT;
      std::memcpy(&launch.params[at], &word, sizeof word);
      break;
    }
  }
}

}  // namespace

void launch(Launch& launch) {
  Function& function = *launch.function;
  if (launch.request->param_bytes != function.param_bytes)
    throw Fault{"launch",
                "parameters of " + std::to_string(launch.request->param_bytes) + " bytes, the kernel has " +
                    std::to_string(function.param_bytes),
                -1};
  launch.program = function.program.get();
  launch.shared_bytes = function.shared_bytes + launch.request->shared_bytes;
  launch.issued.assign(launch.program->code.size(), 0);
  launch.random.state = launch.request->seed * 0x2545f4914f6cdd1dull + 1;
  launch.check = launch.request->check;
  launch.late_stores = launch.request->seed & 1;
  launch.late_copies = launch.request->seed & 2;
  launch.last_block_first = launch.request->seed >> 20 & 1;  // LAST_BLOCK_FIRST of triton_driver.py
  launch.round_to_nearest = launch.request->round_to_nearest;
  launch.regions.assign(launch.request->regions, launch.request->regions + launch.request->region_count);
  for (auto& [name, variable] : launch.module->variables)
    if (variable.space == Space::Global || variable.space == Space::Const)
      launch.regions.push_back({variable.offset, variable.bytes, variable.space == Space::Global, name.c_str()});
  std::sort(launch.regions.begin(), launch.regions.end(),
            [](const Region& a, const Region& b) { return a.address < b.address; });
  mark_pointers(launch);
  check_limits(launch);
  run_all(launch);
}

}  // namespace machine
