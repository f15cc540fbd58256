#pragma once
// Where the lanes of an instruction find their data, checked before anything is touched.

#include "program.h"

namespace machine {

struct Access {
  int bytes = 0;  // of a lane
  bool writes = false, atomic = false;
  Space space = Space::Global;
  uint64_t address[LANES];
  const uint8_t (*data)[64] = nullptr;  // each lane's stored value, where it is known
  uint8_t* pointer[LANES];              // of lanes that take no part: unread memory
  uint64_t low = ~0ull, high = 0;       // of the lanes that take part, in global memory
};

// Fills in addresses from the operand refs[index] plus inst.value.
void addresses(Warp& warp, const Inst& inst, size_t index, Access& access);
// Fills in pointers of the lanes in warp.exec; counts, and throws Fault where a rule is broken.
void locate(Warp& warp, Access& access);
void locate_generic(Warp& warp, Access& access);

// A range of global memory that is not an instruction's of 32 lanes, such as a bulk copy's.
uint8_t* global_range(Warp& warp, uint64_t address, uint64_t bytes, bool writes, int lane);
uint8_t* shared_range(Warp& warp, uint64_t address, uint64_t bytes, uint64_t alignment, int lane);

// Counts the passes that the lanes' addresses take through the banks of shared memory.
void count_wavefronts(Warp& warp, const uint64_t* address, int bytes);

// Other parts of the machine see a store to global memory at once, or as late as the rules allow.
void later(Warp& warp, uint64_t low, uint64_t high, std::function<void()> land);

}  // namespace machine
