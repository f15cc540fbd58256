#if defined(__x86_64__)

#define NAMESPACE avx512
#define INSTANCE_NAME "avx512"
#define KERNELS avx512_kernels
#define VECTOR_BYTES 64
// 32 registers: sums of 8 x 3 vectors over panels, of 6 x 4 over rows
#define PANEL_TILE_ROWS 8
#define PANEL_TILE_COLUMNS 3
#define ROW_TILE_ROWS 6
#define ROW_TILE_COLUMNS 4
#include "instruction_set.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "instance.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
