#pragma once
// Values that were never written, followed through registers, shared and local memory.

#include "program.h"

namespace machine {

// The lanes in which an instruction's predicate is undefined: its results are so too, or the launch ends.
void check_guard(Warp& warp, const Inst& inst);

// A wgmma has read undefined bytes of shared memory: all its sums are undefined.
void undefined_operand(Warp& warp, const Inst& inst);

}  // namespace machine
