#include "machine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>

#include "faults.h"
#include "fiber.h"
#include "memory.h"
#include "report.h"
#include "schedule.h"

namespace simt {

View view;

namespace {

constexpr size_t STACK_BYTES = 256 << 10;
constexpr int MAX_THREADS = 1024;
constexpr uint32_t ALL_LANES = 0xffffffffu;

constexpr size_t WORD = 4;  // the least that a copy takes

struct Copy {
  char* to;
  int group;
  size_t bytes;
  char data[16];
};

struct Thread {
  Context context;
  const char* what;  // the last primitive, and where
  Place place;
  bool ended;
  std::vector<Copy> copies;  // under way, oldest first
  int groups;                // of copies, ended so far
};

struct Warp {
  uint32_t arrived;
  bool lane_ended;
  void (*complete)(void* const* lanes);
  Place place;
  void* brought[LANES];
};

uint64_t default_seed() {
  const char* seed = std::getenv("SIMT_SEED");
  return seed ? std::strtoull(seed, nullptr, 10) : 0;
}

struct Machine {
  std::mutex one_launch;
  const Launch* launch = nullptr;
  std::string error;

  Context main;
  Thread* current = nullptr;  // null: not in a kernel
  std::vector<Thread> threads;
  std::vector<std::unique_ptr<Pages>> stacks;
  std::vector<Warp> warps;
  Schedule schedule{default_seed()};
  int running, at_barrier;  // threads
  Place barrier;

