// Loads the first rows of a longer sequence, with as many flags of unread rows as there are rows to load.

#include "cpu/bfloat16/operands.h"
#include "cpu/pack.h"

using namespace xlnet_kernels;
using namespace xlnet_kernels::cpu::generic;

constexpr int64_t LOADED = 16, ROWS = 128, DIM = 32;

template <typename T>
T* zeros(int64_t count) {
  return static_cast<T*>(calloc(static_cast<size_t>(count), sizeof(T)));
}

int main() {
  RelAttention p{};
  p.head_dim = DIM;
  const Tensor4 rows{zeros<float>(ROWS * DIM), {0, 0, DIM, 1}};
  RowSequence sequence{{rows, {}}, {ROWS, 0}, 0};
  sequence.unread = zeros<bool>(LOADED);
  p.dtype = DType::float32;
  pack(p, sequence, 0, 0, LOADED, DIM, zeros<float>(LOADED * DIM), zeros<float>(LOADED * DIM),
       zeros<float>(LOADED * DIM));
  p.dtype = DType::bfloat16;
  const Operand operand{nullptr, zeros<uint16_t>(LOADED * DIM), nullptr};
  operand.load(p, sequence, 0, 0, LOADED, LOADED, DIM, 0, nullptr, zeros<uint16_t>(LOADED * DIM));
}
