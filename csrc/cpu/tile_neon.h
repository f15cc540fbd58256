// The register tile of float32 products on NEON, in assembly: GCC and Clang keep 24 sums in registers, but then take
// loads apart, spill and move. 12 x 2 vectors; numbers of A are taken from lanes.
//
// v8 to v31: sums, two a row. v0 to v3: 12 numbers of A for each step of the depth, two vectors at a time. v4 and v6: a
// row of B; v5 and v7: the next one.
#pragma once

#if defined(__aarch64__)

#include "vector.h"

namespace xlnet_kernels::cpu::NAMESPACE {
namespace {

// clang-format off

#define FMLA(C, B, A, LANE) "fmla v" #C ".4s, v" #B ".4s, v" #A ".s[" #LANE "]\n\t"
// Four rows times both vectors X, Y of a row of B; C0 to C7 are their sums
#define FOUR_ROWS(A, X, Y, C0, C1, C2, C3, C4, C5, C6, C7) \
  FMLA(C0, X, A, 0) FMLA(C1, Y, A, 0)                      \
  FMLA(C2, X, A, 1) FMLA(C3, Y, A, 1)                      \
  FMLA(C4, X, A, 2) FMLA(C5, Y, A, 2)                      \
  FMLA(C6, X, A, 3) FMLA(C7, Y, A, 3)
#define TWELVE_ROWS(A0, A1, A2, X, Y)                         \
  FOUR_ROWS(A0, X, Y, 8, 9, 10, 11, 12, 13, 14, 15)           \
  FOUR_ROWS(A1, X, Y, 16, 17, 18, 19, 20, 21, 22, 23)         \
  FOUR_ROWS(A2, X, Y, 24, 25, 26, 27, 28, 29, 30, 31)

// B as rows that are `next` bytes apart, or as two panels, the second at `next`
#define ROW(X, Y)                              \
  "ldp q" #X ", q" #Y ", [%[b]]\n\t"           \
  "add %[b], %[b], %[next]\n\t"
#define TWO_OF_ROWS ROW(4, 6) ROW(5, 7)
#define ONE_OF_ROWS ROW(4, 6)
#define TWO_OF_PANELS           \
  "ldp q4, q5, [%[b]], #32\n\t" \
  "ldp q6, q7, [%[next]], #32\n\t"
#define ONE_OF_PANELS       \
  "ldr q4, [%[b]], #16\n\t" \
  "ldr q6, [%[next]], #16\n\t"

// The middle of the second step's A is loaded where the first step's end has been.
#define TWO_STEPS(LOAD_B)            \
  "ldp q0, q1, [%[a]], #32\n\t"      \
  LOAD_B                             \
  "ldp q2, q3, [%[a]], #32\n\t"      \
  TWELVE_ROWS(0, 1, 2, 4, 6)         \
  "ldp q0, q1, [%[a]], #32\n\t"      \
  TWELVE_ROWS(3, 0, 1, 5, 7)
#define ONE_STEP(LOAD_B)             \
  "ldp q0, q1, [%[a]], #32\n\t"      \
  LOAD_B                             \
  "ldr q2, [%[a]], #16\n\t"          \
  TWELVE_ROWS(0, 1, 2, 4, 6)

// DO(offset of a row's pointer, registers of its two sums) for each row of C
#define EACH_ROW(DO)                                          \
  DO(0, 8, 9) DO(8, 10, 11) DO(16, 12, 13) DO(24, 14, 15)     \
  DO(32, 16, 17) DO(40, 18, 19) DO(48, 20, 21) DO(56, 22, 23) \
  DO(64, 24, 25) DO(72, 26, 27) DO(80, 28, 29) DO(88, 30, 31)
#define ADDRESS(POINTER) "ldr x9, [%[c], #" #POINTER "]\n\tadd x9, x9, %[column]\n\t"
#define CLEAR(POINTER, X, Y) "movi v" #X ".4s, #0\n\tmovi v" #Y ".4s, #0\n\t"
#define STORE(POINTER, X, Y) ADDRESS(POINTER) "stp q" #X ", q" #Y ", [x9]\n\t"
#define ADD(POINTER, X, Y)               \
  ADDRESS(POINTER)                       \
  "ldp q0, q1, [x9]\n\t"                 \
  "fadd v0.4s, v0.4s, v" #X ".4s\n\t"    \
  "fadd v1.4s, v1.4s, v" #Y ".4s\n\t"    \
  "stp q0, q1, [x9]\n\t"

#define MULTIPLY(END, B)                                                                                   \
  asm volatile(EACH_ROW(CLEAR)                                                                             \
               "cbz %[fours], 2f\n\t"                                                                      \
               "1:\n\t"                                                                                    \
               TWO_STEPS(TWO_OF_##B) TWO_STEPS(TWO_OF_##B)                                                 \
               "subs %[fours], %[fours], #1\n\t"                                                           \
               "b.ne 1b\n\t"                                                                               \
               "2: cbz %[ones], 4f\n\t"                                                                    \
               "3:\n\t"                                                                                    \
               ONE_STEP(ONE_OF_##B)                                                                        \
               "subs %[ones], %[ones], #1\n\t"                                                             \
               "b.ne 3b\n\t"                                                                               \
               "4:\n\t"                                                                                    \
               EACH_ROW(END)                                                                               \
               : [a] "+r"(a), [b] "+r"(b), [next] "+r"(next), [fours] "+r"(fours), [ones] "+r"(ones)       \
               : [c] "r"(c), [column] "r"(column * int64_t(sizeof(float)))                                 \
               : "x9", "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10",  \
                 "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22",       \
                 "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")

// clang-format on

// C[0 .. 12)[column .. column + 8) (+)= A . B as tile_product has it, A a panel
template <bool FIRST>
INLINE void multiply_tile(const float* a, const float* b, int64_t row_stride, int64_t column_stride, int64_t depth,
                          float* const* c, int64_t column) {
  int64_t fours = depth / 4, ones = depth % 4;
  if (row_stride == LANES<float>) {
    const float* next = b + column_stride;
    if constexpr (FIRST) {
      MULTIPLY(STORE, PANELS);
    } else {
      MULTIPLY(ADD, PANELS);
    }
  } else {
    int64_t next = row_stride * int64_t(sizeof(float));
    MULTIPLY(ADD, ROWS);
  }
}

#undef FMLA
#undef FOUR_ROWS
#undef TWELVE_ROWS
#undef ROW
#undef TWO_OF_ROWS
#undef ONE_OF_ROWS
#undef TWO_OF_PANELS
#undef ONE_OF_PANELS
#undef TWO_STEPS
#undef ONE_STEP
#undef EACH_ROW
#undef ADDRESS
#undef CLEAR
#undef STORE
#undef ADD
#undef MULTIPLY

}  // namespace
}  // namespace xlnet_kernels::cpu::NAMESPACE

#endif  // __aarch64__
