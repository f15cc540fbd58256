#pragma once
// Copies that run beside the instructions: cp.async and its groups, bulk copies, mbarriers; and wgmma's groups.

#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "program.h"
#include "shadow.h"

namespace machine {

struct Piece {  // of a copy: bytes from one place to another
  uint8_t* from;
  uint8_t* into;
  uint32_t bytes, zeros;  // copied, then filled up with zeros
};

struct Copy {
  std::vector<Piece> pieces;
  bool landed = false;
  std::vector<std::pair<uint64_t, uint32_t>> shared;  // written: address and bytes
};

struct Group {
  std::vector<Copy> copies;
};

struct Mbarrier {
  uint32_t expected = 0, pending = 0;   // arrivals of a phase
  int64_t bytes = 0;                    // of copies that this phase still waits for
  uint32_t phase = 0;                   // counts
  std::vector<Clock> known, completed;  // what arrivals made known: in this phase, and in the last
};

struct Operand16 {  // of a wgmma: bytes of shared memory
  uint64_t address;
  int bytes;
};

struct WgmmaGroup {
  std::vector<Operand16> shared;
  std::vector<Ref> registers;
  bool empty() const { return shared.empty() && registers.empty(); }
};

struct WarpAsync {
  Group open;
  std::deque<Group> groups;
  std::vector<std::function<void()>> bulk_open;  // copies from shared to global memory
  std::deque<std::vector<std::function<void()>>> bulk_groups;
  WgmmaGroup wgmma_open;
  std::deque<WgmmaGroup> wgmma_groups;
  uint64_t waits_for = 0, waits_phase = 0;  // address of an mbarrier
  bool waits_parity = false;
};

struct Async {
  std::map<uint64_t, Mbarrier> mbarriers;
  std::vector<std::function<void()>> under_way;  // copies to shared memory: what happens when they land
  WarpAsync warps[32];
};

WarpAsync& async_of(Warp& warp);
Mbarrier& mbarrier_at(Block& block, uint64_t address, int lane);
void complete_bytes(Block& block, uint64_t address, uint32_t bytes);
bool wait_is_over(Warp& warp);                         // of one that waits for an mbarrier
bool advance_copies(Block& block, bool none_can_run);  // true: something landed
void finish(Block& block);                             // copies that were never waited for
void check_flight(Warp& warp, const Inst& inst);       // registers of a wgmma that is under way
void mark_copy(Warp& warp, Ref ref);
void note_writes(Warp& warp, const Inst& inst);  // since the last wgmma.fence
bool reads_sums(Warp& warp, const Inst& inst);   // of a wgmma: whether it adds to what is there

}  // namespace machine
