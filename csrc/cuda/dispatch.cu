#include "heuristics.h"
#include "dispatch.cuh"

namespace xlnet_kernels::cuda {

// run(an element of the call's dtype)
template <typename Run>
std::string dispatch_dtype(const Call& call, Run run) {
  switch (call.p.dtype) {
    case DType::float32:
      return run(float());
    case DType::bfloat16:
      return run(BFloat16());
    case DType::float16:
      return run(Half());
    default:
      return "rel_attention: the CUDA kernels serve float16, bfloat16 and float32";
  }
}

template <>
std::string forward<Stream>(const Call& call, Stream stream) {
  if constexpr (HAS_WARPGROUPS)
    if (choose(FORWARD_CHOICES, call, compute_capability()) == WARPGROUPS)
      return call.p.dtype == DType::float16 ? warpgroup_forward_of<Half>(call, stream)
                                            : warpgroup_forward_of<BFloat16>(call, stream);
  return dispatch_dtype(call, [&](auto element) { return forward_of<decltype(element)>(call, stream); });
}

template <>
std::string backward<Stream>(const Call& call, const Gradients& gradients, Stream stream) {
  const Backward a{call, gradients};
  if constexpr (HAS_WARPGROUPS)
    if (choose(BACKWARD_CHOICES, call, compute_capability()) == WARPGROUPS) {
      const auto run = [&](auto element) {
        using T = decltype(element);
        return gradients.sums.progress.data ? warpgroup_backward_of<T, true>(a, stream)
                                            : warpgroup_backward_of<T, false>(a, stream);
      };
      return call.p.dtype == DType::float16 ? run(Half()) : run(BFloat16());
    }
  return dispatch_dtype(call, [&](auto element) { return backward_of<decltype(element)>(a, stream); });
}

int shared_memory_limit(int device) { return shared_memory_of_block(device); }

}  // namespace xlnet_kernels::cuda
