#pragma once
// A decoded kernel, and what executes it: instructions, warps, blocks, the launch.

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "ptx.h"

namespace machine {

constexpr int LANES = 32;
constexpr uint32_t ALL = 0xffffffffu;

// Where generic addresses of spaces other than global begin; no address of this process is as large.
constexpr uint64_t SHARED_WINDOW = 1ull << 56, LOCAL_WINDOW = 2ull << 56, PARAM_WINDOW = 3ull << 56;

// An operand: offset of its 32 lanes in the warp's registers, or ~offset in the constants.
using Ref = int32_t;
constexpr Ref NONE = INT32_MIN;

// Classes of instructions that are counted, in the order of CLASS_NAMES (counts.cpp).
enum class Class : uint8_t {
  Product,
  Shuffle,
  Special,
  Selection,
  Float,
  Integer,
  Conversion,
  Move,
  Global,
  Shared,
  Local,
  Copy,
  Control,
  Barrier
};

struct Warp;
struct Inst;
using Handler = void (*)(Warp&, const Inst&);

struct Inst {
  Handler run = nullptr, inner = nullptr;  // inner: of an instruction that is another with something before or after
  std::vector<Ref> refs;
  Ref predicate = NONE;
  bool negated = false;
  bool releases = false;  // makes the warp's stores so far visible
  Class kind = Class::Move;
  int32_t target = -1, reconverge = -1;  // of a branch
  int64_t value = 0;                     // immediate offset, mask, ...
  uint8_t space = 0, size = 0, count = 0, mode = 0, bits = 0;
  int32_t extent[3] = {0, 0, 0};              // sizes of a product
  Handler undefined = nullptr;                // of one that may meet undefined values, see undefined.h
  std::vector<int> reads, writes;             // registers that may be undefined: indices of those read and written,
  std::vector<int> tracked;                   // of each of refs, -1: of none,
  int guard = -1;                             // and of the predicate
  std::vector<std::pair<Ref, int>> accesses;  // registers touched and their bytes; filled in where wgmma is used
  std::vector<Ref> results;                   // registers of 32 bits that are written
  uint8_t bulk_bits[4] = {};                  // of a bulk copy's addresses: bits of their registers, and offsets
  int64_t bulk_offset[4] = {};
  int tensor_name = -1;  // index into Program::tensor_names
};

// Instructions whose lanes each do the same with their own operands.
struct Simple {
  Handler run;
  std::vector<int> bits;  // of the operands, destinations first
  Class kind;
  int64_t value = 0;
};
using SimpleTable = std::unordered_map<std::string, Simple>;
const SimpleTable& simple_instructions();
void add_integer(SimpleTable&);
void add_carry(SimpleTable&);
void add_selection(SimpleTable&);
void add_float(SimpleTable&);
void add_half(SimpleTable&);
void add_convert(SimpleTable&);

struct Program {
  std::vector<Inst> code;
  std::vector<uint8_t> constants;
  uint32_t file_bytes = 0;        // registers of a warp
  int tracked = 0;                // registers that may be undefined
  bool undefined_memory = false;  // shared and local memory may hold what is
  std::vector<Ref> special;       // of each of SPECIAL, or NONE
  std::vector<std::string> tensor_names;
  std::vector<int64_t> tensor_cycles;
  bool uses_wgmma = false;
};

struct Flow {                   // see flow.cpp
  std::vector<int> reconverge;  // of each branch statement: where its lanes meet again, -1: nowhere
  std::vector<Ref> slots;       // of each register
  std::vector<int> tracked;     // of each register: index, or -1 if it is defined wherever it is used
  uint32_t file_bytes = 0;
  int tracked_count = 0;
  bool undefined_memory = false;
};
Flow analyze(const Function& function);
void registers_of(const Statement& statement, std::vector<int>& defined, std::vector<int>& used);
void decode(Module& module, Function& function);
std::string opcodes();  // first words of the instructions that are known, one a line

struct Fault {  // thrown by instructions
  std::string kind, message;
  int lane = -1;
};

struct Frame {  // lanes that wait, and where they go on
  int pc, reconverge;
  uint32_t mask;
};

struct Region {
  uint64_t address, bytes;
  int writable;
  const char* name;
};

// A pointer that a kernel is given has the number of the region that it points into, from 1, in its bits 48 to 55, and
// so has every address that is computed from it: in another tensor, that is out of bounds. Other addresses, of variables
// and of pointers that lie in memory, have 0 there and may be in any region.
constexpr int REGION_BIT = 48;
constexpr uint64_t MOST_REGIONS = 255;
inline uint64_t memory_address(uint64_t address) { return address & ((1ull << REGION_BIT) - 1); }

struct LaunchRequest {
  const char* entry;
  uint32_t grid[3], block[3], cluster[3];
  const uint8_t* params;
  uint64_t param_bytes, shared_bytes;
  const Region* regions;
  uint64_t region_count, seed;
  int round_to_nearest, check, copies_need_fence;
};

struct Random {
  uint64_t state;
  uint32_t next() {  // splitmix64
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    return static_cast<uint32_t>((z ^ (z >> 27)) * 0x94d049bb133111ebull >> 32);
  }
  uint32_t below(uint32_t limit) { return static_cast<uint64_t>(next()) * limit >> 32; }
};

struct Totals {
  uint64_t special_operations = 0, shared_wavefronts = 0, shared_conflicts = 0, global_sectors_read = 0,
           global_sectors_written = 0, atomic_sectors = 0, barriers = 0, local_bytes = 0;
};

struct Block;
struct Warp;
struct Shadow;
struct Async;

struct Launch;

enum class State : uint8_t { Running, AtBarrier, Waiting, Done };

struct Pending {  // a store or reduction to global memory, still invisible to others
  uint64_t low, high;
  std::function<void()> land;
};

struct Warp {
  Launch* launch = nullptr;
  Block* block = nullptr;
  std::vector<uint8_t> storage, local;
  uint8_t* registers = nullptr;
  const uint8_t* constants = nullptr;
  const Inst* code = nullptr;
  int index = 0, pc = 0, reconverge = -1, at_instruction = 0;
  uint32_t carry = 0;  // of lanes: CC.CF
  uint32_t exec = 0, active = 0, exited = 0, present = 0;
  State state = State::Running;
  int barrier = -1;           // at which it waits
  Ref barrier_result = NONE;  // of bar.red
  int barrier_kind = 0;       // 0 popc, 1 and, 2 or
  std::vector<Frame> stack;
  std::vector<uint32_t> undefined;       // of registers that may be: lanes that have no value
  std::vector<uint8_t> undefined_local;  // of each byte of local memory
  std::deque<Pending> pending;
  std::vector<uint8_t> in_flight;  // of each 128 bytes of registers: 1 + wgmma group they belong to
  int flights = 0;                 // wgmma groups under way
  std::vector<uint32_t> written;   // of each 128 bytes of registers: wgmma.fences before the last write
  uint32_t fences = 0;
  uint64_t issued = 0;

