// A backend's forward and backward as torch's dispatcher calls them, and as csrc/fast_path does.
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <tuple>
#include <vector>

#include "../call.h"
#include "entry.h"

namespace xlnet_kernels {

using Forward = Outputs(const Inputs& inputs, bool needs_backward);
using Backward = InputGradients(const Inputs& inputs, const OutputGradients& outputs, const Needs& needs);

namespace boxed {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline xlnet_kernels::Tensor given(const Tensor& t) { return t; }
inline xlnet_kernels::OptionalTensor given(const OptionalTensor& t) {
  return t ? xlnet_kernels::OptionalTensor(*t) : std::nullopt;
}

#define PARAMETER(type, name) const type& name
#define GIVEN(type, name) given(name)
#define NAME(type, name) name
#define NUMBER(type, name) type name
#define INPUTS DIFFERENTIABLE_INPUTS(PARAMETER, COMMA), OTHER_INPUTS(PARAMETER, COMMA), NUMBERS(NUMBER, COMMA)
#define GIVEN_INPUTS DIFFERENTIABLE_INPUTS(GIVEN, COMMA), OTHER_INPUTS(GIVEN, COMMA), NUMBERS(NAME, COMMA)

template <Forward run>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(INPUTS, bool needs_backward) {
  const Outputs found = run({GIVEN_INPUTS}, needs_backward);
  return {found.out.shared(), found.lse.shared(), found.row_max.shared(), found.row_sum.shared(),
          found.out_residual.shared()};
}

inline Needs by_name(const std::vector<bool>& needs) {
  CHECK_VALUE(needs.size() == DIFFERENTIABLE, "needs must have ", DIFFERENTIABLE, " flags, got ", needs.size());
  auto next = needs.begin();
#define NEXT(type, name) *next++
  return {DIFFERENTIABLE_INPUTS(NEXT, COMMA)};
#undef NEXT
}

template <Backward run>
std::vector<Tensor> backward(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
                             const Tensor& out_residual, const Tensor& row_max, const Tensor& row_sum,
                             const std::vector<bool>& needs_in_order, INPUTS) {
  const Inputs inputs{GIVEN_INPUTS};
  const Needs needs = by_name(needs_in_order);
  std::vector<Tensor> found;
  const InputGradients gradients =
      run(inputs, {grad_out, given(grad_lse), out, out_residual, row_max, row_sum}, needs);
  for (const auto& gradient : gradients.list(inputs, needs))
    found.push_back((gradient.defined() ? gradient : empty(Sizes{0}, inputs.query.scalar_type(), inputs.query)).shared());
  return found;
}

#undef PARAMETER
#undef GIVEN
#undef NAME
#undef NUMBER
#undef INPUTS
#undef GIVEN_INPUTS

}  // namespace boxed

namespace direct {

// Takes the handles one after the other.
struct Handles {
  const AtenTensorHandle* next;

  template <typename T>
  T take() {
    const AtenTensorHandle handle = *next++;
    return handle == nullptr ? T() : T(Tensor::borrowed(handle));
  }
};

inline Inputs inputs(const AtenTensorHandle* tensors, const Numbers& numbers) {
  Handles handles{tensors};
#define TAKE(type, name) handles.take<type>()
#define NUMBER(type, name) numbers.name
  return {DIFFERENTIABLE_INPUTS(TAKE, COMMA), OTHER_INPUTS(TAKE, COMMA), NUMBERS(NUMBER, COMMA)};
#undef TAKE
#undef NUMBER
}

template <Forward run>
void forward(const AtenTensorHandle* tensors, const Numbers& numbers, bool needs_backward, AtenTensorHandle* results) {
  Outputs found = run(inputs(tensors, numbers), needs_backward);
  for (Tensor* t : {&found.out, &found.lse, &found.row_max, &found.row_sum, &found.out_residual})
    *results++ = t->release();
}

template <Backward run>
void backward(const AtenTensorHandle* saved, const Needs& needs, const AtenTensorHandle* tensors,
              const Numbers& numbers, AtenTensorHandle* results) {
  const Inputs in = inputs(tensors, numbers);
  Handles handles{saved};
  const OutputGradients outputs{handles.take<Tensor>(), handles.take<OptionalTensor>(), handles.take<Tensor>(),
                                handles.take<Tensor>(), handles.take<Tensor>(),         handles.take<Tensor>()};
  for (Tensor& gradient : run(in, outputs, needs).list(in, needs)) *results++ = gradient.release();
}

}  // namespace direct

// Registers both operators, of that name and with "_backward" behind it.
template <Forward forward, Backward backward>
void add_operators(torch::stable::detail::StableLibrary& library, const std::string& name) {
  library.impl(name.c_str(), TORCH_BOX((&boxed::forward<forward>)));
  library.impl((name + "_backward").c_str(), TORCH_BOX((&boxed::backward<backward>)));
}

}  // namespace xlnet_kernels
