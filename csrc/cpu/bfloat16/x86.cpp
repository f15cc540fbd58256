// The matrix instructions of some x86 processors, the only intrinsics of these kernels: AMX-BF16 and AVX512-BF16.

#include "products.h"

#if defined(XLNET_KERNELS_BFLOAT16_INSTRUCTIONS) && defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define AMX __attribute__((target("amx-tile,amx-bf16")))
#define AVX512 __attribute__((target("avx512f,avx512bf16")))

namespace xlnet_kernels::cpu {
namespace {

// Registers 0 to 3 hold C, 4 and 5 rows of A, 6 and 7 columns of B: 16 rows of 64 bytes each.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == sizeof(TileState), "what ldtilecfg loads");

// C += A B for a step of the depth. LEFT: loads A, else takes that of the step before; RIGHT: B
template <int ROWS, int COLUMNS, bool LEFT, bool RIGHT>
AMX inline void multiply_step(const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t b_panel) {
  if (LEFT) _tile_loadd(4, a, a_stride * 2);
  if (RIGHT) _tile_loadd(6, b, 64);
  _tile_dpbf16ps(0, 4, 6);
  if (COLUMNS == 2) {
    if (RIGHT) _tile_loadd(7, b + b_panel, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  if (ROWS == 2) {
    if (LEFT) _tile_loadd(5, a + 16 * a_stride, a_stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    if (COLUMNS == 2) _tile_dpbf16ps(3, 5, 7);
  }
}

// 16 ROWS x 16 COLUMNS of C from (m, n) on
template <int ROWS, int COLUMNS>
AMX void multiply_tiles(const Product& x, int64_t m, int64_t n) {
  constexpr bool below = ROWS == 2, beside = COLUMNS == 2;
  float* c = x.c + m * x.c_stride + n / 16 * x.c_panel;
  float* c_below = c + 16 * x.c_stride;
  const int64_t c_bytes = x.c_stride * 4;
  if (x.initial != nullptr) {  // stride 0: the same row 16 times
    _tile_loadd(0, x.initial + n, 0);
    if (beside) _tile_loadd(1, x.initial + n + 16, 0);
    if (below) _tile_loadd(2, x.initial + n, 0);
    if (below && beside) _tile_loadd(3, x.initial + n + 16, 0);
  } else {
    _tile_loadd(0, c, c_bytes);
    if (beside) _tile_loadd(1, c + x.c_panel, c_bytes);
    if (below) _tile_loadd(2, c_below, c_bytes);
    if (below && beside) _tile_loadd(3, c_below + x.c_panel, c_bytes);
  }
  const uint16_t *a = x.a + m * x.a_stride, *b = x.b + n / 16 * x.b_panel;
  for (int64_t k = 0; k < x.depth; k += 32, a += 32, b += 16 * 32) {
    if (x.to_low == 0) {
      multiply_step<ROWS, COLUMNS, true, true>(a, x.a_stride, b, x.b_panel);
    } else {
      multiply_step<ROWS, COLUMNS, true, true>(a + x.to_low, x.a_stride, b, x.b_panel);
      multiply_step<ROWS, COLUMNS, true, false>(a, x.a_stride, b, x.b_panel);
      multiply_step<ROWS, COLUMNS, false, true>(a, x.a_stride, b + x.to_low, x.b_panel);
    }
  }
  _tile_stored(0, c, c_bytes);
  if (beside) _tile_stored(1, c + x.c_panel, c_bytes);
  if (below) _tile_stored(2, c_below, c_bytes);
  if (below && beside) _tile_stored(3, c_below + x.c_panel, c_bytes);
}

template <int COLUMNS>
AMX void multiply_columns(const Product& x, int64_t n) {
  int64_t m = 0;
  for (; m + 32 <= x.rows; m += 32) multiply_tiles<2, COLUMNS>(x, m, n);
  if (m < x.rows) multiply_tiles<1, COLUMNS>(x, m, n);
}

AMX void multiply_by_amx(const Product& x) {
  asm volatile("" ::: "memory");  // the loads of tiles do not say that they read memory
  int64_t n = 0;
  for (; n + 32 <= x.columns; n += 32) multiply_columns<2>(x, n);
  if (n < x.columns) multiply_columns<1>(x, n);
}

AMX void enter_amx(TileState* before) {
  static const TileConfig ours;
  _tile_storeconfig(before);
  _tile_loadconfig(&ours);
}

AMX void leave_amx(TileState* before) {
  if (before->config[0] == 0) {  // no palette: nothing was configured
    _tile_release();
  } else {
    _tile_loadconfig(before);
  }
}

// 8 rows x 16 COLUMNS
template <int COLUMNS>
AVX512 void multiply_vectors(const Product& x, int64_t m, int64_t n) {
  float* c = x.c + m * x.c_stride + n / 16 * x.c_panel;
  const uint16_t *a = x.a + m * x.a_stride, *b = x.b + n / 16 * x.b_panel;
  __m512 sum[8][COLUMNS];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < COLUMNS; ++j)
      sum[i][j] = _mm512_loadu_ps(x.initial != nullptr ? x.initial + n + 16 * j : c + i * x.c_stride + j * x.c_panel);
  for (int64_t k = 0; k < x.depth; k += 2, b += 32) {
    __m512bh right[COLUMNS];
#pragma GCC unroll 2
    for (int j = 0; j < COLUMNS; ++j) right[j] = (__m512bh)_mm512_loadu_si512(b + j * x.b_panel);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      int32_t pair;
      memcpy(&pair, a + i * x.a_stride + k, 4);
      const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
      for (int j = 0; j < COLUMNS; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], left, right[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < COLUMNS; ++j) _mm512_storeu_ps(c + i * x.c_stride + j * x.c_panel, sum[i][j]);
}

AVX512 void multiply_part(const Product& x) {
  for (int64_t n = 0; n < x.columns; n += 32)
    for (int64_t m = 0; m < x.rows; m += 8)
      n + 32 <= x.columns ? multiply_vectors<2>(x, m, n) : multiply_vectors<1>(x, m, n);
}

void multiply_by_avx512(const Product& x) { x.as_single_products(multiply_part); }

void nothing(TileState*) {}

// Bits of cpuid's leaf 7: subleaf 0's edx, subleaf 1's eax
bool has_feature(unsigned subleaf, unsigned bit) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, subleaf, &a, &b, &c, &d) == 0) return false;
  return ((subleaf == 0 ? d : a) >> bit & 1) != 0;
}

}  // namespace

const Products* amx_products() {
  static constexpr Products products{"amx_bf16", true, true, multiply_by_amx, enter_amx, leave_amx};
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM: of Linux 5.16 and later
  static const bool usable =
      has_feature(0, 22) && has_feature(0, 24) && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return usable ? &products : nullptr;
}

const Products* avx512_products() {
  // Where there is AMX it takes two cycles: half the rate of float32 products (a Xeon, measured).
  static const Products products{"avx512_bf16", !has_feature(0, 24), false, multiply_by_avx512, nothing, nothing};
  return __builtin_cpu_supports("avx512f") && has_feature(1, 5) ? &products : nullptr;
}

}  // namespace xlnet_kernels::cpu

#else

namespace xlnet_kernels::cpu {

const Products* amx_products() { return nullptr; }
const Products* avx512_products() { return nullptr; }

}  // namespace xlnet_kernels::cpu

#endif
