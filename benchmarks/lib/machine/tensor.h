#pragma once
// Fragments of matrices in the registers of a warp.

#include "numbers.h"
#include "product.h"
#include "program.h"

namespace machine {

enum class Element : uint8_t { Half, Brain, Tf32, Int8, UInt8, Double };

// Rows 16 x depth, from registers of the warp: a's fragment of mma and of wgmma.
void read_rows(Warp& warp, const Ref* refs, int count, Element element, int depth, float* into);
// The sums, 16 x columns: four float32 registers, or two of float16 pairs, for each 8 columns.
void read_sums(Warp& warp, const Ref* refs, bool half, int columns, float* into);
void write_sums(Warp& warp, const Ref* refs, bool half, int columns, const float* from);

inline float element_value(Element element, uint32_t bits) {
  switch (element) {
    case Element::Half:
      return F16::get(bits);
    case Element::Brain:
      return Bf16::get(bits);
    case Element::Tf32:
      return tf32(as_float(bits));
    case Element::Int8:
      return static_cast<int8_t>(bits);
    default:
      return static_cast<uint8_t>(bits);
  }
}

}  // namespace machine