  std::unique_ptr<Pages> shared_pages;
  Region shared;
  std::vector<int> copied_by;  // for every WORD bytes of shared memory: the thread whose copy is under way, plus 1
};

Machine machine;

std::vector<State> states() {
  std::vector<State> all;
  for (int t = 0; t < machine.launch->threads; ++t) {
    const Thread& thread = machine.threads[t];
    const bool ready = machine.schedule.is_ready(t);
    all.push_back({thread.ended ? State::ended : ready ? State::runs : State::waits, thread.what, thread.place});
  }
  return all;
}

void stop(const std::string& sentence, bool in_block = true) {
  machine.error = "kernel " + kernel_name(machine.launch->kernel, machine.launch->arguments_type) +
                  (in_block ? ", block " + text(view.block) : "") + ": " + sentence;
}

[[noreturn]] void leave() {
  machine.current = nullptr;
  Context nowhere;
  switch_context(nowhere, machine.main);
  std::abort();  // not reached
}

// Also where the mistake shows in what other threads do or wait for.
[[noreturn]] void fail_with_states(const std::string& sentence) { fail(sentence + "; " + describe(states())); }

void run_another() {
  if (!machine.schedule.any_ready()) fail_with_states("no thread can go on");
  Thread* self = machine.current;
  view.thread = machine.schedule.next();
  machine.current = &machine.threads[view.thread];
  if (machine.current != self) switch_context(self->context, machine.current->context);
}

Warp& warp_of(int thread) { return machine.warps[thread / LANES]; }

void note(const char* what, Place place) {
  machine.current->what = what;
  machine.current->place = place;
}

[[noreturn]] void refuse(const std::string& sentence) {
  const Thread& self = *machine.current;
  fail("thread " + std::to_string(view.thread) + ", " + self.what + " at " + text(self.place) + ": " + sentence);
}

void fiber() {
  machine.launch->call(*machine.launch);
  Thread& self = *machine.current;
  Warp& warp = warp_of(view.thread);
  self.ended = warp.lane_ended = true;
  const std::string thread = "thread " + std::to_string(view.thread);
  if (!self.copies.empty()) {
    fail(thread + " has ended without wait_for_copies for " + std::to_string(self.copies.size()) + " of its copies");
  }
  if (warp.arrived || machine.at_barrier) fail_with_states(thread + " has ended while others wait for it");
  machine.schedule.set_waiting(view.thread);
  if (--machine.running == 0) leave();
  run_another();
  std::abort();  // not reached
}

void start_block(const Index& block) {
  const int count = machine.launch->threads;
  view = {0, block, machine.launch->grid, machine.shared.data};
  machine.shared.poison_margins();
  std::memset(machine.shared.data, POISON, machine.shared.bytes);
  std::fill(machine.copied_by.begin(), machine.copied_by.end(), 0);
  for (Warp& warp : machine.warps) warp.arrived = 0, warp.lane_ended = false;
  for (int t = 0; t < count; ++t) {
    Thread& thread = machine.threads[t];
    thread.what = nullptr;
    thread.ended = false;
    thread.copies.clear();
    thread.groups = 0;
    // Tops of stacks at different offsets in a page, or they would compete for the same lines of the cache
    prepare(thread.context, machine.stacks[t]->begin(), STACK_BYTES - t % 32 * 128, fiber);
  }
  machine.running = count;
  machine.at_barrier = 0;
  machine.schedule.start_block(count / LANES);
}

std::string place_of(const char* address) {
  const size_t page = page_size();
  const Pages& shared = *machine.shared_pages;
  const Pages& stack = *machine.stacks[view.thread];
  if (address >= shared.begin() - page && address < shared.end() + page) {
    return "shared memory, " + machine.shared.describe(address);
  }
  if (address >= stack.begin() - page && address < stack.begin()) {
    return "more than its stack of " + std::to_string(STACK_BYTES) + " bytes";
  }
  const std::string allocation = describe_allocation(address);
  return allocation.empty() ? "memory that is neither shared nor allocated by simt_allocate" : allocation;
}

std::string fault_text(const Fault& fault) {
  const Thread& self = *machine.current;
  return "thread " + std::to_string(view.thread) + " " + fault.action +
         (fault.has_address ? " " + place_of(fault.address) : "") +
         (self.what ? std::string(", after ") + self.what + " at " + text(self.place) : "");
}

void run_block(const Index& block) {
  start_block(block);
  view.thread = machine.schedule.next();
  machine.current = &machine.threads[view.thread];
  switch_context(machine.main, machine.current->context);
  if (const Fault fault = take_fault(); fault.action) stop(fault_text(fault));
  machine.current = nullptr;
  if (!machine.error.empty()) return;
  if (const std::string damage = machine.shared.damage(); !damage.empty()) stop("shared memory " + damage);
}

void on_fault() {
  if (machine.current) {
    Context nowhere;
    switch_context(nowhere, machine.main);
  }
}

std::string refusal(const Launch& launch) {
  const Index& grid = launch.grid;
  if (launch.threads < 1 || launch.threads > MAX_THREADS || launch.threads % LANES) {
    return "a block has " + std::to_string(launch.threads) + " threads, not a multiple of 32 up to 1024";
  }
  if (launch.shared_bytes < 0 || launch.shared_bytes > MAX_SHARED_BYTES) {
    return "a block wants " + std::to_string(launch.shared_bytes) + " bytes of shared memory and can have " +
           std::to_string(MAX_SHARED_BYTES);
  }
  if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.y > 65535 || grid.z > 65535) {
    return "a grid cannot have the size " + text(grid);
  }
  return "";
}

void prepare_machine(const Launch& launch) {
  machine.threads.resize(std::max<size_t>(machine.threads.size(), launch.threads));
  while (machine.stacks.size() < machine.threads.size()) machine.stacks.push_back(std::make_unique<Pages>(STACK_BYTES));
  machine.warps.resize(launch.threads / LANES);
  if (!machine.shared_pages) machine.shared_pages = std::make_unique<Pages>(MAX_SHARED_BYTES);
  const Pages& pages = *machine.shared_pages;
  const size_t bytes = size_t(launch.shared_bytes);
  char* const open = pages.end() - round_up(bytes, page_size());
  pages.close(pages.begin(), open);
  pages.open(open, pages.end());
  machine.shared = {pages.end() - round_up(bytes, 16), bytes, open, pages.end()};
  machine.copied_by.assign(round_up(bytes, 16) / WORD, 0);
}

// Notes the owner of a copy to shared memory that is under way; 0: none.
void mark_copied(size_t offset, size_t bytes, int by) {
  std::fill_n(machine.copied_by.begin() + offset / WORD, bytes / WORD, by);
}

}  // namespace

void fail(const std::string& sentence) {
  if (!machine.current) std::abort();
  stop(sentence);
  leave();
}

void meet(const char* what, Place place, void* brought, void (*complete)(void* const* lanes)) {
  note(what, place);
  Warp& warp = warp_of(view.thread);
  const bool first = !warp.arrived;
  if (first) warp.complete = complete, warp.place = place;
  warp.arrived |= 1u << view.thread % LANES;
  warp.brought[view.thread % LANES] = brought;
  machine.schedule.set_waiting(view.thread);
  if (warp.lane_ended) fail_with_states("a warp-wide " + std::string(what) + " in a warp of which a lane has ended");
  if (warp.complete != complete || !(warp.place == place)) {
    fail_with_states("the lanes of warp " + std::to_string(view.thread / LANES) + " have come to different places");
  }
  if (warp.arrived == ALL_LANES) {
    complete(warp.brought);
    warp.arrived = 0;
    machine.schedule.set_ready(view.thread / LANES);
  }
  run_another();
}

void pass(const char* what, Place place) {
  note(what, place);
  run_another();
}

