// The face of the CPU kernels: one table of functions per instruction set, chosen once at run time.
#pragma once

#include "../rel_attention.h"

namespace xlnet_kernels::cpu {

// Runs task(context, slot) for slots 0 .. slots-1, in parallel where it can; any order and any grouping is fine, since
// slots draw their work from one ascending counter (schedule.h).
using Parallel = void (*)(int64_t slots, void (*task)(void* context, int64_t slot), void* context);

struct Kernels {
  const char* name;
  // Both return false when memory runs out, before anything is written.
  bool (*forward)(const RelAttention&, int64_t threads, Parallel);
  bool (*backward)(const RelAttention&, const RelAttentionGradients&, int64_t threads, Parallel);
};

extern const Kernels avx512_kernels, avx2_kernels, generic_kernels;

// The best table for this processor; the environment variable XLNET_KERNELS_CPU (avx512, avx2, generic) asks for a
// lesser one. Null when it names none.
const Kernels* choose_kernels();

}  // namespace xlnet_kernels::cpu
