// The operator on CUDA tensors: tensors -> argument structs -> kernels, and the sums that backward leaves to torch.

#include <torch/library.h>
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

// The operator's inputs as the kernels take them; the tensors live as long as this.
struct Prepared {
  Tensor query, key, value, rel_key;
  OptionalTensor content_bias, position_bias, memory_key, memory_value, segment_embed, segment_bias;
  std::vector<Tensor> kept;
  Call call{};

  explicit Prepared(const Inputs& in)
      : query(aligned(in.query)),
        key(aligned(in.key)),
        value(aligned(in.value)),
        rel_key(aligned(in.rel_key)),
        content_bias(aligned(in.content_bias)),
        position_bias(aligned(in.position_bias)),
        memory_key(aligned(in.memory_key)),
        memory_value(aligned(in.memory_value)),
        segment_embed(aligned(in.segment_embed)),
        segment_bias(aligned(in.segment_bias)) {
    xlnet_kernels::Prepared prepared = prepare({query,
                                                key,
                                                value,
                                                rel_key,
                                                content_bias,
                                                position_bias,
                                                memory_key,
                                                memory_value,
                                                segment_embed,
                                                segment_bias,
                                                in.query_ids,
                                                in.key_ids,
                                                in.query_rank,
                                                in.key_rank,
                                                in.query_floor,
                                                in.sees_self,
                                                in.mask,
                                                in.query_positions,
                                                in.dropout_state,
                                                in.max_distance,
                                                in.dropout_p,
                                                in.scale});
    call.p = prepared.p;
    kept = std::move(prepared.kept);
    call.tf32 = allows_tf32();
    call.shared_rel_key = rel_key.dim() == 3;
    const RelAttention& p = call.p;
    const int64_t keys = p.mem_len + p.key_len;
    if (content_bias) call.workspace.key_bias = floats({p.batch, p.heads, keys});
    call.rel_bias_rows = p.max_distance + p.key_len + REL_MARGIN;
    call.workspace.rel_bias = floats({call.shared_rel_key ? 1 : p.batch, p.heads, call.rel_bias_rows});
    if (p.query_rank) {
      call.workspace.key_labels = structs<KeyLabels>(p.batch * ((keys + LABEL_TILE - 1) / LABEL_TILE));
      call.workspace.row_labels = structs<RowLabels>(p.batch * ((p.length + LABEL_TILE - 1) / LABEL_TILE));
    }
  }

