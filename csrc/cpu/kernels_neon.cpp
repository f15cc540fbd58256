#if defined(__aarch64__)

#define NAMESPACE neon
#define INSTANCE_NAME "neon"
#define KERNELS neon_kernels
#define VECTOR_BYTES 16
// 32 registers: sums of 12 x 2 vectors. Products take a number of A from a lane of a register.
#define PANEL_TILE_ROWS 12
#define PANEL_TILE_COLUMNS 2
#define ROW_TILE_ROWS 12
#define ROW_TILE_COLUMNS 2
#define HAS_NEON 1
#define MULTIPLIES_BY_LANE 1
#include "instance.h"

#endif  // __aarch64__
