// The operator on CUDA tensors: tensors -> argument structs -> kernels.

#include <ATen/Context.h>
#include <torch/library.h>
#include <torch/version.h>
#include <torch_device.h>

#include <algorithm>
#include <array>
#include <string>

#include "../call.h"
#include "finish.h"
#include "kernels.h"

namespace xlnet_kernels::cuda {
namespace {

constexpr int64_t SLOT_BYTES = int64_t(1) << 30;  // what copies of gradients may take in deterministic mode

// Kernels read 16 bytes at a time: rows dense, every row's start aligned, width a multiple of 16 bytes; and from row to
// row is a step that fits into 32 bits.
Tensor aligned(const Tensor& t) {
  const int64_t size = t.element_size(), chunk = 16 / size, width = t.size(-1);
  const auto strides = t.strides();
  const bool fits = width % chunk == 0 && t.stride(-1) == 1 && reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0 &&
                    t.stride(-2) <= INT32_MAX &&
                    std::all_of(strides.begin(), strides.end() - 1, [&](int64_t s) { return s % chunk == 0; });
  if (fits) return t;
  return at::constant_pad_nd(t.contiguous(), {0, (chunk - width % chunk) % chunk});
}
OptionalTensor aligned(const OptionalTensor& t) { return t ? OptionalTensor(aligned(*t)) : t; }
Inputs aligned(Inputs inputs) {
#define ALIGN(type, name) inputs.name = aligned(inputs.name);
  DIFFERENTIABLE_INPUTS(ALIGN, )
#undef ALIGN
  return inputs;
}

// Whether torch may use TF32 in products. Where a user has set the newer of torch's two interfaces, asking the older
// one raises an error.
bool allows_tf32() {
  const auto& context = at::globalContext();
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
  return context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32;
#elif TORCH_VERSION_MINOR == 9
  return context.float32Precision("cuda", "matmul") == "tf32";
#else
  return context.allowTF32CuBLAS();
#endif
}

// The operator's inputs as the kernels take them; the tensors live as long as this.
struct DeviceCall {
  const Inputs inputs;  // aligned
  std::vector<Tensor> kept;
  Call call{};

  explicit DeviceCall(const Inputs& given) : inputs(aligned(given)) {
    PreparedCall prepared = prepare(inputs);
    call.p = prepared.p;
    kept = std::move(prepared.kept);
    call.tf32 = inputs.query.scalar_type() == at::kFloat && allows_tf32();
    call.shared_rel_key = inputs.rel_key.dim() == 3;
    const RelAttention& p = call.p;
    const int64_t keys = p.mem_len + p.key_len;
    if (p.content_bias) call.workspace.key_bias = floats({p.batch, p.heads, keys});
    call.rel_bias_rows = p.rel_len + 2 * REL_MARGIN;
    call.workspace.rel_bias = floats({call.shared_rel_key ? 1 : p.batch, p.heads, call.rel_bias_rows}) + REL_MARGIN;
    if (p.rank_mask.query_rank) {
      call.workspace.key_bounds = structs<KeyBounds>(p.batch * ((keys + BOUNDS_TILE - 1) / BOUNDS_TILE));
      call.workspace.row_bounds = structs<RowBounds>(p.batch * ((p.length + BOUNDS_TILE - 1) / BOUNDS_TILE));
    }
  }

