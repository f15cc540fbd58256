// Tensors -> argument struct -> CPU kernels. The operator's schema, shapes and gradients' wiring are in
// xlnet_kernels/ops.py. Users' mistakes are explained in xlnet_kernels/functional.py; what is checked here keeps the
// kernels inside their tensors when a graph calls the operator directly.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <thread>
#include <vector>

#include "cpu/kernels.h"
#include "rel_attention.h"

namespace xlnet_kernels {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor4 strided(const Tensor& t) {
  if (!t.defined()) return {};
  Tensor4 result{t.data_ptr(), {0, 0, 0, 0}};
  const int64_t missing = 4 - t.dim();
  for (int64_t d = 0; d < t.dim(); ++d) result.stride[missing + d] = t.stride(d);
  return result;
}

DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return DType::float32;
    case at::kDouble:
      return DType::float64;
    case at::kBFloat16:
      return DType::bfloat16;
    case at::kHalf:
      return DType::float16;
    default:
      TORCH_CHECK(false, "query must be float16, bfloat16, float32 or float64, got ", t.scalar_type());
  }
}

at::ScalarType work_type(const Tensor& t) { return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// (B, H, rows, D) whose memory is laid out (B, rows, H, D), as projections before and after want it
Tensor empty_rows_first(const Tensor& like, at::ScalarType dtype) {
  return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options().dtype(dtype))
      .transpose(1, 2);
}

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

// The call as the kernels take it, and the tensors that its pointers need alive
struct Call {
  RelAttention p{};
  std::vector<Tensor> kept;

  Tensor keep(Tensor t) {
    kept.push_back(t);
    return t;
  }
  const int32_t* ints(const OptionalTensor& t) {
    return t ? keep(t->to(at::kInt).contiguous()).data_ptr<int32_t>() : nullptr;
  }
  const void* small(const OptionalTensor& t) { return t ? keep(t->contiguous()).data_ptr() : nullptr; }
};

struct Inputs {
  const Tensor &query, &key, &value, &rel_key;
  const OptionalTensor &content_bias, &position_bias, &memory_key, &memory_value, &segment_embed, &segment_bias,
      &query_ids, &key_ids, &query_rank, &key_rank, &query_floor, &sees_self, &mask, &query_positions, &dropout_state;
  int64_t max_distance;
  double dropout_p, scale;
};

void check(const char* name, const OptionalTensor& t, at::IntArrayRef shape, at::ScalarType dtype) {
  if (!t) return;
  TORCH_CHECK_VALUE(t->sizes() == shape && t->scalar_type() == dtype && t->device().is_cpu(), name, " must be a CPU ",
                    dtype, " tensor of shape ", shape, ", got ", t->scalar_type(), " of shape ", t->sizes());
}

void check_pair(const char* names, const OptionalTensor& a, const OptionalTensor& b) {
  TORCH_CHECK_VALUE(a.has_value() == b.has_value(), names, " must come together");
}

void check_inputs(const Inputs& in) {
  TORCH_CHECK_VALUE(in.query.dim() == 4 && in.key.dim() == 4, "query and key must have 4 dimensions");
  const int64_t B = in.query.size(0), H = in.query.size(1), L = in.query.size(2), D = in.query.size(3);
  const int64_t K = in.key.size(2), M = in.memory_key && in.memory_key->dim() == 4 ? in.memory_key->size(2) : 0;
  const auto dtype = in.query.scalar_type();
  check("key", in.key, {B, H, K, D}, dtype);
  check("value", in.value, {B, H, K, D}, dtype);
  check_pair("memory_key and memory_value", in.memory_key, in.memory_value);
  check("memory_key", in.memory_key, {B, H, M, D}, dtype);
  check("memory_value", in.memory_value, {B, H, M, D}, dtype);
  const int64_t P = in.rel_key.dim() < 3 ? 0 : in.rel_key.size(-2);
  check("rel_key", in.rel_key, in.rel_key.dim() == 4 ? std::vector<int64_t>{B, H, P, D} : std::vector<int64_t>{H, P, D},
        dtype);
  TORCH_CHECK_VALUE(in.max_distance >= M + K - 1, "max_distance must be at least M + K - 1, got ", in.max_distance);
  TORCH_CHECK_VALUE(in.query_positions || L <= K, "query has more rows than key and no query_positions");
  for (const auto& [name, bias] : {std::pair{"content_bias", &in.content_bias},
                                   {"position_bias", &in.position_bias},
                                   {"segment_bias", &in.segment_bias}})
    check(name, *bias, {H, D}, dtype);
  check("segment_embed", in.segment_embed, {2, H, D}, dtype);
  check_pair("query_ids and key_ids", in.query_ids, in.key_ids);
  check_pair("query_ids and segment_embed", in.query_ids, in.segment_embed);
  check_pair("query_rank and key_rank", in.query_rank, in.key_rank);
  const auto check_integers = [&](const char* name, const OptionalTensor& t, int64_t count) {
    if (t) check(name, t, {B, count}, at::isIntegralType(t->scalar_type(), false) ? t->scalar_type() : at::kInt);
  };
  check_integers("query_ids", in.query_ids, L);
  check_integers("key_ids", in.key_ids, M + K);
  check_integers("query_rank", in.query_rank, L);
  check_integers("key_rank", in.key_rank, M + K);
  check_integers("query_floor", in.query_floor, L);
  check_integers("query_positions", in.query_positions, L);
  check("sees_self", in.sees_self, {B, L}, at::kBool);
  if (in.mask) check("mask", in.mask->expand({B, H, L, M + K}), {B, H, L, M + K}, at::kBool);
  TORCH_CHECK_VALUE(in.dropout_p >= 0 && in.dropout_p < 1, "dropout_p must be in [0, 1), got ", in.dropout_p);
  TORCH_CHECK_VALUE(in.dropout_p == 0 || in.dropout_state, "dropout_state must be given with dropout_p");
  check("dropout_state", in.dropout_state, {2}, at::kLong);
}

