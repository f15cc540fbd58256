// The kernels for any processor, by the compiler's default: instruction_set.h has its register tiles.

#include "instance.h"
