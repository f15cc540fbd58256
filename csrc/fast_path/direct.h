// Calls of the operator past torch's dispatcher, which takes longer than a small kernel.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <vector>

#include "../stable/entry.h"

namespace xlnet_kernels {

// Arguments of an operator; undefined tensors: missing
struct Arguments {
  std::array<at::Tensor, TENSORS> tensors;
  Numbers numbers;
};

using Results = std::array<at::Tensor, RESULTS>;  // out, lse, row_max, row_sum, out_residual

// Tells where the `Entries` of the library of kernels are, before the first call.
void use(int64_t entries);

// On the CPU or a GPU, and no transform, mode or view of torch's has put more into it than autograd.
bool is_plain(const at::Tensor& t);

// The operator for the device of plain tensors. Null where the dispatcher must take part: in a mode or under a profiler,
// or where there is no such library.
const Entry* find_entry(const at::Tensor& query);

// Below autograd. `tensors`: pointers, null for what is missing
Results forward(const Entry& entry, const at::Tensor* const* tensors, const Numbers& numbers, bool needs_backward);
// `saved`: as `Entry` has it, undefined for null; undefined results where no gradient is wanted
std::vector<at::Tensor> backward(const Entry& entry, const std::array<at::Tensor, SAVED>& saved, const Needs& needs,
                                 const Arguments& arguments);

}  // namespace xlnet_kernels
