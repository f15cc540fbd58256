// The operator's tensors, and the argument struct that compiled backends take in their place.
#pragma once

#include <optional>
#include <vector>

#include "inputs.h"
#include "rel_attention.h"
#include "stable/tensor.h"

namespace xlnet_kernels {

struct Inputs {
  DIFFERENTIABLE_INPUTS(FIELD, )
  OTHER_INPUTS(FIELD, )
  NUMBERS(FIELD, )
};

// The gradients by name; undefined where there is none. `list` has them in order and in the dtype of their inputs,
// undefined what is not needed.
struct InputGradients {
#define GRADIENT(type, name) Tensor name;
  DIFFERENTIABLE_INPUTS(GRADIENT, )
#undef GRADIENT

  std::vector<Tensor> list(const Inputs& inputs, const Needs& needs) const;
};

// Results of forward: the output, the natural log-sum-exp, and tensors for backward (xlnet_kernels/ops.py).
struct Outputs {
  Tensor out, lse, row_max, row_sum, out_residual;

  // Uninitialised; out and out_residual hold `like`'s head_dim, (B, H, L, D) laid out as projections want it.
  Outputs(const Tensor& like, bool needs_backward);
  // Lets the kernels write to them.
  void give_to(RelAttention& p) const;
};

// Arguments of backward beside the inputs. `check` raises ValueError unless all fit the inputs.
struct OutputGradients {
  Tensor grad_out;
  OptionalTensor grad_lse;
  Tensor out, out_residual, row_max, row_sum;

  void check(const Inputs& inputs) const;
};

// The call as the kernels take it, and the tensors that its pointers need alive.
struct PreparedCall {
  RelAttention p{};
  std::vector<Tensor> kept;

  Tensor keep(Tensor t);
};

// Raises ValueError for what would lead the kernels out of their tensors; users' mistakes are explained in
// xlnet_kernels/functional.py. Values of query_positions and query_order are looked at on the CPU alone: elsewhere that
// would wait for the device, and kernels have to bear any.
PreparedCall prepare(const Inputs& inputs);

// The dtype that kernels compute in
ScalarType work_dtype(const Tensor& t);

Tensor4 strided(const Tensor& t);

// (B, H, rows, D) whose memory is laid out (B, rows, H, D), as projections before and after want it
Tensor empty_rows_first(const Tensor& like, ScalarType dtype);

}  // namespace xlnet_kernels
