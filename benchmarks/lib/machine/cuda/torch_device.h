// The device as csrc/cuda/register.cpp sees it, where launches go to the machine (runtime.cpp).
#pragma once

#define XLNET_KERNELS_DISPATCH_KEY CPU
#define XLNET_KERNELS_OPERATOR "rel_attention_machine"

#include <cstdint>

struct CUstream_st;

namespace xlnet_kernels::cuda {

using Stream = CUstream_st*;

struct DeviceGuard {
  explicit DeviceGuard(int) {}
};

// An array in a tensor of several: what is computed from its pointer may be in no other.
void announce_array(void* start, int64_t bytes);

inline Stream current_stream() { return nullptr; }
inline int device_processors = 3;  // with few heads, several slots at work on one rel_key
inline int device_tiles = 4;       // both set through machine_size

inline int processors() { return device_processors; }
inline int tiles_worth_a_block() { return device_tiles; }

}  // namespace xlnet_kernels::cuda
