// The operator on the CPU. Its schema, shapes and gradients' wiring are in xlnet_kernels/ops.py.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <thread>
#include <vector>

#include "../call.h"
#include "kernels.h"

namespace xlnet_kernels {
namespace {

void parallel_slots(int64_t slots, void (*task)(void*, int64_t), void* context) {
#ifdef _OPENMP
  at::parallel_for(0, slots, 1, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) task(context, slot);
  });
#else  // Clang brings an OpenMP runtime that is not torch's: threads of our own instead
  std::vector<std::thread> threads;
  for (int64_t slot = 1; slot < slots; ++slot) threads.emplace_back(task, context, slot);
  task(context, 0);
  for (std::thread& thread : threads) thread.join();
#endif
}

const cpu::Choice& chosen() {
  static const cpu::Choice choice = cpu::choose_kernels();
  TORCH_CHECK(choice.name != nullptr, "XLNET_KERNELS_CPU names no instruction set that this processor has");
  return choice;
}

void check_ran(bool ran) { TORCH_CHECK(ran, "rel_attention: out of memory for the CPU kernels' scratch"); }

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(INPUTS, bool needs_backward) {
  PreparedCall call = prepare({INPUT_NAMES});
  const Outputs outputs(query, needs_backward);
  outputs.give_to(call.p);
  check_ran(chosen().kernels->forward(call.p, chosen().products, at::get_num_threads(), parallel_slots));
  return outputs.list();
}

constexpr size_t SMALL = 1 << 17;  // bytes for which torch's dispatcher takes longer than the zeros

// Zeros in the work dtype for each gradient that is needed, uninitialised of the query; undefined where none is
InputGradients zero_gradients(const Inputs& inputs, const Needs& needs) {
  const auto dtype = work_dtype(inputs.query);
  const auto zeros = [&](const OptionalTensor& input, bool need, bool rows_first) {
    if (!need || !input) return Tensor();
    const Tensor t =
        rows_first ? empty_rows_first(*input, dtype) : at::empty(input->sizes(), input->options().dtype(dtype));
    if (t.nbytes() > SMALL) return t.zero_();
    if (t.nbytes() > 0) std::memset(t.data_ptr(), 0, t.nbytes());
    return t;
  };
  return {needs.query ? empty_rows_first(inputs.query, dtype) : Tensor(),
          zeros(inputs.key, needs.key, true),
          zeros(inputs.value, needs.value, true),
          zeros(inputs.rel_key, needs.rel_key, false),
          zeros(inputs.content_bias, needs.content_bias, false),
          zeros(inputs.position_bias, needs.position_bias, false),
          zeros(inputs.memory_key, needs.memory_key, true),
          zeros(inputs.memory_value, needs.memory_value, true),
          zeros(inputs.segment_embed, needs.segment_embed, false),
          zeros(inputs.segment_bias, needs.segment_bias, false)};
}

std::vector<Tensor> backward(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
                             const Tensor& out_residual, const Tensor& row_max, const Tensor& row_sum,
                             NeedsInOrder needs_in_order, INPUTS) {
  const Inputs inputs{INPUT_NAMES};
  const Needs needs = by_name(needs_in_order);
  OutputGradients{grad_out, grad_lse, out, out_residual, row_max, row_sum}.check(inputs);
  PreparedCall call = prepare(inputs);
  const auto data = [](const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; };
  call.p.out = strided(out);
  if (out_residual.numel() > 0) call.p.out_residual = strided(out_residual);
  call.p.row_max = data(call.keep(row_max.contiguous()));
  call.p.row_sum = data(call.keep(row_sum.contiguous()));
  const InputGradients grad = zero_gradients(inputs, needs);
  RelAttentionGradients g{};
  g.out = strided(call.keep(grad_out.to(query.scalar_type())));
  g.lse = grad_lse ? data(call.keep(grad_lse->to(row_max.scalar_type()).contiguous())) : nullptr;
  g.query = strided(grad.query);
  g.keys = {strided(grad.key), strided(grad.value)};
  g.memory = {strided(grad.memory_key), strided(grad.memory_value)};
  g.rel_key = strided(grad.rel_key);
  g.content_bias = data(grad.content_bias);
  g.position_bias = data(grad.position_bias);
  g.segment_embed = data(grad.segment_embed);
  g.segment_bias = data(grad.segment_bias);
  check_ran(chosen().kernels->backward(call.p, g, chosen().products, at::get_num_threads(), parallel_slots));
  return grad.list(inputs, needs);
}

constexpr int64_t SMALL_SHARE = 1 << 14;  // elements for which no other thread is worth waking

struct DropOutTask {
  cpu::Elements elements;
  Dropout dropout;
  int64_t count, share;

  static void run(void* context, int64_t slot) {
    const auto& task = *static_cast<const DropOutTask*>(context);
    const int64_t begin = slot * task.share, end = std::min(begin + task.share, task.count);
    chosen().kernels->drop_out(task.elements, task.dropout, begin, end);
  }
};

// xlnet_kernels/dropout.py
Tensor drop_out(const Tensor& input, const Tensor& state, double p) {
  const auto dtype = input.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16, "drop_out takes float32 or bfloat16, got ", dtype);
  TORCH_CHECK_VALUE(p > 0 && p < 1, "drop_out: p must be in (0, 1), got ", p);
  TORCH_CHECK_VALUE(state.scalar_type() == at::kLong && state.sizes() == at::IntArrayRef{2} && state.is_contiguous(),
                    "drop_out: state must be two int64");
  const Tensor from = input.contiguous(), to = at::empty_like(from, at::MemoryFormat::Contiguous);
  const int64_t count = from.numel();
  const int64_t slots = std::min<int64_t>(at::get_num_threads(), (count + SMALL_SHARE - 1) / SMALL_SHARE);
  DropOutTask task{{dtype == at::kFloat ? DType::float32 : DType::bfloat16, from.const_data_ptr(), to.data_ptr()},
                   {p, state.const_data_ptr<int64_t>()},
                   count,
                   slots == 0 ? 0 : (count / slots / 256 + 1) * 256};
  if (slots > 0) parallel_slots(slots, DropOutTask::run, &task);
  return to;
}

}  // namespace

}  // namespace xlnet_kernels

TORCH_LIBRARY_IMPL(XLNET_KERNELS_NAMESPACE, CPU, m) {
  m.impl("rel_attention", xlnet_kernels::forward);
  m.impl("rel_attention_backward", xlnet_kernels::backward);
  m.impl("drop_out", xlnet_kernels::drop_out);
}
