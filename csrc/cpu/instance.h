// Everything the kernels consist of, compiled once per instruction set: an instance defines NAMESPACE, VECTOR_BYTES and
// the register tiles, sets the compiler's target and includes this file. Only C headers may come before it, so that no
// shared inline function is ever compiled for a processor that others do not have.

#include "bfloat16/products.h"
#include "kernels.h"

#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE static INLINE_MEMBER
// Loops over a row of scores. Inlined, their constants are kept for the loops around them, beside calls, and what calls
// do not preserve is then loaded in every turn: GCC does so for NEON, Clang for AVX2.
#if defined(__clang__) || defined(__aarch64__)
#define ROW_LOOP __attribute__((noinline))
#else
#define ROW_LOOP
#endif

namespace xlnet_kernels::cpu {
namespace NAMESPACE {
namespace {

constexpr int PANEL_ROWS = PANEL_TILE_ROWS, PANEL_COLUMNS = PANEL_TILE_COLUMNS;
constexpr int ROW_ROWS = ROW_TILE_ROWS, ROW_COLUMNS = ROW_TILE_COLUMNS;
#ifdef MULTIPLIES_BY_LANE
constexpr bool BY_LANE = true;
#else
constexpr bool BY_LANE = false;
#endif

#include "vector.h"
#include "gemm.h"
#include "scratch.h"
#include "schedule.h"
#include "pack.h"
#include "segments.h"
#include "mask.h"
#include "unread.h"
#include "softmax.h"
#include "dropout.h"
#include "rows.h"
#include "shift.h"
#include "scores.h"
#include "forward.h"
#include "few_rows.h"
#include "sums.h"
#include "backward.h"
#include "few_rows_backward.h"
#include "bfloat16/operands.h"
#include "bfloat16/scores.h"
#include "bfloat16/forward.h"
#include "bfloat16/backward.h"

static bool forward(const RelAttention& p, const Products* products, int64_t threads, Parallel parallel) {
  if (has_few_rows(p))
    return p.dtype == DType::float64 ? few_rows_forward_as<double>(p, threads, parallel)
                                     : few_rows_forward_as<float>(p, threads, parallel);
  if (p.dtype == DType::float64) return forward_as<double>(p, threads, parallel);
  if (p.dtype == DType::bfloat16 && products != nullptr) return bfloat16_forward(p, *products, threads, parallel);
  return forward_as<float>(p, threads, parallel);
}

static bool backward(const RelAttention& p, const RelAttentionGradients& g, const Products* products, int64_t threads,
                     Parallel parallel) {
  if (has_few_rows(p) && p.mem_len + p.key_len <= KEY_GROUP)  // of many keys, sums over rows take the time
    return p.dtype == DType::float64 ? few_rows_backward_as<double>(p, g, threads, parallel)
                                     : few_rows_backward_as<float>(p, g, threads, parallel);
  if (p.dtype == DType::float64) return backward_as<double>(p, g, threads, parallel);
  if (p.dtype == DType::bfloat16 && products != nullptr) return bfloat16_backward(p, g, *products, threads, parallel);
  return backward_as<float>(p, g, threads, parallel);
}

}  // namespace
}  // namespace NAMESPACE

extern const Kernels KERNELS = {INSTANCE_NAME, NAMESPACE::forward, NAMESPACE::backward, NAMESPACE::drop_out,
                                &NAMESPACE::emulated_products};

}  // namespace xlnet_kernels::cpu
