// The matrix instruction of ARM processors with FEAT_BF16, BFMMLA: a block of 2 x 2 sums, each of four products.

#include "products.h"

#if defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__))

#include <string.h>
#if defined(__linux__)
#include <sys/auxv.h>
#else
#include <sys/sysctl.h>
#endif

namespace xlnet_kernels::cpu {
namespace {

constexpr int64_t TILE_ROWS = 6, TILE_COLUMNS = 16;    // of C: 3 x 8 blocks, in v8 to v31
constexpr int64_t MAX_DEPTH = 192, MAX_ROWS = 11 * 6;  // of A that is packed at once: 25 KB

// Steps of the depth are four numbers. A is packed as [tile of rows][step][row of the tile][4], a panel of B as
// [step][column][4]: two rows, or columns, are a register.
struct Packed {
  alignas(16) uint16_t a[MAX_ROWS * MAX_DEPTH], b[TILE_COLUMNS * MAX_DEPTH];
};

// Rows past the last one are zeros.
void pack_rows(const uint16_t* a, int64_t stride, int64_t rows, int64_t depth, uint16_t* to) {
  static constexpr uint16_t zeros[MAX_DEPTH] = {};
  for (int64_t tile = 0; tile < rows; tile += TILE_ROWS, to += TILE_ROWS * depth)
    for (int64_t m = 0; m < TILE_ROWS; ++m) {
      const uint16_t* from = tile + m < rows ? a + (tile + m) * stride : zeros;
      for (int64_t k = 0; k < depth; k += 4) memcpy(to + k * TILE_ROWS + 4 * m, from + k, 8);
    }
}

// [depth / 2][16][2] -> [depth / 4][16][4]
void pack_panel(const uint16_t* b, int64_t depth, uint16_t* to) {
  typedef uint32_t Four __attribute__((vector_size(16), aligned(2), may_alias));
  for (int64_t k = 0; k < depth; k += 4, b += 4 * TILE_COLUMNS, to += 4 * TILE_COLUMNS)
    for (int64_t n = 0; n < TILE_COLUMNS; n += 4) {
      const Four first = *reinterpret_cast<const Four*>(b + 2 * n);
      const Four second = *reinterpret_cast<const Four*>(b + 2 * (TILE_COLUMNS + n));
      *reinterpret_cast<Four*>(to + 4 * n) = Four{first[0], second[0], first[1], second[1]};
      *reinterpret_cast<Four*>(to + 4 * n + 8) = Four{first[2], second[2], first[3], second[3]};
    }
}

// clang-format off

// v<C> += v<A> . v<B>^T; written as a number, because some assemblers do not have the instruction
#define BFMMLA(A, B, C) ".inst 0x6e40ec00 + (" #B " << 16) + (" #A " << 5) + " #C "\n\t"
#define FOUR_BLOCKS(A, C0, C1, C2, C3) BFMMLA(A, 0, C0) BFMMLA(A, 1, C1) BFMMLA(A, 2, C2) BFMMLA(A, 3, C3)
#define FOUR_COLUMN_PAIRS "ld1 {v0.8h, v1.8h, v2.8h, v3.8h}, [%[b]], #64\n\t"
#define STEP                                                                                  \
  "ld1 {v4.8h, v5.8h, v6.8h}, [%[a]], #48\n\t"                                                \
  FOUR_COLUMN_PAIRS                                                                           \
  FOUR_BLOCKS(4, 8, 9, 10, 11) FOUR_BLOCKS(5, 16, 17, 18, 19) FOUR_BLOCKS(6, 24, 25, 26, 27)  \
  FOUR_COLUMN_PAIRS                                                                           \
  FOUR_BLOCKS(4, 12, 13, 14, 15) FOUR_BLOCKS(5, 20, 21, 22, 23) FOUR_BLOCKS(6, 28, 29, 30, 31)

// Blocks X and Y are the halves of two rows' vectors, which x9 and x10 point to.
#define LOAD(X, Y, OFFSET)                     \
  "ldr q0, [x9, #" #OFFSET "]\n\t"             \
  "ldr q1, [x10, #" #OFFSET "]\n\t"            \
  "zip1 v" #X ".2d, v0.2d, v1.2d\n\t"          \
  "zip2 v" #Y ".2d, v0.2d, v1.2d\n\t"
#define STORE(X, Y, OFFSET)                    \
  "zip1 v0.2d, v" #X ".2d, v" #Y ".2d\n\t"     \
  "zip2 v1.2d, v" #X ".2d, v" #Y ".2d\n\t"     \
  "str q0, [x9, #" #OFFSET "]\n\t"             \
  "str q1, [x10, #" #OFFSET "]\n\t"
#define TWO_ROWS(DO, POINTERS, FIRST, SECOND, C0, C1, C2, C3, C4, C5, C6, C7) \
  "ldr x9, [%[" #POINTERS "], #" #FIRST "]\n\t"                               \
  "ldr x10, [%[" #POINTERS "], #" #SECOND "]\n\t"                             \
  DO(C0, C1, 0) DO(C2, C3, 16) DO(C4, C5, 32) DO(C6, C7, 48)
#define ALL_ROWS(DO, POINTERS)                                      \
  TWO_ROWS(DO, POINTERS, 0, 8, 8, 9, 10, 11, 12, 13, 14, 15)        \
  TWO_ROWS(DO, POINTERS, 16, 24, 16, 17, 18, 19, 20, 21, 22, 23)    \
  TWO_ROWS(DO, POINTERS, 32, 40, 24, 25, 26, 27, 28, 29, 30, 31)

// clang-format on

// The rows at `to` = those at `from` + A B; the depth is whole DEPTH_STEPs: an iteration takes half of one
void multiply_tile(const uint16_t* a, const uint16_t* b, int64_t depth, const float* const* from, float* const* to) {
  int64_t iterations = depth / 16;
  asm volatile(ALL_ROWS(LOAD, from) "1:\n\t" STEP STEP STEP STEP
                                    "subs %[iterations], %[iterations], #1\n\t"
                                    "b.ne 1b\n\t" ALL_ROWS(STORE, to)
               : [a] "+r"(a), [b] "+r"(b), [iterations] "+r"(iterations)
               : [from] "r"(from), [to] "r"(to)
               : "x9", "x10", "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v8", "v9", "v10", "v11", "v12",
                 "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26",
                 "v27", "v28", "v29", "v30", "v31");
}

// Rows m .. m + rows - 1 of C (+)= A B, over a piece of the depth from k on
void multiply_piece(const Product& x, int64_t m, int64_t rows, int64_t k, int64_t depth, Packed& packed) {
  pack_rows(x.a + m * x.a_stride + k, x.a_stride, rows, depth, packed.a);
  float unused[TILE_COLUMNS];  // rows past the last one
  for (int64_t n = 0; n < x.columns; n += TILE_COLUMNS) {
    pack_panel(x.b + n / 16 * x.b_panel + k * TILE_COLUMNS, depth, packed.b);
    const float* initial = k == 0 && x.initial != nullptr ? x.initial + n : nullptr;
    for (int64_t tile = 0; tile < rows; tile += TILE_ROWS) {
      float* to[TILE_ROWS];
      const float* from[TILE_ROWS];
      for (int64_t i = 0; i < TILE_ROWS; ++i) {
        to[i] = tile + i < rows ? x.c + (m + tile + i) * x.c_stride + n / 16 * x.c_panel : unused;
        from[i] = initial != nullptr ? initial : to[i];
      }
      multiply_tile(packed.a + tile * depth, packed.b, depth, from, to);
    }
  }
}

void multiply_part(const Product& x) {
  Packed packed;
  for (int64_t m = 0; m < x.rows; m += MAX_ROWS)
    for (int64_t k = 0; k < x.depth; k += MAX_DEPTH) {
      const int64_t rows = x.rows - m < MAX_ROWS ? x.rows - m : MAX_ROWS;
      const int64_t depth = x.depth - k < MAX_DEPTH ? x.depth - k : MAX_DEPTH;
      multiply_piece(x, m, rows, k, depth, packed);
    }
}

void multiply_by_bfmmla(const Product& x) { x.as_single_products(multiply_part); }

void nothing(TileState*) {}

bool has_bfmmla() {
#if defined(__linux__)
  constexpr unsigned long bf16 = 1ul << 14;  // HWCAP2_BF16, which older headers do not have
  return (getauxval(AT_HWCAP2) & bf16) != 0;
#else
  int has = 0;
  size_t size = sizeof(has);
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has != 0;
#endif
}

}  // namespace

const Products* neon_products() {
  static constexpr Products products{"neon_bf16", true, false, multiply_by_bfmmla, nothing, nothing};
  static const bool usable = has_bfmmla();
  return usable ? &products : nullptr;
}

}  // namespace xlnet_kernels::cpu

#else

namespace xlnet_kernels::cpu {

const Products* neon_products() { return nullptr; }

}  // namespace xlnet_kernels::cpu

#endif
