// The operator on the CPU. Its schema, shapes and gradients' wiring are in xlnet_kernels/ops.py.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <array>
#include <thread>
#include <vector>

#include "call.h"
#include "cpu/kernels.h"

namespace xlnet_kernels {
namespace {

at::ScalarType work_type(const Tensor& t) { return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

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

const cpu::Kernels& kernels() {
  static const cpu::Kernels* chosen = cpu::choose_kernels();
  TORCH_CHECK(chosen != nullptr, "XLNET_KERNELS_CPU names no instruction set that this processor has");
  return *chosen;
}

void check_ran(bool ran) { TORCH_CHECK(ran, "rel_attention: out of memory for the CPU kernels' scratch"); }

std::tuple<Tensor, Tensor> forward(INPUTS) {
  Prepared call = prepare({INPUT_NAMES});
  Tensor out = empty_rows_first(query, query.scalar_type());
  Tensor lse = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(work_type(query)));
  call.p.out = strided(out);
  call.p.lse = lse.data_ptr();
  check_ran(kernels().forward(call.p, at::get_num_threads(), parallel_slots));
  return {out, lse};
}

std::vector<Tensor> backward(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
                             const Tensor& lse, std::array<bool, 10> needs, INPUTS) {
  Prepared call = prepare({INPUT_NAMES});
  check("grad_out", grad_out, query.sizes(), grad_out.scalar_type(), query);
  check("out", out, query.sizes(), query.scalar_type(), query);
  check("lse", lse, query.sizes().slice(0, 3), work_type(query), query);
  if (grad_lse) check("grad_lse", grad_lse, lse.sizes(), grad_lse->scalar_type(), query);
  const Tensor kept_lse = lse.contiguous();
  call.p.out = strided(out);
  call.p.lse = kept_lse.data_ptr();
  RelAttentionGradients g{};
  const Tensor grad = call.keep(grad_out.to(query.scalar_type()));
  g.out = strided(grad);
  g.lse = grad_lse ? call.keep(grad_lse->to(lse.scalar_type()).contiguous()).data_ptr() : nullptr;

  const auto work = work_type(query);
  const std::array<OptionalTensor, 10> inputs{query,         key,        value,        rel_key,       content_bias,
                                              position_bias, memory_key, memory_value, segment_embed, segment_bias};
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool wanted = needs[i] && inputs[i].has_value();
    const bool rows_first = i <= 2 || i == 6 || i == 7;  // query, key, value and the memory's
    if (!wanted) {
      gradients.push_back(at::empty({0}, query.options().dtype(work)));
    } else if (rows_first) {
      gradients.push_back(empty_rows_first(*inputs[i], work).zero_());
    } else {
      gradients.push_back(at::zeros(inputs[i]->sizes(), query.options().dtype(work)));
    }
  }
  const auto rows = [&](size_t i) { return gradients[i].dim() == 1 ? Tensor4{} : strided(gradients[i]); };
  const auto flat = [&](size_t i) { return gradients[i].dim() == 1 ? nullptr : gradients[i].data_ptr(); };
  g.query = rows(0);
  g.key = rows(1);
  g.value = rows(2);
  g.rel_key = rows(3);
  g.content_bias = flat(4);
  g.position_bias = flat(5);
  g.memory_key = rows(6);
  g.memory_value = rows(7);
  g.segment_embed = flat(8);
  g.segment_bias = flat(9);
  check_ran(kernels().backward(call.p, g, at::get_num_threads(), parallel_slots));
  for (Tensor& gradient : gradients) gradient = gradient.to(query.scalar_type());
  return gradients;
}

}  // namespace

}  // namespace xlnet_kernels

TORCH_LIBRARY_IMPL(xlnet_kernels, CPU, m) {
  m.impl("rel_attention", xlnet_kernels::forward);
  m.impl("rel_attention_backward", xlnet_kernels::backward);
}
