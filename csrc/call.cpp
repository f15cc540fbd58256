#include "call.h"

#include <algorithm>
#include <utility>

// Whether values of positions are looked at; elsewhere that would wait for the device. A build of a GPU's kernels for
// the host has none of it, as there.
#ifndef XLNET_KERNELS_LOOKS_AT_VALUES
#define XLNET_KERNELS_LOOKS_AT_VALUES in.query.is_cpu()
#endif

namespace xlnet_kernels {

Tensor PreparedCall::keep(Tensor t) {
  kept.push_back(t);
  return t;
}

Tensor4 strided(const Tensor& t) {
  if (!t.defined()) return {};
  Tensor4 result{t.data_ptr(), {0, 0, 0, 0}};
  const int64_t missing = 4 - t.dim();
  for (int64_t d = 0; d < t.dim(); ++d) result.stride[missing + d] = t.stride(d);
  return result;
}

Tensor empty_rows_first(const Tensor& like, ScalarType dtype) {
  const auto at_least_1 = [&](int64_t dim) { return std::max<int64_t>(like.size(dim), 1); };
  const int64_t row = at_least_1(1) * at_least_1(3);
  return empty_strided(like.sizes(), {at_least_1(2) * row, at_least_1(3), row, 1}, dtype, like);
}

ScalarType work_dtype(const Tensor& t) { return t.scalar_type() == FLOAT64 ? FLOAT64 : FLOAT32; }

namespace {

// Raises ValueError unless `t` is missing or has this shape and dtype, on the device of `like`.
void check(const char* name, const OptionalTensor& t, Sizes shape, ScalarType dtype, const Tensor& like) {
  if (!t) return;
  CHECK_VALUE(t->sizes().equals(shape) && t->scalar_type() == dtype && t->device() == like.device(), name,
              " must be a ", like.device(), " ", Named{dtype}, " tensor of shape ", shape, ", got ", t->device(), " ",
              Named{t->scalar_type()}, " of shape ", t->sizes());
}

bool is_integer(ScalarType dtype) {
  return dtype == INT32 || dtype == INT64 || dtype == INT16 || dtype == INT8 || dtype == UINT8;
}

DType dtype_of(const Tensor& t) {
  const ScalarType found = t.scalar_type();
  if (found == FLOAT32) return DType::float32;
  if (found == FLOAT64) return DType::float64;
  if (found == BFLOAT16) return DType::bfloat16;
  CHECK(found == FLOAT16, "query must be float16, bfloat16, float32 or float64, got ", Named{found});
  return DType::float16;
}

void check_pair(const char* names, const OptionalTensor& a, const OptionalTensor& b) {
  CHECK_VALUE(a.has_value() == b.has_value(), names, " must come together");
}

// The mask as (B, H, L, M + K), sizes of 1 repeated; Raises ValueError where it has another shape.
Tensor4 expanded(const Tensor& mask, Sizes shape) {
  bool fits = mask.dim() <= 4 && mask.scalar_type() == BOOL;
  Tensor4 result = strided(mask);
  for (int64_t d = 1; fits && d <= mask.dim(); ++d) {
    const int64_t size = mask.size(-d);
    fits = size == 1 || size == shape.data()[4 - d];
    if (size == 1) result.stride[4 - d] = 0;
  }
  CHECK_VALUE(fits, "mask must be a Bool tensor that expands to shape ", shape, ", got ", Named{mask.scalar_type()},
              " of shape ", mask.sizes());
  return result;
}

void check_inputs(const Inputs& in) {
  CHECK_VALUE(in.query.dim() == 4 && in.key.dim() == 4, "query and key must have 4 dimensions");
  const int64_t B = in.query.size(0), H = in.query.size(1), L = in.query.size(2), D = in.query.size(3);
  const int64_t K = in.key.size(2), M = in.memory_key && in.memory_key->dim() == 4 ? in.memory_key->size(2) : 0;
  const auto dtype = in.query.scalar_type();
  const auto check = [&](const char* name, const OptionalTensor& t, Sizes shape, ScalarType wanted) {
    xlnet_kernels::check(name, t, shape, wanted, in.query);
  };
  check("key", in.key, {B, H, K, D}, dtype);
  check("value", in.value, {B, H, K, D}, dtype);
  check_pair("memory_key and memory_value", in.memory_key, in.memory_value);
  check("memory_key", in.memory_key, {B, H, M, D}, dtype);
  check("memory_value", in.memory_value, {B, H, M, D}, dtype);
  const int64_t P = in.rel_key.dim() < 3 ? 0 : in.rel_key.size(-2);
  check("rel_key", in.rel_key, in.rel_key.dim() == 4 ? std::vector<int64_t>{B, H, P, D} : std::vector<int64_t>{H, P, D},
        dtype);
  constexpr int64_t LIMIT = int64_t(1) << 30;  // GPU kernels count rows in 32 bits
  CHECK_VALUE(in.max_distance < LIMIT && in.max_distance > -LIMIT, "max_distance must be below 2^30, got ",
                    in.max_distance);
  CHECK_VALUE(in.query_positions || L <= K, "query has more rows than key and no query_positions");
  for (const auto& [name, bias] : {std::pair{"content_bias", &in.content_bias},
                                   {"position_bias", &in.position_bias},
                                   {"segment_bias", &in.segment_bias}})
    check(name, *bias, {H, D}, dtype);
  check("segment_embed", in.segment_embed, {2, H, D}, dtype);
  check_pair("query_ids and key_ids", in.query_ids, in.key_ids);
  check_pair("query_ids and segment_embed", in.query_ids, in.segment_embed);
  CHECK_VALUE(!in.segment_bias || in.segment_embed, "segment_bias must come with segment_embed");
  check_pair("query_rank and key_rank", in.query_rank, in.key_rank);
  const auto check_integers = [&](const char* name, const OptionalTensor& t, int64_t count) {
    if (t) check(name, t, {B, count}, is_integer(t->scalar_type()) ? t->scalar_type() : INT32);
  };
  check_integers("query_ids", in.query_ids, L);
  check_integers("key_ids", in.key_ids, M + K);
  check_integers("query_rank", in.query_rank, L);
  check_integers("key_rank", in.key_rank, M + K);
  check_integers("query_floor", in.query_floor, L);
  check_integers("query_positions", in.query_positions, L);
  check_integers("query_order", in.query_order, L);
  CHECK_VALUE(!in.query_order || in.query_positions, "query_order must come with query_positions");
  check("sees_self", in.sees_self, {B, L}, BOOL);
  CHECK_VALUE(in.dropout_p >= 0 && in.dropout_p < 1, "dropout_p must be in [0, 1), got ", in.dropout_p);
  CHECK_VALUE(in.dropout_p == 0 || in.dropout_state, "dropout_state must be given with dropout_p");
  check("dropout_state", in.dropout_state, {2}, INT64);
}

void check_range(const char* name, const Tensor& values, int64_t end) {
  const Tensor all = values.to(INT64).contiguous();
  const auto* const first = all.data_ptr<int64_t>();
  const auto [low, high] = std::minmax_element(first, first + all.numel());
  CHECK_VALUE(*low >= 0 && *high < end, name, " must lie in [0, ", end, "), got values from ", *low, " to ", *high);
}

// Raises ValueError unless positions of each sequence ascend and the order has each of its rows once: kernels rely on
// both. All values are in range.
void check_order(const RelAttention& p) {
  std::vector<bool> found(static_cast<size_t>(p.length));
  for (int64_t b = 0; b < p.batch; ++b) {
    const int32_t* const position = p.rows.position + b * p.length;
    const int32_t* const order = p.rows.order + b * p.length;
    CHECK_VALUE(std::is_sorted(position, position + p.length),
                      "query_positions must ascend where query_order is given (the `ascending` of RowPositions), got ",
                      "some in sequence ", b, " that descend");
    std::fill(found.begin(), found.end(), false);
    for (int64_t i = 0; i < p.length; ++i) {
      const auto row = static_cast<size_t>(order[i]);
      CHECK_VALUE(!found[row], "query_order (the `row` of RowPositions) must have each row once, got row ", row,
                        " of sequence ", b, " again");
      found[row] = true;
    }
  }
}

}  // namespace

Outputs::Outputs(const Tensor& like, bool needs_backward) : out(empty_rows_first(like, like.scalar_type())) {
  for (Tensor* rows : {&lse, &row_max, &row_sum}) *rows = empty(like.sizes().slice(0, 3), work_dtype(like), like);
  const bool has_residual = needs_backward && like.element_size() == 2;
  out_residual =
      has_residual ? empty_rows_first(like, like.scalar_type()) : empty(Sizes{0}, like.scalar_type(), like);
}

void Outputs::give_to(RelAttention& p) const {
  p.out = strided(out);
  if (out_residual.numel() > 0) p.out_residual = strided(out_residual);
  p.lse = lse.data_ptr();
  p.row_max = row_max.data_ptr();
  p.row_sum = row_sum.data_ptr();
}

void OutputGradients::check(const Inputs& in) const {
  const Tensor& query = in.query;
  const auto rows = query.sizes().slice(0, 3);
  xlnet_kernels::check("grad_out", grad_out, query.sizes(), grad_out.scalar_type(), query);
  if (grad_lse) xlnet_kernels::check("grad_lse", grad_lse, rows, grad_lse->scalar_type(), query);
  xlnet_kernels::check("out", out, query.sizes(), query.scalar_type(), query);
  if (out_residual.numel() > 0)
    xlnet_kernels::check("out_residual", out_residual, query.sizes(), query.scalar_type(), query);
  xlnet_kernels::check("row_max", row_max, rows, work_dtype(query), query);
  xlnet_kernels::check("row_sum", row_sum, rows, work_dtype(query), query);
}

std::vector<Tensor> InputGradients::list(const Inputs& inputs, const Needs& needs) const {
  std::vector<Tensor> found;
  const auto add = [&](const OptionalTensor& input, const Tensor& gradient, bool need) {
    found.push_back(need && input ? gradient.to(input->scalar_type()) : Tensor());
  };
#define ADD(type, name) add(inputs.name, name, needs.name);
  DIFFERENTIABLE_INPUTS(ADD, )
#undef ADD
  return found;
}

PreparedCall prepare(const Inputs& in) {
  check_inputs(in);
  PreparedCall call;
  const auto ints = [&](const OptionalTensor& t) {
    return t ? call.keep(t->to(INT32).contiguous()).data_ptr<int32_t>() : nullptr;
  };
  const auto small = [&](const OptionalTensor& t) { return t ? call.keep(t->contiguous()).data_ptr() : nullptr; };
  RelAttention& p = call.p;
  p.dtype = dtype_of(in.query);
  p.batch = in.query.size(0);
  p.heads = in.query.size(1);
  p.length = in.query.size(2);
  p.head_dim = in.query.size(3);
  p.key_len = in.key.size(2);
  p.mem_len = in.memory_key ? in.memory_key->size(2) : 0;
  p.rel_len = in.rel_key.size(-2);
  p.scale = in.scale;
  p.rows.query = strided(in.query);
  p.keys = {strided(in.key), strided(in.value)};
  if (in.memory_key) p.memory = {strided(*in.memory_key), strided(*in.memory_value)};
  p.rel_key = {strided(in.rel_key), in.max_distance};
  p.content_bias = small(in.content_bias);
  p.position_bias = small(in.position_bias);
  p.segments = {small(in.segment_embed), small(in.segment_bias), ints(in.query_ids), ints(in.key_ids)};
  p.rank_mask = {ints(in.query_rank), ints(in.key_rank), ints(in.query_floor),
                 static_cast<const bool*>(small(in.sees_self))};
  if (in.mask) p.mask = expanded(*in.mask, {p.batch, p.heads, p.length, p.mem_len + p.key_len});
  if (in.query_positions && p.length > 0 && p.batch > 0) {
    Tensor positions = *in.query_positions, order;
    const bool looks = XLNET_KERNELS_LOOKS_AT_VALUES;
    if (looks) check_range("query_positions", positions, p.key_len);
    if (in.query_order) {
      order = *in.query_order;
      if (looks) check_range("query_order", order, p.length);
    } else {
      std::tie(positions, order) = sorted(positions);
    }
    p.rows.position = ints(positions);
    p.rows.order = ints(order);
    if (looks && in.query_order) check_order(p);
  }
  if (in.dropout_p > 0) {
    p.dropout = {in.dropout_p, static_cast<const int64_t*>(small(in.dropout_state))};
  }
  return call;
}

}  // namespace xlnet_kernels