  Tensor keep(Tensor t) {
    kept.push_back(t);
    return t;
  }
  float* floats(at::IntArrayRef shape) {
    return keep(at::empty(shape, inputs.query.options().dtype(at::kFloat))).data_ptr<float>();
  }
  template <typename Struct>
  Struct* structs(int64_t count) {
    const Tensor words = keep(at::empty({count * int64_t(sizeof(Struct) / 4)}, inputs.query.options().dtype(at::kInt)));
    return reinterpret_cast<Struct*>(words.data_ptr());
  }
};

void check_ran(const std::string& error) { TORCH_CHECK(error.empty(), error); }

// `padded`'s first columns, (B, H, rows, D), laid out as projections want them
Tensor narrowed(const Tensor& padded, const Tensor& like) {
  if (padded.size(-1) == like.size(-1) && padded.scalar_type() == like.scalar_type()) return padded;
  Tensor result = empty_rows_first(like, like.scalar_type());
  result.copy_(padded.narrow(-1, 0, like.size(-1)));
  return result;
}

bool is_empty(const Inputs& in) {
  return in.query.numel() == 0 || in.key.size(2) + (in.memory_key ? in.memory_key->size(2) : 0) == 0;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> rel_attention(INPUTS, bool needs_backward) {
  const DeviceGuard guard(query.device());
  const Inputs inputs{INPUT_NAMES};
  if (is_empty(inputs)) {
    const Outputs outputs(query, needs_backward);
    for (const Tensor& zeros : {outputs.out, outputs.out_residual, outputs.row_max, outputs.row_sum}) zeros.zero_();
    outputs.lse.fill_(-INFINITY);
    return outputs.list();
  }
  DeviceCall device(inputs);
  Outputs outputs(device.inputs.query, needs_backward);
  outputs.give_to(device.call.p);
  check_ran(cuda::forward(device.call, current_stream()));
  outputs.out = narrowed(outputs.out, query);
  if (outputs.out_residual.numel() > 0) outputs.out_residual = narrowed(outputs.out_residual, query);
  return outputs.list();
}

// Where nothing is attended to
InputGradients zero_gradients(const Inputs& inputs) {
  const auto zeros = [](const OptionalTensor& t) { return t ? at::zeros(t->sizes(), t->options()) : Tensor(); };
  const auto rows = [](const OptionalTensor& t) {
    return t ? empty_rows_first(*t, t->scalar_type()).zero_() : Tensor();
  };
  return {rows(inputs.query),        rows(inputs.key),           rows(inputs.value),
          zeros(inputs.rel_key),     zeros(inputs.content_bias), zeros(inputs.position_bias),
          rows(inputs.memory_key),   rows(inputs.memory_value),  zeros(inputs.segment_embed),
          zeros(inputs.segment_bias)};
}

// How many blocks, each with copies of its own, may add to the same gradient
int64_t slots_of(const DeviceCall& device) {
  if (!device.inputs.deterministic) return 1;
  const Call& call = device.call;
  const int64_t groups = call.shared_rel_key ? call.p.heads : call.p.batch * call.p.heads;
  const int64_t bytes = 4 * (device.inputs.query.numel() + device.inputs.rel_key.numel());
  const int64_t at_once = (2 * processors() + groups - 1) / groups;
  return std::max<int64_t>(1, std::min({backward_items(call), at_once, SLOT_BYTES / bytes}));
}

InputGradients gradients(const Inputs& in, const OutputGradients& from, const Needs& needs) {
  from.check(in);
  DeviceCall device(in);
  Call& call = device.call;
  const RelAttention& p = call.p;
  const Inputs& aligned_in = device.inputs;
  const auto dtype = in.query.scalar_type();
  call.p.out = strided(device.keep(aligned(from.out)));
  if (from.out_residual.numel() > 0) call.p.out_residual = strided(device.keep(aligned(from.out_residual)));
  call.p.row_max = device.keep(from.row_max.contiguous()).data_ptr();
  call.p.row_sum = device.keep(from.row_sum.contiguous()).data_ptr();

  Gradients g{};
  Sums sums;
  sums.fully_masked = from.row_sum.eq(0);
  g.out = strided(device.keep(aligned(from.grad_out.to(dtype))));
  if (from.grad_lse) {
    sums.grad_lse = from.grad_lse->to(at::kFloat).masked_fill(sums.fully_masked, 0).contiguous();
    g.lse = sums.grad_lse.data_ptr<float>();
  }
  g.row_values = device.floats({ROW_VALUES, p.batch, p.heads, p.length});
  g.key_sum = device.floats({p.batch, p.heads, p.mem_len + p.key_len});
  sums.key = device.kept.back();
  g.deterministic = in.deterministic;
  g.slots = int(slots_of(device));
  const auto zeros = [&](at::IntArrayRef shape) {
    std::vector<int64_t> slots{g.slots};
    slots.insert(slots.end(), shape.begin(), shape.end());
    return at::zeros(slots, in.query.options().dtype(at::kFloat));
  };
  sums.query = zeros({p.batch, p.heads, p.length, p.head_dim});
  sums.different = zeros({p.batch, p.heads, p.length});
  if (needs.rel_key) {
    const auto shape = aligned_in.rel_key.sizes();
    sums.rel_key = zeros(shape);
    if (in.position_bias) sums.rel = zeros(shape.slice(0, shape.size() - 1));
  }
  const auto data = [](const Tensor& t) { return t.defined() ? t.data_ptr<float>() : nullptr; };
  g.query = data(sums.query);
  g.rel_key = data(sums.rel_key);
  g.rel_sum = data(sums.rel);
  g.different = data(sums.different);
  const Tensor grad_key = empty_rows_first(aligned_in.key, dtype),
               grad_value = empty_rows_first(aligned_in.value, dtype);
  g.key = strided(grad_key);
  g.value = strided(grad_value);
  Tensor grad_memory_key, grad_memory_value;
  if (in.memory_key) {
    grad_memory_key = empty_rows_first(*aligned_in.memory_key, dtype);
    grad_memory_value = empty_rows_first(*aligned_in.memory_value, dtype);
    g.memory_key = strided(grad_memory_key);
    g.memory_value = strided(grad_memory_value);
  }
  check_ran(cuda::backward(call, g, current_stream()));

  InputGradients grad;
  grad.key = narrowed(grad_key, in.key);
  grad.value = narrowed(grad_value, in.value);
  if (in.memory_key) {
    grad.memory_key = narrowed(grad_memory_key, *in.memory_key);
    grad.memory_value = narrowed(grad_memory_value, *in.memory_value);
  }
  finish(in, needs, sums, grad);
  return grad;
}

std::vector<Tensor> rel_attention_backward(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
                                           const Tensor& out_residual, const Tensor& row_max, const Tensor& row_sum,
                                           NeedsInOrder needs_in_order, INPUTS) {
  const DeviceGuard guard(query.device());
  // Where autocast is on, it would round the products of `finish`.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Inputs inputs{INPUT_NAMES};
  const Needs needs = by_name(needs_in_order);
  const OutputGradients from{grad_out, grad_lse, out, out_residual, row_max, row_sum};
  const InputGradients grad = is_empty(inputs) ? zero_gradients(inputs) : gradients(inputs, from, needs);
  return grad.list(inputs, needs);
}

}  // namespace
}  // namespace xlnet_kernels::cuda

TORCH_LIBRARY_IMPL(XLNET_KERNELS_NAMESPACE, XLNET_KERNELS_DISPATCH_KEY, m) {
  m.impl(XLNET_KERNELS_OPERATOR, xlnet_kernels::cuda::rel_attention);
  m.impl(XLNET_KERNELS_OPERATOR "_backward", xlnet_kernels::cuda::rel_attention_backward);
}
