// Everything the kernels consist of, compiled once per instruction set: an instance defines NAMESPACE, VECTOR_BYTES and
// the register tiles, sets the compiler's target and includes this file. Only C headers may come before it, so that no
// shared inline function is ever compiled for a processor that others do not have.

#include "kernels.h"

#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE static INLINE_MEMBER

namespace xlnet_kernels::cpu {
namespace NAMESPACE {
namespace {

constexpr int PANEL_ROWS = PANEL_TILE_ROWS, PANEL_COLUMNS = PANEL_TILE_COLUMNS;
constexpr int ROW_ROWS = ROW_TILE_ROWS, ROW_COLUMNS = ROW_TILE_COLUMNS;

#include "vector.h"
#include "gemm.h"
#include "scratch.h"
#include "schedule.h"
#include "pack.h"
#include "segments.h"
#include "mask.h"
#include "softmax.h"
#include "dropout.h"
#include "rows.h"
#include "shift.h"
#include "scores.h"
#include "forward.h"
#include "sums.h"
#include "backward.h"

}  // namespace
}  // namespace NAMESPACE

extern const Kernels KERNELS = {INSTANCE_NAME, NAMESPACE::forward, NAMESPACE::backward};

}  // namespace xlnet_kernels::cpu
