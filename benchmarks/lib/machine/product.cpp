#include "product.h"

#include <cmath>
#include <cstring>

namespace machine {
namespace {

constexpr int WIDE = 8;
typedef float Floats __attribute__((vector_size(4 * WIDE)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDE)));

Ints bits_of(Floats x) {
  Ints result;
  std::memcpy(&result, &x, sizeof x);
  return result;
}

Floats floats_of(Ints x) {
  Floats result;
  std::memcpy(&result, &x, sizeof x);
  return result;
}

Floats at(const float* from) {
  Floats result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

// To float32, cut off toward zero.
Floats truncated(Ints x) {
  const Floats near = __builtin_convertvector(x, Floats);
  const Ints back = __builtin_convertvector(near, Ints);
  const Ints magnitude = x < 0 ? -x : x, rounded = back < 0 ? -back : back;
  return floats_of(bits_of(near) + (rounded > magnitude));  // a comparison that holds is -1
}

bool any(Ints x) {
  int32_t found = 0;
  for (int i = 0; i < WIDE; ++i) found |= x[i];
  return found;
}

// One sum of products with what was there: all aligned to the largest, bits that fall off below are lost.
Floats sum(const Floats* terms, int count, int extra) {
  Ints largest = bits_of(terms[0]) & 0x7f800000;
  for (int i = 1; i < count; ++i) {
    const Ints exponent = bits_of(terms[i]) & 0x7f800000;
    largest = exponent > largest ? exponent : largest;
  }
  const Ints special = largest == 0x7f800000;  // infinite or not a number: of these columns alone a plain sum
  if (any(special)) {
    Floats finite[33], total = terms[0];
    for (int i = 1; i < count; ++i) total += terms[i];
    if (!any(~special)) return total;
    for (int i = 0; i < count; ++i) finite[i] = floats_of(bits_of(terms[i]) & ~special);
    return floats_of((bits_of(total) & special) | (bits_of(sum(finite, count, extra)) & ~special));
  }
  Ints field = 277 + extra - (largest >> 23);
  field = field > 253 ? Ints{} + 253 : field;
  const Floats up = floats_of(field << 23), down = floats_of((254 - field) << 23);
  Ints total = {};
  for (int i = 0; i < count; ++i) total += __builtin_convertvector(terms[i] * up, Ints);
  return truncated(total) * down;
}

}  // namespace

void multiply(const float* a, const float* b, float* c, int rows, int columns, int depth, Accumulation how) {
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; column += WIDE) {
      float* into = c + row * columns + column;
      Floats total = at(into);
      for (int begin = 0; begin < depth; begin += how.terms) {
        Floats terms[33];
        const int count = how.terms < depth - begin ? how.terms : depth - begin;
        for (int k = 0; k < count; ++k) terms[k] = a[row * depth + begin + k] * at(b + (begin + k) * columns + column);
        terms[count] = total;
        if (how.round) {
          for (int k = 0; k < count; ++k) total += terms[k];
        } else {
          total = sum(terms, count + 1, how.extra);
        }
      }
      std::memcpy(into, &total, sizeof total);
    }
  }
}

// Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7 (2021):
// products are exact, aligned to the largest and truncated; A100 sums 8 products of 16 bits, 4 of TF32, with what was
// there. Twice as many from sm_90 on is an assumption, as the tensor core is twice as deep; so is one bit kept below.
Accumulation accumulation(int architecture, int operand_bits, bool round) {
  const int depth = architecture >= 90 ? 2 : 1;
  return {(operand_bits >= 32 ? 4 : operand_bits == 16 ? 8 : 16) * depth, 1, round};
}

}  // namespace machine