  Tensor keep(Tensor t) {
    kept.push_back(t);
    return t;
  }
  float* floats(at::IntArrayRef shape) {
    return keep(at::empty(shape, query.options().dtype(at::kFloat))).data_ptr<float>();
  }
  template <typename Struct>
  Struct* structs(int64_t count) {
    const Tensor words = keep(at::empty({count * int64_t(sizeof(Struct) / 4)}, query.options().dtype(at::kInt)));
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

std::tuple<Tensor, Tensor> rel_attention(INPUTS) {
  const DeviceGuard guard(query.device());
  Tensor lse = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  if (query.numel() == 0 || key.size(2) + (memory_key ? memory_key->size(2) : 0) == 0)
    return {empty_rows_first(query, query.scalar_type()).zero_(), lse.fill_(-INFINITY)};
  Prepared prepared({INPUT_NAMES});
  Call& call = prepared.call;
  Tensor out = empty_rows_first(prepared.query, query.scalar_type());
  call.p.out = strided(out);
  call.p.lse = lse.data_ptr();
  check_ran(cuda::forward(call, current_stream()));
  return {narrowed(out, query), lse};
}

// (H, D): the sum over batch and rows of weights (B, H, rows) times rows (B, H, rows, D)
Tensor weighted_sum(const Tensor& weights, const Tensor& rows) {
  return at::matmul(weights.unsqueeze(2), rows.to(at::kFloat)).squeeze(2).sum(0);
}

std::vector<Tensor> rel_attention_backward(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
                                           const Tensor& lse, std::array<bool, 10> needs, INPUTS) {
  const DeviceGuard guard(query.device());
  // Where autocast is on, it would round the products below.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const std::array<OptionalTensor, 10> inputs{query,         key,        value,        rel_key,       content_bias,
                                              position_bias, memory_key, memory_value, segment_embed, segment_bias};
  std::array<Tensor, 10> gradients;
  if (query.numel() == 0 || key.size(2) + (memory_key ? memory_key->size(2) : 0) == 0) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i]) continue;
      const bool rows_first = inputs[i]->dim() == 4 && i != 3;
      gradients[i] = rows_first ? empty_rows_first(*inputs[i], query.scalar_type()).zero_()
                                : at::zeros(inputs[i]->sizes(), inputs[i]->options());
    }
  } else {
    check("grad_out", grad_out, query.sizes(), grad_out.scalar_type(), query);
    check("out", out, query.sizes(), query.scalar_type(), query);
    check("lse", lse, query.sizes().slice(0, 3), at::kFloat, query);
    if (grad_lse) check("grad_lse", *grad_lse, lse.sizes(), grad_lse->scalar_type(), query);
    Prepared prepared({INPUT_NAMES});
    Call& call = prepared.call;
    const RelAttention& p = call.p;
    const Tensor kept_lse = lse.contiguous(), kept_out = aligned(out), kept_grad = aligned(grad_out.to(out.dtype()));
    call.p.out = strided(kept_out);
    call.p.lse = kept_lse.data_ptr();

    Gradients g{};
    g.out = strided(kept_grad);
    const Tensor kept_grad_lse =  // of rows that see something
        grad_lse ? grad_lse->to(at::kFloat).masked_fill(lse.isneginf(), 0).contiguous() : Tensor();
    g.lse = grad_lse ? kept_grad_lse.data_ptr<float>() : nullptr;
    g.row_values = prepared.floats({ROW_VALUES, p.batch, p.heads, p.length});
    g.key_sum = prepared.floats({p.batch, p.heads, p.mem_len + p.key_len});
    const Tensor key_sum = prepared.kept.back();

    const int64_t groups = call.shared_rel_key ? p.heads : p.batch * p.heads, items = backward_items(call);
    g.deterministic = deterministic;
    int64_t copies = 1;
    if (deterministic) {
      const int64_t bytes = 4 * (prepared.query.numel() + prepared.rel_key.numel());
      const int64_t at_once = (2 * processors() + groups - 1) / groups;
      copies = std::max<int64_t>(1, std::min({items, at_once, SLOT_BYTES / bytes}));
    }
    g.slots = int(copies);
    const auto zeros = [&](std::vector<int64_t> shape) {
      shape.insert(shape.begin(), copies);
      return at::zeros(shape, query.options().dtype(at::kFloat));
    };
    const Tensor grad_query = zeros({p.batch, p.heads, p.length, p.width});
    const Tensor grad_rel = needs[3] ? zeros(prepared.rel_key.sizes().vec()) : Tensor();
    const Tensor rel_sums = needs[3] && position_bias
                                ? zeros(prepared.rel_key.sizes().slice(0, prepared.rel_key.dim() - 1).vec())
                                : Tensor();
    const Tensor different_sums = zeros({p.batch, p.heads, p.length});
    g.query = grad_query.data_ptr<float>();
    g.rel_key = needs[3] ? grad_rel.data_ptr<float>() : nullptr;
    g.rel_sum = rel_sums.defined() ? rel_sums.data_ptr<float>() : nullptr;
    g.different = different_sums.data_ptr<float>();
    const Tensor grad_key = empty_rows_first(prepared.key, query.scalar_type());
    const Tensor grad_value = empty_rows_first(prepared.value, query.scalar_type());
    g.key = strided(grad_key);
    g.value = strided(grad_value);
    Tensor grad_memory_key, grad_memory_value;
    if (memory_key) {
      grad_memory_key = empty_rows_first(*prepared.memory_key, query.scalar_type());
      grad_memory_value = empty_rows_first(*prepared.memory_value, query.scalar_type());
      g.memory_key = strided(grad_memory_key);
      g.memory_value = strided(grad_memory_value);
    }
    check_ran(cuda::backward(call, g, current_stream()));
    if (memory_key) {
      gradients[6] = narrowed(grad_memory_key, *memory_key);
      gradients[7] = narrowed(grad_memory_value, *memory_value);
    }
    gradients[1] = narrowed(grad_key, key);
    gradients[2] = narrowed(grad_value, value);

    const auto columns = [&](const Tensor& t) { return t.narrow(-1, 0, query.size(-1)); };
    Tensor rows = columns(grad_query.sum(0));
    if (needs[3]) {
      Tensor sum = columns(grad_rel.sum(0));
      if (rel_sums.defined())
        sum = sum.addcmul(rel_sums.sum(0).unsqueeze(-1), position_bias->to(at::kFloat).unsqueeze(1));
      gradients[3] = sum.to(rel_key.dtype()).contiguous();
    }
    if (needs[4] || needs[5]) {
      gradients[4] = weighted_sum(key_sum.narrow(-1, p.mem_len, p.key_len), key);
      if (p.mem_len) gradients[4] = gradients[4] + weighted_sum(key_sum.narrow(-1, 0, p.mem_len), *memory_key);
      // rows' gradient is that of the content term and that of the position term
      gradients[5] = rows.sum(at::IntArrayRef{0, 2}) - gradients[4];
    }
    if (segment_embed) {
      const Tensor different = different_sums.sum(0);
      // softmax's gradients add up to zero, but for what comes through the log-sum-exp
      const Tensor same = grad_lse ? kept_grad_lse * scale - different : -different;
      const Tensor embed = segment_embed->to(at::kFloat);
      const auto spread = [&](const Tensor& weights, int kind) {
        return weights.unsqueeze(-1) * embed[kind].unsqueeze(1);
      };
      const Tensor segment_rows = spread(same, 0) + spread(different, 1);
      rows = rows + segment_rows;
      gradients[9] = segment_rows.sum(at::IntArrayRef{0, 2});
      gradients[8] = at::stack({weighted_sum(same, query), weighted_sum(different, query)});
      if (segment_bias) {
        const Tensor bias = segment_bias->to(at::kFloat);
        const Tensor totals = at::stack({same.sum(at::IntArrayRef{0, 2}), different.sum(at::IntArrayRef{0, 2})});
        gradients[8] = gradients[8] + totals.unsqueeze(-1) * bias;
      }
    }
    gradients[0] = empty_rows_first(query, query.scalar_type()).copy_(rows);
  }
  std::vector<Tensor> found;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool wanted = needs[i] && inputs[i].has_value();
    found.push_back(wanted ? gradients[i].to(query.scalar_type()) : at::empty({0}, query.options()));
  }
  return found;
}

}  // namespace
}  // namespace xlnet_kernels::cuda

TORCH_LIBRARY_IMPL(xlnet_kernels, XLNET_KERNELS_DISPATCH_KEY, m) {
  m.impl(XLNET_KERNELS_OPERATOR, xlnet_kernels::cuda::rel_attention);
  m.impl(XLNET_KERNELS_OPERATOR "_backward", xlnet_kernels::cuda::rel_attention_backward);
}
