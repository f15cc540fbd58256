// The operator on CUDA tensors: tensors -> argument structs -> kernels, and the sums that backward leaves to torch.

#include <ATen/Context.h>
#include <torch/library.h>
#include <torch/version.h>
#include <torch_device.h>

#include <algorithm>
#include <array>
#include <string>

#include "../call.h"
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
    call.rel_bias_rows = p.rel_key.max_distance + p.key_len + REL_MARGIN;
    call.workspace.rel_bias = floats({call.shared_rel_key ? 1 : p.batch, p.heads, call.rel_bias_rows});
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

// `padded`'s first `width` columns, (B, H, rows, D), laid out as projections want them
Tensor narrowed(const Tensor& padded, const Tensor& like) {
  if (padded.size(-1) == like.size(-1) && padded.scalar_type() == like.scalar_type()) return padded;
  Tensor result = empty_rows_first(like, like.scalar_type());
  result.copy_(padded.narrow(-1, 0, like.size(-1)));
  return result;
}

bool is_empty(const Inputs& in) {
  return in.query.numel() == 0 || in.key.size(2) + (in.memory_key ? in.memory_key->size(2) : 0) == 0;
}

std::tuple<Tensor, Tensor> rel_attention(INPUTS) {
  const DeviceGuard guard(query.device());
  const Inputs inputs{INPUT_NAMES};
  Tensor lse = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  if (is_empty(inputs)) return {empty_rows_first(query, query.scalar_type()).zero_(), lse.fill_(-INFINITY)};
  DeviceCall device(inputs);
  Call& call = device.call;
  Tensor out = empty_rows_first(device.inputs.query, query.scalar_type());
  call.p.out = strided(out);
  call.p.lse = lse.data_ptr();
  check_ran(cuda::forward(call, current_stream()));
  return {narrowed(out, query), lse};
}

// (H, D): the sum over batch and rows of weights (B, H, rows) times rows (B, H, rows, D)
Tensor weighted_sum(const Tensor& weights, const Tensor& rows) {
  return at::matmul(weights.unsqueeze(2), rows.to(at::kFloat)).squeeze(2).sum(0);
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

// What the kernels leave to torch: sums over rows, in float32
struct Sums {
  Tensor query, rel_key, rel, different;  // (slots, ...), as Gradients has them
  Tensor key;                             // (B, H, M + K)
  Tensor grad_lse;                        // (B, H, L) or undefined
};

void add_segment_gradients(const Inputs& in, const Sums& sums, Tensor& rows, InputGradients& grad) {
  const Tensor different = sums.different.sum(0);
  // softmax's gradients add up to zero, but for what comes through the log-sum-exp
  const Tensor same = sums.grad_lse.defined() ? sums.grad_lse * in.scale - different : -different;
  const Tensor embed = in.segment_embed->to(at::kFloat);
  const auto spread = [&](const Tensor& weights, int kind) { return weights.unsqueeze(-1) * embed[kind].unsqueeze(1); };
  const Tensor segment_rows = spread(same, 0) + spread(different, 1);
  rows = rows + segment_rows;
  grad.segment_bias = segment_rows.sum(at::IntArrayRef{0, 2});
  grad.segment_embed = at::stack({weighted_sum(same, in.query), weighted_sum(different, in.query)});
  if (in.segment_bias) {
    const Tensor totals = at::stack({same.sum(at::IntArrayRef{0, 2}), different.sum(at::IntArrayRef{0, 2})});
    grad.segment_embed = grad.segment_embed + totals.unsqueeze(-1) * in.segment_bias->to(at::kFloat);
  }
}

void finish(const Inputs& in, const Needs& needs, const Sums& sums, int64_t mem_len, InputGradients& grad) {
  const auto columns = [&](const Tensor& t) { return t.narrow(-1, 0, in.query.size(-1)); };
  Tensor rows = columns(sums.query.sum(0));
  if (needs.rel_key) {
    Tensor sum = columns(sums.rel_key.sum(0));
    if (sums.rel.defined())
      sum = sum.addcmul(sums.rel.sum(0).unsqueeze(-1), in.position_bias->to(at::kFloat).unsqueeze(1));
    grad.rel_key = sum.to(in.rel_key.dtype()).contiguous();
  }
  if (needs.content_bias || needs.position_bias) {
    grad.content_bias = weighted_sum(sums.key.narrow(-1, mem_len, in.key.size(2)), in.key);
    if (mem_len) grad.content_bias = grad.content_bias + weighted_sum(sums.key.narrow(-1, 0, mem_len), *in.memory_key);
    // rows' gradient is that of the content term and that of the position term
    grad.position_bias = rows.sum(at::IntArrayRef{0, 2}) - grad.content_bias;
  }
  if (in.segment_embed) add_segment_gradients(in, sums, rows, grad);
  grad.query = empty_rows_first(in.query, in.query.scalar_type()).copy_(rows);
}

InputGradients gradients(const Inputs& in, const OutputGradients& from, const Needs& needs) {
  from.check(in);
  DeviceCall device(in);
  Call& call = device.call;
  const RelAttention& p = call.p;
  const Inputs& aligned_in = device.inputs;
  const auto dtype = in.query.scalar_type();
  call.p.out = strided(device.keep(aligned(from.out)));
  call.p.lse = device.keep(from.lse.contiguous()).data_ptr();

  Gradients g{};
  Sums sums;
  g.out = strided(device.keep(aligned(from.grad_out.to(dtype))));
  if (from.grad_lse) {  // of rows that see something
    sums.grad_lse = from.grad_lse->to(at::kFloat).masked_fill(from.lse.isneginf(), 0).contiguous();
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
  finish(in, needs, sums, p.mem_len, grad);
  return grad;
}

std::vector<Tensor> rel_attention_backward(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
                                           const Tensor& lse, NeedsInOrder needs_in_order, INPUTS) {
  const DeviceGuard guard(query.device());
  // Where autocast is on, it would round the products of `finish`.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Inputs inputs{INPUT_NAMES};
  const Needs needs = by_name(needs_in_order);
  const InputGradients grad =
      is_empty(inputs) ? zero_gradients(inputs) : gradients(inputs, {grad_out, grad_lse, out, lse}, needs);
  return grad.list(inputs, needs);
}

}  // namespace
}  // namespace xlnet_kernels::cuda

TORCH_LIBRARY_IMPL(xlnet_kernels, XLNET_KERNELS_DISPATCH_KEY, m) {
  m.impl(XLNET_KERNELS_OPERATOR, xlnet_kernels::cuda::rel_attention);
  m.impl(XLNET_KERNELS_OPERATOR "_backward", xlnet_kernels::cuda::rel_attention_backward);
}
