// From a call's dtype and head width to the kernels compiled for them.
#pragma once

#include <type_traits>

#include <primitives.cuh>

#include "kernels.h"

namespace xlnet_kernels::cuda {

// Why a launch failed: which kernel, for what, and what CUDA says.
inline std::string failure(const char* kernel, const Call& call, int shared_bytes, const char* error) {
  const RelAttention& p = call.p;
  const char* const dtypes[] = {"float32", "float64", "bfloat16", "float16"};
  return std::string("rel_attention: the CUDA kernel ") + kernel + " for B=" + std::to_string(p.batch) +
         " H=" + std::to_string(p.heads) + " L=" + std::to_string(p.length) + " K=" + std::to_string(p.key_len) +
         " M=" + std::to_string(p.mem_len) + " D=" + std::to_string(p.head_dim) + " " + dtypes[int(p.dtype)] + ", " +
         std::to_string(shared_bytes) + " bytes of shared memory: " + error;
}

// Blocks for `tiles` of each head and batch: batches beyond the grid's third dimension come after them in the first.
inline Index grid_of(int64_t tiles, const RelAttention& p) {
  const int64_t together = p.batch < MAX_GRID ? p.batch : MAX_GRID;
  return {int(tiles * ((p.batch + together - 1) / together)), int(p.heads), int(together)};
}

// run(an element, integral_constant of the compiled width), for the smallest compiled width that holds the call's
template <typename T, typename Run>
std::string dispatch_width(const Call& call, Run run) {
  if (call.p.head_dim <= 32) return run(T(), std::integral_constant<int, 32>());
  if (call.p.head_dim <= 64) return run(T(), std::integral_constant<int, 64>());
  if (call.p.head_dim <= 96) return run(T(), std::integral_constant<int, 96>());
  if (call.p.head_dim <= 128) return run(T(), std::integral_constant<int, 128>());
  return "rel_attention: the CUDA kernels serve head widths up to 128, got " + std::to_string(call.p.head_dim);
}

template <typename Run>
std::string dispatch(const Call& call, Run run) {
  switch (call.p.dtype) {
    case DType::float32:
      return dispatch_width<float>(call, run);
    case DType::bfloat16:
      return dispatch_width<BFloat16>(call, run);
    case DType::float16:
      return dispatch_width<Half>(call, run);
    default:
      return "rel_attention: the CUDA kernels serve float16, bfloat16 and float32";
  }
}

}  // namespace xlnet_kernels::cuda
