#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define NAMESPACE generic
#define INSTANCE_NAME "generic"
#define KERNELS generic_kernels
#define VECTOR_BYTES 16
// 16 registers or more: 4 x 2 sums
#define PANEL_TILE_ROWS 4
#define PANEL_TILE_COLUMNS 2
#define ROW_TILE_ROWS 4
#define ROW_TILE_COLUMNS 2
#include "instance.h"
