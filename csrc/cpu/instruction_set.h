// The instruction set that a translation unit compiles the kernels for: a kernels_*.cpp defines its NAMESPACE,
// VECTOR_BYTES and register tiles, includes this file, sets the compiler's target and includes instance.h. Without
// these macros it is the compiler's default, so that each header can be opened alone.
#pragma once

// C headers only, and before the target is set, to avoid that a shared inline function is compiled for a processor that
// others do not have.
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef HAS_NEON
#include <arm_neon.h>
#endif

#include "../rel_attention.h"

#ifndef NAMESPACE
#define NAMESPACE generic
#define INSTANCE_NAME "generic"
#define KERNELS generic_kernels
#define VECTOR_BYTES 16
// 16 registers or more: 4 x 2 sums
#define PANEL_TILE_ROWS 4
#define PANEL_TILE_COLUMNS 2
#define ROW_TILE_ROWS 4
#define ROW_TILE_COLUMNS 2
#endif

// Keys that backward takes all rows of a chunk through before the next. They are fewer where second caches are small.
#ifndef RANGE_KEYS
#define RANGE_KEYS 2304
#endif

#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE static INLINE_MEMBER
// Loops over a row of scores are no inline functions where the compiler would keep their constants in registers beside
// calls, because it then loads them again in every iteration: GCC does so for NEON, Clang for AVX2.
#if defined(__clang__) || defined(__aarch64__)
#define ROW_LOOP __attribute__((noinline))
#else
#define ROW_LOOP
#endif

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

constexpr int PANEL_ROWS = PANEL_TILE_ROWS, PANEL_COLUMNS = PANEL_TILE_COLUMNS;
constexpr int ROW_ROWS = ROW_TILE_ROWS, ROW_COLUMNS = ROW_TILE_COLUMNS;
#ifdef MULTIPLIES_BY_LANE
constexpr bool BY_LANE = true;
#else
constexpr bool BY_LANE = false;
#endif

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE
