#include "autograd.h"

#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <deque>
#include <stdexcept>

#include "../inputs.h"

namespace xlnet_kernels {
namespace {

using at::IValue;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

using at::Tensor;

const char* const REL_ATTENTION = XLNET_KERNELS_QUOTE(XLNET_KERNELS_NAMESPACE) "::rel_attention";
const char* const OPERATOR = "operator";  // where the context keeps its name
// The schema in xlnet_kernels/ops.py: tensors, the first of which have gradients; numbers; whether there is a backward
constexpr size_t ARGUMENTS = TENSORS NUMBERS(ONE, ) + 1;

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

int64_t to_number(const IValue& value, int64_t) { return value.toInt(); }
double to_number(const IValue& value, double) { return value.toDouble(); }
bool to_number(const IValue& value, bool) { return value.toBool(); }

// The numbers as the dispatcher has them: a compiler's may be symbols
struct NumberValues {
#define VALUE(type, name) IValue name;
  NUMBERS(VALUE, )
#undef VALUE
};

// One call of an operator, for autograd
struct Run {
  const std::string& name;
  const std::array<Tensor, TENSORS>& tensors;
  const NumberValues& numbers;
  c10::function_ref<Results()> run;  // below autograd
  Results results{};

  // The given ones of the first DIFFERENTIABLE tensors, for autograd
  variable_list present() const {
    variable_list found;
    for (size_t i = 0; i < DIFFERENTIABLE; ++i)
      if (tensors[i].defined()) found.push_back(tensors[i]);
    return found;
  }
};

struct RelAttentionFunction : torch::autograd::Function<RelAttentionFunction> {
  static constexpr bool is_traceable = true;  // by compiled autograd: backward is a call of an operator

  static variable_list forward(AutogradContext* context, Run* call, at::TensorList /*inputs*/) {
    variable_list saved;
    saved.reserve(TENSORS + 4);
    saved.assign(call->tensors.begin(), call->tensors.end());
#define SAVE(type, name) context->saved_data[#name] = call->numbers.name;
    NUMBERS(SAVE, )
#undef SAVE
    context->saved_data[OPERATOR] = call->name;
    const auto& [out, lse, row_max, row_sum, out_residual] = call->results = call->run();
    saved.insert(saved.end(), {out, out_residual, row_max, row_sum});
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    for (const Tensor& gradient : gradients)
      TORCH_CHECK(!gradient.defined() || !gradient.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Batched),
                  "rel_attention: its kernels take no batch of gradients (is_grads_batched, vectorize), "
                  "backend=\"reference\" does");
    const variable_list saved = context->get_saved_variables();
    const Tensor* const states = saved.data() + TENSORS;  // out, out_residual, row_max, row_sum
    std::array<Tensor, TENSORS> tensors;
    std::copy_n(saved.begin(), TENSORS, tensors.begin());
    NumberValues numbers;
#define LOAD(type, name) numbers.name = context->saved_data[#name];
    NUMBERS(LOAD, )
#undef LOAD
    std::array<bool, DIFFERENTIABLE> needs;
    size_t present = 0;
    for (size_t i = 0; i < DIFFERENTIABLE; ++i)
      needs[i] = saved[i].defined() && context->needs_input_grad(present++);
    variable_list results(1 + present);  // none for the call
    if (!gradients[0].defined() && !gradients[1].defined()) return results;

    const Tensor grad_out = gradients[0].defined() ? gradients[0] : at::zeros_like(states[0]);
    const std::array<Tensor, SAVED> outputs{grad_out, gradients[1], states[0], states[1], states[2], states[3]};
    std::vector<Tensor> found;
    try {
      found = backward_of(context->saved_data[OPERATOR].toStringRef(), outputs, needs, tensors, numbers);
    } catch (const std::invalid_argument& error) {
      // Because Tensor.backward makes a ValueError of c10::ValueError alone
      TORCH_CHECK_VALUE(false, error.what());
    }
    for (size_t i = 0, result = 1; i < DIFFERENTIABLE; ++i) {
      if (!saved[i].defined()) continue;
      if (needs[i]) results[result] = found[i];
      ++result;
    }
    return results;
  }

