// Products of bfloat16 matrices with float32 sums: their arguments, and their implementations. No torch, no vectors.
#pragma once

#include <stdint.h>

namespace xlnet_kernels::cpu {

// C = initial + A B or C += A B. Numbers are bfloat16 where they are uint16_t; strides are in elements.
struct Product {
  const uint16_t* a;  // A(m, k) at a[m * a_stride + k]
  int64_t a_stride;
  const uint16_t* b;  // panels of 16 columns, [depth / 2][16][2]: two numbers of a column stand side by side
  int64_t b_panel;    // from a panel to the next
  float* c;           // C(m, n) at c[m * c_stride + n / 16 * c_panel + n % 16]
  int64_t c_stride, c_panel;
  int64_t rows, columns, depth;  // multiples of 16, 16 and 32
  const float* initial;          // a row, with which every row of C starts; null: C is added to
  int64_t to_low = 0;            // from a number of A or B to its low part; 0: they have none

  // As products of operands in one part. Low parts are not multiplied with each other.
  template <typename F>
  __attribute__((always_inline)) void as_single_products(F multiply) const {
    Product single = *this;
    single.to_low = 0;
    multiply(single);
    if (to_low == 0) return;
    single.initial = nullptr;
    single.a += to_low;
    multiply(single);
    single.a -= to_low, single.b += to_low;
    multiply(single);
  }
};

// A thread's configuration of the tile registers before a task
struct alignas(64) TileState {
  unsigned char config[64];
};

// One way to multiply. Sums are of two products at a time:
//   sum = (sum + a1 b1) + a0 b0                      one rounding for each addition (emulated, avx512_bf16)
//   sum = sum + (sum of a0 b0 + sum of a1 b1)        over 32 of the depth (amx_bf16)
//   sum = sum + (a0 b0 + a1 b1)                      to odd, as the processor rounds there (neon_bf16)
// and numbers below 2^-126 may count as zero.
struct Products {
  const char* name;
  bool is_faster;            // than float32 products on this processor
  bool are_faster_in_parts;  // three of them than one of float32: operands of float32 may be two numbers
  void (*multiply)(const Product&);
  void (*enter)(TileState*);  // before the first product of a task, on its thread
  void (*leave)(TileState*);  // after the last: the thread's state is as it was
};

// Null where this build or this processor has no such instruction
const Products* amx_products();
const Products* avx512_products();
const Products* neon_products();

}  // namespace xlnet_kernels::cpu
