// One block at a time of a grid of threads: what primitives.cuh is made of. Each CUDA thread is a fiber. Mistakes of a
// kernel end the launch with a sentence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "schedule.h"

namespace simt {

constexpr int MAX_SHARED_BYTES = 232448;  // 227 KiB, what a block may have on H100

struct Index {
  int x, y, z;
};

// Where a kernel called a primitive.
struct Place {
  const char* file;
  int line;
  bool operator==(const Place& other) const;
  static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

std::string text(const Place& place);  // "file.cuh:12"

// The running thread's view of itself.
struct View {
  int thread;
  Index block, grid;
  char* shared;
};
extern View view;

// Waits until all lanes of the warp have come with the same `complete`, which the last one calls with what each
// brought.
void meet(const char* what, Place place, void* brought, void (*complete)(void* const* lanes));
// A kernel may be interrupted here.
void pass(const char* what, Place place);
void meet_block(Place place);

void copy_async(void* shared, const void* global, size_t bytes, bool inside, Place place);
void commit_copies(Place place);
void wait_for_copies(int pending, Place place);

// Offset in shared memory of `bytes` bytes that must lie in it, be aligned, and not be the target of a copy under way.
size_t shared_offset(const void* pointer, size_t bytes, const char* what, Place place);
void check_global(const void* pointer, size_t alignment, const char* what, Place place);

// Ends the launch: does not return to the kernel.
[[noreturn]] void fail(const std::string& sentence);

struct Launch {
  void (*kernel)();
  const char* arguments_type;  // names the kernel where it has no symbol
  Index grid;
  int threads, shared_bytes;
  void (*call)(const Launch&);
  const void* arguments;
};
const char* run(const Launch& launch);  // the error's text, or null

}  // namespace simt

extern "C" {
// Order of blocks, warps and lanes in the launches that follow; 0 without, or what the environment has as SIMT_SEED.
void set_schedule(uint64_t seed);
// Memory between two pages that cannot be touched, filled with NaN: its start (at_start) or its end lies at one of
// them. 16-byte aligned, hence up to 15 bytes behind the end that are only looked at after each launch.
void* simt_allocate(size_t bytes, int at_start);
void simt_free(void* memory);
}