 private:
  static std::vector<Tensor> backward_of(const std::string& name, const std::array<Tensor, SAVED>& outputs,
                                         const std::array<bool, DIFFERENTIABLE>& needs,
                                         const std::array<Tensor, TENSORS>& tensors, const NumberValues& numbers) {
    const auto is_plain_or_none = [](const Tensor& t) { return !t.defined() || is_plain(t); };
    const bool is_direct = name == REL_ATTENTION && !at::GradMode::is_enabled() &&
                           std::all_of(outputs.begin(), outputs.end(), is_plain_or_none) &&
                           std::all_of(tensors.begin(), tensors.end(), is_plain_or_none);
    if (const Entry* entry = is_direct ? find_entry(tensors[0]) : nullptr) {
      size_t i = 0;
#define NEED(type, name) needs[i++]
#define NUMBER(type, name) to_number(numbers.name, type{})
      return xlnet_kernels::backward(*entry, outputs, {DIFFERENTIABLE_INPUTS(NEED, COMMA)},
                                     {tensors, {NUMBERS(NUMBER, COMMA)}});
#undef NUMBER
#undef NEED
    }
    Stack stack;
    stack.reserve(SAVED + 1 + ARGUMENTS);
    for (size_t i = 0; i < SAVED; ++i) stack.push_back(to_pass(outputs[i]));
    stack.emplace_back(c10::List<bool>(c10::ArrayRef<bool>(needs.data(), needs.size())));
    for (const Tensor& tensor : tensors) stack.push_back(to_pass(tensor));
#define PASS(type, name) stack.push_back(numbers.name);
    NUMBERS(PASS, )
#undef PASS
    find(name + "_backward").callBoxed(&stack);
    return stack.back().toTensorVector();
  }
};

void forward(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto given = torch::jit::last(*stack, ARGUMENTS);
  const auto inputs = given.slice(0, DIFFERENTIABLE);
  if (!at::GradMode::is_enabled() || std::none_of(inputs.begin(), inputs.end(), requires_grad))
    return call_below_autograd(op, keys, stack);
  std::array<Tensor, TENSORS> tensors;
  std::transform(given.begin(), given.begin() + TENSORS, tensors.begin(), to_keep);
  size_t i = TENSORS;
#define TAKE(type, name) given[i++]
  const NumberValues numbers{NUMBERS(TAKE, COMMA)};
#undef TAKE
  const auto run = [&] {
    call_below_autograd(op, keys, stack);
    Results found;
    torch::jit::pop(*stack, found[0], found[1], found[2], found[3], found[4]);
    return found;
  };
  Run call{op.schema().name(), tensors, numbers, run};
  const variable_list outputs = RelAttentionFunction::apply(&call, at::TensorList(call.present()));
  torch::jit::push(*stack, outputs[0], outputs[1], call.results[2], call.results[3], call.results[4]);
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

std::pair<Tensor, Tensor> attend_with_gradients(const Entry& entry, const Arguments& arguments) {
  static const std::string name = REL_ATTENTION;
  const auto run = [&] {
    std::array<const Tensor*, TENSORS> tensors;
    std::transform(arguments.tensors.begin(), arguments.tensors.end(), tensors.begin(),
                   [](const Tensor& t) { return &t; });
    return xlnet_kernels::forward(entry, tensors.data(), arguments.numbers, true);
  };
#define VALUE(type, name) IValue(arguments.numbers.name)
  const NumberValues numbers{NUMBERS(VALUE, COMMA)};
#undef VALUE
  Run call{name, arguments.tensors, numbers, run};
  variable_list outputs = RelAttentionFunction::apply(&call, at::TensorList(call.present()));
  return {std::move(outputs[0]), std::move(outputs[1])};
}

}  // namespace xlnet_kernels
