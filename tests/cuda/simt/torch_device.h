// What csrc/cuda/register.cpp needs to know of the device, where that is the host.
#pragma once

#include <primitives.cuh>

#define XLNET_KERNELS_DISPATCH_KEY CPU
#define XLNET_KERNELS_OPERATOR "rel_attention_simt"

namespace xlnet_kernels::cuda {

struct DeviceGuard {
  template <typename Device>
  explicit DeviceGuard(const Device&) {}
};

inline void announce_array(void*, int64_t) {}  // for what checks addresses: tests/machine/cuda
inline Stream current_stream() { return nullptr; }
inline int processors() { return 3; }  // with few heads, several slots at work on one rel_key

}  // namespace xlnet_kernels::cuda
