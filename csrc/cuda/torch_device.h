// The device as register.cpp sees it; benchmarks/lib/simt/torch_device.h does the same for the host.
#pragma once

#ifndef USE_CUDA
// Defined, because torch's interface declares streams of CUDA only then
#define USE_CUDA
#endif

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include "../stable/tensor.h"

#define XLNET_KERNELS_DISPATCH_KEY CUDA
#define XLNET_KERNELS_OPERATOR "rel_attention"

namespace xlnet_kernels::cuda {

using Stream = cudaStream_t;
using DeviceGuard = torch::stable::accelerator::DeviceGuard;

inline void announce_array(void*, int64_t) {}  // for what checks addresses: benchmarks/lib/machine/cuda
inline int current_device() { return torch::stable::accelerator::getCurrentDeviceIndex(); }
inline Stream current_stream() {
  void* stream;
  CHECK(aoti_torch_get_current_cuda_stream(current_device(), &stream) == TORCH_SUCCESS, "torch has no CUDA stream");
  return static_cast<Stream>(stream);
}
inline int tiles_worth_a_block() { return 4; }  // of keys; as many copies as a block's first window of rel_key takes
inline int processors() {
  int count = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, current_device());
  CHECK(error == cudaSuccess, cudaGetErrorString(error));
  return count;
}

}  // namespace xlnet_kernels::cuda