Call prepare(const Inputs& in) {
  check_inputs(in);
  Call call;
  RelAttention& p = call.p;
  p.dtype = dtype_of(in.query);
  p.batch = in.query.size(0);
  p.heads = in.query.size(1);
  p.length = in.query.size(2);
  p.width = in.query.size(3);
  p.key_len = in.key.size(2);
  p.mem_len = in.memory_key ? in.memory_key->size(2) : 0;
  p.rel_rows = in.rel_key.size(-2);
  p.max_distance = in.max_distance;
  p.scale = in.scale;
  p.query = strided(in.query);
  p.key = strided(in.key);
  p.value = strided(in.value);
  p.rel_key = strided(in.rel_key);
  if (in.memory_key) {
    p.memory_key = strided(*in.memory_key);
    p.memory_value = strided(*in.memory_value);
  }
  p.content_bias = call.small(in.content_bias);
  p.position_bias = call.small(in.position_bias);
  p.segment_embed = call.small(in.segment_embed);
  p.segment_bias = call.small(in.segment_bias);
  p.query_ids = call.ints(in.query_ids);
  p.key_ids = call.ints(in.key_ids);
  p.query_rank = call.ints(in.query_rank);
  p.key_rank = call.ints(in.key_rank);
  p.query_floor = call.ints(in.query_floor);
  p.sees_self = static_cast<const bool*>(call.small(in.sees_self));
  if (in.mask) p.mask = strided(call.keep(in.mask->expand({p.batch, p.heads, p.length, p.mem_len + p.key_len})));
  if (in.query_positions && p.length > 0 && p.batch > 0) {
    const auto [low, high] = in.query_positions->aminmax();
    TORCH_CHECK_VALUE(low.item<int64_t>() >= 0 && high.item<int64_t>() < p.key_len, "query_positions must lie in [0, ",
                      p.key_len, "), got values from ", low.item<int64_t>(), " to ", high.item<int64_t>());
    const auto [positions, order] = in.query_positions->sort(/*stable=*/true, /*dim=*/1, /*descending=*/false);
    p.row_position = call.ints(positions);
    p.row_order = call.ints(order);
  }
  p.dropout_p = in.dropout_p;
  if (in.dropout_p > 0) {
    const int64_t* state = call.keep(in.dropout_state->contiguous()).data_ptr<int64_t>();
    p.seed = static_cast<uint64_t>(state[0]);
    p.offset = static_cast<uint64_t>(state[1]);
    const double threshold = in.dropout_p * 4294967296.0;
    p.dropout_threshold = threshold >= 4294967295.0 ? 4294967295u : static_cast<uint32_t>(threshold);
  }
  return call;
}

void check_ran(bool ran) { TORCH_CHECK(ran, "rel_attention: out of memory for the CPU kernels' scratch"); }

// Every argument of the schema in xlnet_kernels/ops.py after the gradients
#define INPUTS                                                                                                     \
  const Tensor &query, const Tensor &key, const Tensor &value, const Tensor &rel_key,                              \
      const OptionalTensor &content_bias, const OptionalTensor &position_bias, const OptionalTensor &memory_key,   \
      const OptionalTensor &memory_value, const OptionalTensor &segment_embed, const OptionalTensor &segment_bias, \
      const OptionalTensor &query_ids, const OptionalTensor &key_ids, const OptionalTensor &query_rank,            \
      const OptionalTensor &key_rank, const OptionalTensor &query_floor, const OptionalTensor &sees_self,          \
      const OptionalTensor &mask, const OptionalTensor &query_positions, const OptionalTensor &dropout_state,      \
      int64_t max_distance, double dropout_p, double scale, bool /*deterministic: always*/
#define INPUT_NAMES                                                                                               \
  query, key, value, rel_key, content_bias, position_bias, memory_key, memory_value, segment_embed, segment_bias, \
      query_ids, key_ids, query_rank, key_rank, query_floor, sees_self, mask, query_positions, dropout_state,     \
      max_distance, dropout_p, scale

std::tuple<Tensor, Tensor> forward(INPUTS) {
  Call call = prepare({INPUT_NAMES});
  Tensor out = empty_rows_first(query, query.scalar_type());
  Tensor lse = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(work_type(query)));
  call.p.out = strided(out);
  call.p.lse = lse.data_ptr();
  check_ran(kernels().forward(call.p, at::get_num_threads(), parallel_slots));
  return {out, lse};
}

std::vector<Tensor> backward(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
                             const Tensor& lse, std::array<bool, 10> needs, INPUTS) {
  Call call = prepare({INPUT_NAMES});
  check("grad_out", grad_out, query.sizes(), grad_out.scalar_type());
  check("out", out, query.sizes(), query.scalar_type());
  check("lse", lse, query.sizes().slice(0, 3), work_type(query));
  if (grad_lse) check("grad_lse", grad_lse, lse.sizes(), grad_lse->scalar_type());
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
