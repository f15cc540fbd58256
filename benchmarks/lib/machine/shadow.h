#pragma once
// Knowledge of each byte of a block's shared memory: who wrote it and when, who read it, whether a copy is under
// way.

#include <vector>

#include "program.h"

namespace machine {

constexpr int AGENTS = 36;  // 32 warps, and the following
constexpr int ATOMICS = 32, COPIES = 33, IN_FLIGHT = 34, NO_ONE = 35;

using Clock = uint32_t;

struct Shadow {
  Shadow(size_t bytes, int warps);

  void read(Warp& warp, uint64_t address, int bytes, int lane);
  // data: what is written; two warps may write the same without a barrier. Null: not known.
  void write(Warp& warp, uint64_t address, int bytes, int lane, bool atomic, const uint8_t* data);
  void begin_copy(Warp& warp, uint64_t address, int bytes, int lane);
  // fenced: what it wrote may be read through the asynchronous proxy without a fence
  void end_copy(int agent, uint64_t address, int bytes, bool fenced = false);
  void begin_operand(Warp& warp, uint64_t address, int bytes);  // read by wgmma until it is waited for
  void end_operand(uint64_t address, int bytes);
  bool is_undefined(uint64_t address, int bytes) const;
  void fence_proxy(Warp& warp) { fenced_[warp.index] = now++; }

  // Order between warps: a warp that acquires knows all that `from` has done so far.
  void release(int warp, std::vector<Clock>& into);
  void acquire(int warp, const std::vector<Clock>& from);

  std::vector<std::vector<Clock>> known;  // of each warp: up to when it knows what each agent did
  Clock now = 1;
  std::vector<uint8_t> undefined;  // of each byte: whether what was written is; empty where nothing can be

 private:
  bool check_written(Warp& warp, uint64_t address, int bytes, int lane, bool atomic, const uint8_t* data, bool reads);
  template <int BYTES>
  bool check_bytes(Warp& warp, uint64_t address, int lane, bool atomic, const uint8_t* data, bool reads);
  [[noreturn]] void conflict(int agent, uint64_t address, int lane, const char* what);
  bool check_readers(Warp& warp, uint64_t address, int bytes, int lane, const uint8_t* data);

  std::vector<uint32_t> writer_;             // of each byte: time << 6 | agent
  std::vector<std::vector<Clock>> readers_;  // of each warp: when it last read each word
  std::vector<uint8_t> unfenced_;            // of each byte: its last write is of no copy that counts as fenced
  std::vector<uint8_t> operand_;             // of each word: wgmma instructions that read it
  int operands_ = 0;
  bool copies_ = false;        // bulk copies have landed
  std::vector<Clock> fenced_;  // of each warp: its last fence.proxy.async
  std::vector<Clock> oldest_;  // of each warp: its knowledge of all warps
};

}  // namespace machine
