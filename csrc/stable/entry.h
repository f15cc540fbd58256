// Entries of the library of kernels for csrc/fast_path, to avoid torch's dispatcher, which takes longer than a small
// kernel. Both are compiled from the same sources.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "../inputs.h"

namespace xlnet_kernels {

constexpr int RESULTS = 5, SAVED = 6;

// The operator for one type of device. `tensors`: TENSORS handles, null for what is missing. Results are new references.
// Raises what the operator does.
struct Entry {
  // `results`: out, lse, row_max, row_sum and out_residual
  void (*forward)(const AtenTensorHandle* tensors, const Numbers& numbers, bool needs_backward,
                  AtenTensorHandle* results);
  // `saved`: the gradients of out and lse (may be null), out, out_residual, row_max, row_sum. `results`: DIFFERENTIABLE
  // gradients, null where none is wanted.
  void (*backward)(const AtenTensorHandle* saved, const Needs& needs, const AtenTensorHandle* tensors,
                   const Numbers& numbers, AtenTensorHandle* results);
};

struct Entries {
  Entry cpu, cuda;  // null: the library has none
};

namespace cpu {
Entry entry();
}
namespace cuda {
Entry entry();
}

}  // namespace xlnet_kernels
