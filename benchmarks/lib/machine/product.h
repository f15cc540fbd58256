#pragma once
// Products of small matrices as tensor cores form them.

#include <cstdint>

namespace machine {

struct Accumulation {
  int terms;   // products that are summed at once with what was there
  int extra;   // bits kept below float32's when terms are aligned to the largest
  bool round;  // instead: float32 sums, each rounded to nearest
};

// c[m][n] += sum of a[m][k] b[k][n]: rows of a have `depth` numbers, of b and c `columns`, a multiple of 8.
void multiply(const float* a, const float* b, float* c, int rows, int columns, int depth, Accumulation how);

Accumulation accumulation(int architecture, int operand_bits, bool round);

}  // namespace machine
