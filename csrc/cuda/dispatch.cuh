// From a call's dtype and head_dim to the kernels compiled for them.
#pragma once

#include <algorithm>
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

// Runs the kernels of one dtype, for the smallest compiled head_dim that holds the call's: csrc/cuda/instances, which
// compilers work on side by side.
template <typename T>
std::string forward_of(const Call& call, Stream stream);
template <typename T>
std::string warpgroup_forward_of(const Call& call, Stream stream);  // those of sm90/
template <typename T>
std::string backward_of(const Backward& a, Stream stream);
template <typename T, bool ORDERED>
std::string warpgroup_backward_of(const Backward& a, Stream stream);  // those of sm90/

// run(integral_constant of that head_dim)
template <typename Run, int... HEAD_DIM>
std::string dispatch_head_dim(int64_t head_dim, Run run, std::integer_sequence<int, HEAD_DIM...>) {
  std::string result;
  const bool found = ((head_dim <= HEAD_DIM && (result = run(std::integral_constant<int, HEAD_DIM>()), true)) || ...);
  if (found) return result;
  const int largest = std::max({HEAD_DIM...});
  return "rel_attention: the CUDA kernels serve head_dim up to " + std::to_string(largest) + ", got " +
         std::to_string(head_dim);
}

}  // namespace xlnet_kernels::cuda