void meet_block(Place place) {
  note("sync_block", place);
  if (!machine.at_barrier) machine.barrier = place;
  ++machine.at_barrier;
  machine.schedule.set_waiting(view.thread);
  if (machine.running < machine.launch->threads) fail_with_states("sync_block in a block of which a thread has ended");
  if (!(machine.barrier == place)) fail_with_states("threads have come to different places with sync_block");
  if (machine.at_barrier == machine.running) {
    machine.at_barrier = 0;
    machine.schedule.set_all_ready();
  }
  run_another();
}

void copy_async(void* shared, const void* global, size_t bytes, bool inside, Place place) {
  const size_t offset = shared_offset(shared, bytes, "copy_async", place);
  Copy copy{static_cast<char*>(shared), machine.current->groups, bytes, {}};
  if (inside) {
    check_global(global, bytes, "copy_async", place);
    std::memcpy(copy.data, global, bytes);
  }
  std::memset(shared, POISON, bytes);
  mark_copied(offset, bytes, view.thread + 1);
  machine.current->copies.push_back(copy);
  run_another();
}

void commit_copies(Place place) {
  ++machine.current->groups;
  pass("commit_copies", place);
}

void wait_for_copies(int pending, Place place) {
  Thread& self = *machine.current;
  auto copy = self.copies.begin();
  for (; copy != self.copies.end() && copy->group < self.groups - pending; ++copy) {
    std::memcpy(copy->to, copy->data, copy->bytes);
    mark_copied(size_t(copy->to - machine.shared.data), copy->bytes, 0);
  }
  self.copies.erase(self.copies.begin(), copy);
  pass("wait_for_copies", place);
}

size_t shared_offset(const void* pointer, size_t bytes, const char* what, Place place) {
  note(what, place);
  const Region& shared = machine.shared;
  const char* address = static_cast<const char*>(pointer);
  if (address < shared.data || address + bytes > shared.data + shared.bytes) {
    const Pages& pages = *machine.shared_pages;
    const bool near = address >= pages.begin() - page_size() && address < pages.end() + page_size();
    refuse(std::to_string(bytes) + " bytes that are not all in shared memory: they start " +
           (near ? shared.describe(address) : "somewhere else"));
  }
  const size_t offset = size_t(address - shared.data);
  if (offset % bytes) {
    refuse("byte " + std::to_string(offset) + " of shared memory is not aligned to " + std::to_string(bytes));
  }
  for (size_t word = offset / WORD; bytes >= WORD && word < (offset + bytes) / WORD; ++word) {
    const int by = machine.copied_by[word];
    if (by == 0) continue;
    refuse("the copy of thread " + std::to_string(by - 1) + " to byte " + std::to_string(offset) +
           " of shared memory has not been waited for");
  }
  return offset;
}

void check_global(const void* pointer, size_t alignment, const char* what, Place place) {
  note(what, place);
  const char* address = static_cast<const char*>(pointer);
  if (reinterpret_cast<uintptr_t>(pointer) % alignment) {
    refuse("the address in global memory is not aligned to " + std::to_string(alignment));
  }
  if (address >= machine.shared_pages->begin() && address < machine.shared_pages->end()) {
    refuse("an address in shared memory where one in global memory is needed");
  }
}

bool skips = false;   // launches
std::string failure;  // of every launch, where a test asks for it

const char* run(const Launch& launch) {
  if (skips) return nullptr;
  std::lock_guard<std::mutex> lock(machine.one_launch);
  machine.launch = &launch;
  machine.error.clear();
  if (const std::string why = failure.empty() ? refusal(launch) : failure; !why.empty()) {
    stop(why, false);
  } else {
    prepare_machine(launch);
    const FaultHandler handler(on_fault);
    const Index grid = launch.grid;
    std::vector<int64_t> order(size_t(grid.x) * grid.y * grid.z);
    std::iota(order.begin(), order.end(), 0);
    machine.schedule.shuffle(order);
    for (int64_t i : order) {
      run_block({int(i % grid.x), int(i / grid.x % grid.y), int(i / grid.x / grid.y)});
      if (!machine.error.empty()) break;
    }
    const std::string damage = damaged_allocation();
    if (machine.error.empty() && !damage.empty()) stop(damage, false);
  }
  machine.launch = nullptr;
  static thread_local std::string result;
  result = machine.error;
  return result.empty() ? nullptr : result.c_str();
}

}  // namespace simt

// Until it is called with null, launches fail for this reason, as those on a device may.
extern "C" void simt_fail_launches(const char* reason) { simt::failure = reason ? reason : ""; }

// From now on launches do nothing, or something again: benchmarks/host_time.py wants what is around them.
extern "C" void simt_skip_launches(int skip) { simt::skips = skip; }

extern "C" void set_schedule(uint64_t seed) { simt::machine.schedule = simt::Schedule(seed); }
