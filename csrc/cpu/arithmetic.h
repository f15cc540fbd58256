// Arithmetic of sizes and indices.
#pragma once

#include "instruction_set.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

INLINE int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
INLINE int64_t round_down(int64_t x, int64_t multiple) { return x / multiple * multiple; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
