// The operator on the CPU. Its schema, shapes and gradients' wiring are in xlnet_kernels/ops.py.

#include "../stable/operator.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace xlnet_kernels::cpu {
namespace {

int64_t thread_count() {
  uint32_t count;
  CHECK(torch_get_num_threads(&count) == TORCH_SUCCESS, "rel_attention: torch does not tell its number of threads");
  return count;
}

void parallel_slots(int64_t slots, void (*task)(void*, int64_t), void* context) {
  const std::pair run(task, context);
  const auto some = [](int64_t begin, int64_t end, void* given) {
    const auto [task, context] = *static_cast<decltype(run)*>(given);
    for (int64_t slot = begin; slot < end; ++slot) task(context, slot);
  };
  const auto code = torch_parallel_for(0, slots, 1, some, const_cast<void*>(static_cast<const void*>(&run)));
  CHECK(code == TORCH_SUCCESS, "rel_attention: torch cannot run the kernel's threads");
}

const Choice& chosen() {
  static const Choice choice = choose_kernels();
  CHECK(choice.name != nullptr, "XLNET_KERNELS_CPU names no instruction set that this processor has");
  return choice;
}

void check_ran(bool ran) { CHECK(ran, "rel_attention: out of memory for the CPU kernels' scratch"); }

PreparedCall prepare_on_cpu(const Inputs& inputs) {
  PreparedCall call = prepare(inputs);
  if (inputs.query.scalar_type() == FLOAT32 && inputs.float32_precision != IEEE)
    call.p.operand_parts = inputs.float32_precision == BF16 ? 1 : 2;
  return call;
}

Outputs forward(const Inputs& inputs, bool needs_backward) {
  PreparedCall call = prepare_on_cpu(inputs);
  Outputs outputs(inputs.query, needs_backward);
  outputs.give_to(call.p);
  check_ran(chosen().kernels->forward(call.p, chosen().products, thread_count(), parallel_slots));
  return outputs;
}

constexpr int64_t SMALL = 1 << 17;  // bytes for which torch's dispatcher takes longer than the zeros

// Each gradient that is needed, in the work dtype, undefined where none is: zeros, but uninitialised where the kernels
// write each row, which they do if there are query rows.
InputGradients empty_gradients(const Inputs& inputs, const Needs& needs) {
  const auto dtype = work_dtype(inputs.query);
  const auto zeros = [&](const Tensor& t) {
    if (t.nbytes() > SMALL) return t.zero_();
    if (t.nbytes() > 0) std::memset(t.data_ptr(), 0, static_cast<size_t>(t.nbytes()));
    return t;
  };
  const auto summed = [&](const OptionalTensor& input, bool need) {
    return need && input ? zeros(empty(input->sizes(), dtype, *input)) : Tensor();
  };
  const auto written = [&](const OptionalTensor& input, bool need) {
    if (!need || !input) return Tensor();
    const Tensor t = empty_rows_first(*input, dtype);
    return inputs.query.size(2) == 0 ? zeros(t) : t;
  };
  return {written(inputs.query, needs.query),
          written(inputs.key, needs.key),
          written(inputs.value, needs.value),
          summed(inputs.rel_key, needs.rel_key),
          summed(inputs.content_bias, needs.content_bias),
          summed(inputs.position_bias, needs.position_bias),
          written(inputs.memory_key, needs.memory_key),
          written(inputs.memory_value, needs.memory_value),
          summed(inputs.segment_embed, needs.segment_embed),
          summed(inputs.segment_bias, needs.segment_bias)};
}

InputGradients backward(const Inputs& inputs, const OutputGradients& outputs, const Needs& needs) {
  outputs.check(inputs);
  PreparedCall call = prepare_on_cpu(inputs);
  call.p.out = strided(outputs.out);
  if (outputs.out_residual.numel() > 0) call.p.out_residual = strided(outputs.out_residual);
  call.p.row_max = call.keep(outputs.row_max.contiguous()).data_ptr();
  call.p.row_sum = call.keep(outputs.row_sum.contiguous()).data_ptr();
  InputGradients grad = empty_gradients(inputs, needs);
  RelAttentionGradients g{};
  g.out = strided(call.keep(outputs.grad_out.to(inputs.query.scalar_type())));
  if (outputs.grad_lse) g.lse = call.keep(outputs.grad_lse->to(outputs.row_max.scalar_type()).contiguous()).data_ptr();
  g.query = strided(grad.query);
  g.keys = {strided(grad.key), strided(grad.value)};
  g.memory = {strided(grad.memory_key), strided(grad.memory_value)};
  g.rel_key = strided(grad.rel_key);
  g.content_bias = grad.content_bias.data_ptr();
  g.position_bias = grad.position_bias.data_ptr();
  g.segment_embed = grad.segment_embed.data_ptr();
  g.segment_bias = grad.segment_bias.data_ptr();
  check_ran(chosen().kernels->backward(call.p, g, chosen().products, thread_count(), parallel_slots));
  return grad;
}

constexpr int64_t SMALL_SHARE = 1 << 14;  // elements for which no other thread is worth waking

struct DropOutTask {
  Elements elements;
  Dropout dropout;
  int64_t count, share;

  static void run(void* context, int64_t slot) {
    const auto& task = *static_cast<const DropOutTask*>(context);
    const int64_t begin = slot * task.share, end = std::min(begin + task.share, task.count);
    chosen().kernels->drop_out(task.elements, task.dropout, begin, end);
  }
};

// xlnet_kernels/dropout.py
torch::stable::Tensor drop_out(const torch::stable::Tensor& input, const torch::stable::Tensor& given_state, double p) {
  const Tensor from = Tensor(input).contiguous(), state(given_state);
  const auto dtype = from.scalar_type();
  CHECK_VALUE(dtype == FLOAT32 || dtype == BFLOAT16, "drop_out takes float32 or bfloat16, got ", Named{dtype});
  CHECK_VALUE(p > 0 && p < 1, "drop_out: p must be in (0, 1), got ", p);
  CHECK_VALUE(state.scalar_type() == INT64 && state.sizes().equals({2}) && state.is_contiguous(),
              "drop_out: state must be two int64");
  const Tensor to = empty(from.sizes(), dtype, from);
  const int64_t count = from.numel();
  const int64_t slots = std::min(thread_count(), (count + SMALL_SHARE - 1) / SMALL_SHARE);
  DropOutTask task{{dtype == FLOAT32 ? DType::float32 : DType::bfloat16, from.data_ptr(), to.data_ptr()},
                   {p, state.data_ptr<int64_t>()},
                   count,
                   slots == 0 ? 0 : (count / slots / 256 + 1) * 256};
  if (slots > 0) parallel_slots(slots, DropOutTask::run, &task);
  return to.shared();
}

}  // namespace

Entry entry() { return {direct::forward<forward>, direct::backward<backward>}; }

}  // namespace xlnet_kernels::cpu

STABLE_TORCH_LIBRARY_IMPL(XLNET_KERNELS_NAMESPACE, CPU, library) {
  xlnet_kernels::add_operators<xlnet_kernels::cpu::forward, xlnet_kernels::cpu::backward>(library, "rel_attention");
  library.impl("drop_out", TORCH_BOX(&xlnet_kernels::cpu::drop_out));
}
