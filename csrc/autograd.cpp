#include "autograd.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <iterator>

#include "call.h"

namespace xlnet_kernels {
namespace {

using at::IValue;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

// The schema in xlnet_kernels/ops.py: tensors, the first of which have gradients; numbers; whether there is a backward
#define ONE(type, name) +1
constexpr size_t DIFFERENTIABLE = DIFFERENTIABLE_INPUTS(ONE, ), TENSORS = DIFFERENTIABLE + OTHER_INPUTS(ONE, );
#undef ONE
const char* const NUMBER_NAMES[] = {"max_distance", "dropout_p", "scale", "deterministic"};
constexpr size_t NUMBERS = std::size(NUMBER_NAMES), ARGUMENTS = TENSORS + NUMBERS + 1;
const char* const OPERATOR = "operator";  // where the context keeps its name

OperatorHandle find(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
}

// Leaves the operator's results in place of its arguments.
void call_below_autograd(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const at::AutoDispatchBelowAutograd guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

bool requires_grad(const IValue& value) { return value.isTensor() && value.toTensor().requires_grad(); }

// Optional tensors that are missing: undefined where autograd keeps them, None for the dispatcher
Tensor to_keep(const IValue& value) { return value.isTensor() ? value.toTensor() : Tensor(); }
IValue to_pass(const Tensor& tensor) { return tensor.defined() ? IValue(tensor) : IValue(); }

struct RelAttentionFunction : torch::autograd::Function<RelAttentionFunction> {
  static constexpr bool is_traceable = true;  // by compiled autograd: backward is a call of an operator

  // Takes the arguments from the stack and leaves there what the operator gives beside `out` and `lse`. `inputs`: those
  // of the first DIFFERENTIABLE that are there, for autograd to see.
  static variable_list forward(AutogradContext* context, const OperatorHandle& op, DispatchKeySet keys, Stack* stack,
                               at::TensorList /*inputs*/) {
    const auto arguments = torch::jit::last(*stack, ARGUMENTS);
    variable_list saved;
    saved.reserve(TENSORS + 4);
    for (size_t i = 0; i < TENSORS; ++i) saved.push_back(to_keep(arguments[i]));
    for (size_t i = 0; i < NUMBERS; ++i) context->saved_data[NUMBER_NAMES[i]] = arguments[TENSORS + i];
    context->saved_data[OPERATOR] = op.schema().name();
    call_below_autograd(op, keys, stack);
    Tensor out, lse, row_max, row_sum, out_residual;
    torch::jit::pop(*stack, out, lse, row_max, row_sum, out_residual);
    saved.insert(saved.end(), {out, out_residual, row_max, row_sum});
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    torch::jit::push(*stack, row_max, row_sum, out_residual);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    for (const Tensor& gradient : gradients)
      TORCH_CHECK(!gradient.defined() || !gradient.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Batched),
                  "rel_attention: its kernels take no batch of gradients (is_grads_batched, vectorize), "
                  "backend=\"reference\" does");
    const variable_list saved = context->get_saved_variables();
    const Tensor* const states = saved.data() + TENSORS;  // out, out_residual, row_max, row_sum
    c10::List<bool> needs;
    needs.reserve(DIFFERENTIABLE);
    size_t present = 0;
    for (size_t i = 0; i < DIFFERENTIABLE; ++i)
      needs.push_back(saved[i].defined() && context->needs_input_grad(present++));
    variable_list results(3 + present);  // none for the operator, its keys and the stack
    if (!gradients[0].defined() && !gradients[1].defined()) return results;

    Stack stack;
    stack.reserve(7 + TENSORS + NUMBERS);
    stack.emplace_back(gradients[0].defined() ? gradients[0] : at::zeros_like(states[0]));
    stack.push_back(to_pass(gradients[1]));
    stack.insert(stack.end(), states, states + 4);
    stack.emplace_back(needs);
    for (size_t i = 0; i < TENSORS; ++i) stack.push_back(to_pass(saved[i]));
    for (const char* name : NUMBER_NAMES) stack.push_back(context->saved_data[name]);
    find(context->saved_data[OPERATOR].toStringRef() + "_backward").callBoxed(&stack);

    const c10::List<Tensor> found = stack.back().toTensorList();
    for (size_t i = 0, result = 3; i < DIFFERENTIABLE; ++i) {
      if (!saved[i].defined()) continue;
      if (needs[i]) results[result] = found[i];
      ++result;
    }
    return results;
  }
};

void forward(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto inputs = torch::jit::last(*stack, ARGUMENTS).slice(0, DIFFERENTIABLE);
  if (!at::GradMode::is_enabled() || std::none_of(inputs.begin(), inputs.end(), requires_grad))
    return call_below_autograd(op, keys, stack);
  variable_list present;
  for (const IValue& input : inputs)
    if (input.isTensor()) present.push_back(input.toTensor());
  variable_list outputs = RelAttentionFunction::apply(op, keys, stack, at::TensorList(present));
  stack->insert(stack->end() - 3, outputs.begin(), outputs.end());
}

// To go on as if a gradient were a constant would be silently wrong.
struct NoSecondDerivatives : torch::autograd::Function<NoSecondDerivatives> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext*, const OperatorHandle& op, DispatchKeySet keys, Stack* stack,
                               at::TensorList /*inputs*/) {
    call_below_autograd(op, keys, stack);
    return torch::jit::pop(*stack).toTensorVector();
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false, "rel_attention: its kernels have no second derivatives, backend=\"reference\" has");
  }
};

void backward(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  variable_list present;
  if (at::GradMode::is_enabled())
    for (const IValue& input : torch::jit::last(*stack, op.schema().arguments().size()))
      if (input.isTensor()) present.push_back(input.toTensor());
  if (std::none_of(present.begin(), present.end(), [](const Tensor& t) { return t.requires_grad(); }))
    return call_below_autograd(op, keys, stack);
  torch::jit::push(*stack, NoSecondDerivatives::apply(op, keys, stack, at::TensorList(present)));
}

}  // namespace

void register_autograd(const std::string& name) {
  static std::deque<torch::Library> libraries;  // for as long as the process lives
  torch::Library& library = libraries.emplace_back(torch::Library::IMPL, XLNET_KERNELS_QUOTE(XLNET_KERNELS_NAMESPACE),
                                                   c10::DispatchKey::Autograd, __FILE__, __LINE__);
  library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<forward>());
  library.impl((name + "_backward").c_str(), torch::CppFunction::makeFromBoxedFunction<backward>());
}

}  // namespace xlnet_kernels
