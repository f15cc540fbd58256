// What register.cpp needs to know of the device; benchmarks/lib/simt/torch_device.h says the same of the host.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#define XLNET_KERNELS_DISPATCH_KEY CUDA
#define XLNET_KERNELS_OPERATOR "rel_attention"

namespace xlnet_kernels::cuda {

using Stream = cudaStream_t;
using DeviceGuard = c10::cuda::CUDAGuard;

inline void announce_array(void*, int64_t) {}  // for what checks addresses: benchmarks/lib/machine/cuda
inline Stream current_stream() { return c10::cuda::getCurrentCUDAStream(); }
inline int tiles_worth_a_block() { return 4; }  // of keys; as many copies as a block's first window of rel_key takes
inline int processors() {
  int count = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, c10::cuda::current_device()));
  return count;
}

}  // namespace xlnet_kernels::cuda