  template <class T>
  T* at(Ref ref) {
    return reinterpret_cast<T*>(ref < 0 ? const_cast<uint8_t*>(constants) + ~ref : registers + ref);
  }
  uint32_t live() const { return present & ~exited; }
};

struct NamedBarrier {
  uint32_t arrived = 0, expected = 0;  // threads
  std::vector<Warp*> waiting;
  uint32_t warps = 0;              // that have arrived: bits
  uint32_t joined[3] = {0, 1, 0};  // of bar.red: count, and, or
  std::vector<uint32_t> known;     // what those who arrived have done, see shadow.h
};

struct Block {
  Launch* launch;
  uint32_t index[3];
  std::vector<Warp> warps;
  std::vector<uint8_t> shared;
  NamedBarrier barriers[16];
  std::unique_ptr<Shadow, void (*)(Shadow*)> shadow{nullptr, nullptr};
  std::unique_ptr<Async, void (*)(Async*)> async{nullptr, nullptr};
  uint64_t progress = 0, seen_progress = 0;  // counts what may let a waiting warp go on
};

struct Launch {
  Module* module;
  Function* function;
  Program* program;
  const LaunchRequest* request;
  std::vector<Region> regions;   // by address
  std::vector<uint8_t> params;   // the request's, pointers marked with their regions
  std::vector<uint64_t> issued;  // by instruction
  Totals totals;
  Random random;
  uint64_t shared_bytes = 0;
  bool check, round_to_nearest;
  bool late_stores = false, late_copies = false, last_block_first = false;  // by seed
  int architecture;
  std::vector<std::unique_ptr<Block>> resident;
  uint64_t idle_turns = 0;
  Warp* blamed = nullptr;  // whose turn it is
};

// Checks the lanes that an instruction names; throws where one is not there.
void collective(Warp& warp, uint32_t named, const char* what);
void aligned(Warp& warp, const char* what);
void check_barrier(Block& block, int index);                           // lets those who wait go on when all are there
uint32_t shuffle_sources(Warp& warp, const Inst& inst, int* sources);  // lanes that shfl reads; whether in range: bits
void reconverge(Warp& warp);                                           // where the lanes that parted last meet
void flush(Warp& warp);                                                // all pending stores
void flush(Warp& warp, uint64_t low, uint64_t high);
std::string hex(uint64_t value);

// Handlers that decode.cpp puts into instructions; each is defined in the file of its kind.
#define MACHINE_HANDLERS(X)                                                                                           \
  X(branch)                                                                                                           \
  X(leave)                                                                                                            \
  X(trap)                                                                                                             \
  X(nothing)                                                                                                          \
  X(assertion)                                                                                                        \
  X(barrier_sync) X(barrier_arrive) X(barrier_reduce) X(warp_barrier) X(memory_fence) X(load_param) X(load_global)    \
      X(load_shared) X(load_local) X(load_generic) X(store_global) X(store_shared) X(store_local) X(store_generic)    \
          X(reduce_global) X(atomic_global) X(atomic_shared) X(atomic_generic) X(shuffle) X(vote) X(match)            \
              X(reduce_lanes) X(elect) X(active_mask) X(pack) X(unpack) X(move_b128) X(load_matrix) X(store_matrix)   \
                  X(multiply_matrices) X(move_matrix) X(clock) X(prefetch) X(copy_async) X(copy_commit) X(copy_wait)  \
                      X(wgmma_multiply) X(wgmma_fence) X(wgmma_commit) X(wgmma_wait) X(mbarrier_init)                 \
                          X(mbarrier_inval) X(mbarrier_arrive) X(mbarrier_expect) X(mbarrier_wait) X(mbarrier_copies) \
                              X(bulk_to_shared) X(bulk_to_global) X(bulk_commit) X(bulk_wait) X(tensor_to_shared)     \
                                  X(tensor_to_global) X(replace_field) X(publish_map) X(set_predicates) X(is_space)   \
                                      X(convert_low)
#define MACHINE_DECLARE(name) void name(Warp&, const Inst&);
MACHINE_HANDLERS(MACHINE_DECLARE)
#undef MACHINE_DECLARE

void launch(Launch& launch);
std::string report(const Launch& launch);

}  // namespace machine
