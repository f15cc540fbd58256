// The sums over rows that backward leaves to torch, and the gradients that are made of them.
#pragma once

#include "../call.h"

namespace xlnet_kernels::cuda {

// In float32, and not scaled. `slots`: copies to be added up, as Gradients has them.
struct Sums {
  Tensor query, rel_key, rel, different;  // (slots, ...)
  Tensor key;                             // (B, H, M + K)
  Tensor grad_lse;                        // (B, H, L) or undefined
  Tensor fully_masked;                    // (B, H, L), bool
};

// Adds to `grad` what is made of sums: all but the gradients of keys and values.
void finish(const Inputs& in, const Needs& needs, const Sums& sums, InputGradients& grad);

}  // namespace xlnet_kernels::cuda
