#if defined(__x86_64__)

#define NAMESPACE avx2
#define INSTANCE_NAME "avx2"
#define KERNELS avx2_kernels
#define VECTOR_BYTES 32
// 16 registers: sums of 6 x 2 vectors
#define PANEL_TILE_ROWS 6
#define PANEL_TILE_COLUMNS 2
#define ROW_TILE_ROWS 6
#define ROW_TILE_COLUMNS 2
#define RANGE_KEYS 1152
#include "instruction_set.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#include "instance.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
