// The operator's tensors, and the argument struct that compiled backends take in their place.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "rel_attention.h"

// The operators' namespace in torch.ops, as in xlnet_kernels/_ops.py. A build that is loaded beside others has its own.
#ifndef XLNET_KERNELS_NAMESPACE
#define XLNET_KERNELS_NAMESPACE xlnet_kernels
#endif
#define XLNET_KERNELS_QUOTE_(name) #name
#define XLNET_KERNELS_QUOTE(name) XLNET_KERNELS_QUOTE_(name)

namespace xlnet_kernels {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The arguments of the schema in xlnet_kernels/ops.py, in its order: what has a gradient, then the other tensors.
#define DIFFERENTIABLE_INPUTS(_, SEPARATOR)                                  \
  _(Tensor, query) SEPARATOR _(Tensor, key)                                  \
  SEPARATOR _(Tensor, value)                                                 \
  SEPARATOR _(Tensor, rel_key)                                               \
  SEPARATOR                                                                  \
  _(OptionalTensor, content_bias) SEPARATOR _(OptionalTensor, position_bias) \
  SEPARATOR                                                                  \
  _(OptionalTensor, memory_key) SEPARATOR _(OptionalTensor, memory_value)    \
  SEPARATOR                                                                  \
  _(OptionalTensor, segment_embed) SEPARATOR _(OptionalTensor, segment_bias)
#define OTHER_INPUTS(_, SEPARATOR)                                      \
  _(OptionalTensor, query_ids) SEPARATOR _(OptionalTensor, key_ids)     \
  SEPARATOR                                                             \
  _(OptionalTensor, query_rank) SEPARATOR _(OptionalTensor, key_rank)   \
  SEPARATOR                                                             \
  _(OptionalTensor, query_floor) SEPARATOR _(OptionalTensor, sees_self) \
  SEPARATOR                                                             \
  _(OptionalTensor, mask) SEPARATOR _(OptionalTensor, query_positions)  \
  SEPARATOR                                                             \
  _(OptionalTensor, query_order) SEPARATOR _(OptionalTensor, dropout_state)

#define COMMA ,
#define FIELD(type, name) type name;
#define PARAMETER(type, name) const type& name
#define NAME(type, name) name
// A backend's parameters, and what makes its Inputs of them
#define INPUTS                                                                                                     \
  DIFFERENTIABLE_INPUTS(PARAMETER, COMMA), OTHER_INPUTS(PARAMETER, COMMA), int64_t max_distance, double dropout_p, \
      double scale, bool deterministic
#define INPUT_NAMES \
  DIFFERENTIABLE_INPUTS(NAME, COMMA), OTHER_INPUTS(NAME, COMMA), max_distance, dropout_p, scale, deterministic

struct Inputs {
  DIFFERENTIABLE_INPUTS(FIELD, )
  OTHER_INPUTS(FIELD, )
  int64_t max_distance;
  double dropout_p, scale;
  bool deterministic;
};

// Which gradients are asked for, as autograd says it
struct Needs {
#define NEED(type, name) bool name;
  DIFFERENTIABLE_INPUTS(NEED, )
#undef NEED
};
using NeedsInOrder = std::array<bool, 10>;
Needs by_name(const NeedsInOrder& needs);

// The gradients by name; undefined where there is none. `list` makes of them what the operator returns: empty tensors
// for what is not needed or not there, all others in the dtype of its input.
struct InputGradients {
#define GRADIENT(type, name) Tensor name;
  DIFFERENTIABLE_INPUTS(GRADIENT, )
#undef GRADIENT

  std::vector<Tensor> list(const Inputs& inputs, const Needs& needs) const;
};

// What forward gives: the output, the natural log-sum-exp, and what backward needs (xlnet_kernels/ops.py).
struct Outputs {
  Tensor out, lse, row_max, row_sum, out_residual;

  // Uninitialised; out and out_residual hold `like`'s head_dim, (B, H, L, D) laid out as projections want it.
  Outputs(const Tensor& like, bool needs_backward);
  // Lets the kernels write to them.
  void give_to(RelAttention& p) const;
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> list() const { return {out, lse, row_max, row_sum, out_residual}; }
};

// What backward takes beside the inputs. `check` raises ValueError unless all fits the inputs.
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
// xlnet_kernels/functional.py. Values of query_positions and query_order are looked at on the CPU alone: elsewhere that would wait for
// the device, and kernels have to bear any.
PreparedCall prepare(const Inputs& inputs);

// The dtype that kernels compute in
at::ScalarType work_dtype(const Tensor& t);

Tensor4 strided(const Tensor& t);

// (B, H, rows, D) whose memory is laid out (B, rows, H, D), as projections before and after want it
Tensor empty_rows_first(const Tensor& like, at::ScalarType dtype);

}  // namespace xlnet_kernels
