// The device as csrc/cuda/register.cpp sees it, where that is the host.
#pragma once

#include <primitives.cuh>

#include "stable/entry.h"

#define XLNET_KERNELS_DISPATCH_KEY CPU
#ifndef XLNET_KERNELS_OPERATOR
#define XLNET_KERNELS_OPERATOR "rel_attention_simt"
#endif

namespace xlnet_kernels::cuda {

struct DeviceGuard {
  explicit DeviceGuard(int) {}
};

inline void announce_array(void*, int64_t) {}  // for what checks addresses: benchmarks/lib/machine/cuda
inline Stream current_stream() { return nullptr; }
inline int device_processors = 3;  // with few heads, several slots at work on one rel_key
inline int device_tiles = 4;       // both set through simt_size

inline int processors() { return device_processors; }
inline int tiles_worth_a_block() { return device_tiles; }

}  // namespace xlnet_kernels::cuda

// For what calls the operator without torch's dispatcher: benchmarks/host_time.py
extern "C" __attribute__((used)) inline const xlnet_kernels::Entries* simt_entries() {
  static const xlnet_kernels::Entries found{xlnet_kernels::cuda::entry(), {}};
  return &found;
}

extern "C" __attribute__((used)) inline void simt_size(int processors, int tiles) {
  xlnet_kernels::cuda::device_processors = processors, xlnet_kernels::cuda::device_tiles = tiles;
}
