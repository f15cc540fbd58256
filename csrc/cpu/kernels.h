// Interface of the CPU kernels: one table of functions per instruction set, chosen once at run time.
#pragma once

#include "../rel_attention.h"

namespace xlnet_kernels::cpu {

// Runs task(context, slot) for slots 0 .. slots-1, in parallel where it can; any order and any grouping is fine, since
// slots draw their work from one ascending counter (chunks.h).
using Parallel = void (*)(int64_t slots, void (*task)(void* context, int64_t slot), void* context);

struct Products;  // bfloat16/products.h

// Contiguous, float32 or bfloat16
struct Elements {
  DType dtype;
  const void* from;
  void* to;
};

struct Kernels {
  const char* name;
  // Both return false when memory runs out, before anything is written. Without `products` bfloat16 is converted to
  // float32, as float16 always is, and float32 is never rounded.
  bool (*forward)(const RelAttention&, const Products*, int64_t threads, Parallel);
  bool (*backward)(const RelAttention&, const RelAttentionGradients&, const Products*, int64_t threads, Parallel);
  // Elements begin to end-1, after dropout; `begin` is a multiple of 256.
  void (*drop_out)(const Elements&, const Dropout&, int64_t begin, int64_t end);
  const Products* emulated;
};

extern const Kernels avx512_kernels, avx2_kernels, neon_kernels, generic_kernels;

struct Choice {
  const char* name;  // null: there is none
  const Kernels* kernels;
  const Products* products;  // of bfloat16 operands, or null
};

// The best for this processor; the environment variable XLNET_KERNELS_CPU selects another: amx_bf16, avx512_bf16,
// avx512, avx2, neon_bf16, neon, generic, or emulated_bf16, which is the best for float32 with avx512_bf16's
// instruction in C++.
Choice choose_kernels();

}  // namespace xlnet_kernels::cpu
