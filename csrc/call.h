// The operator's tensors, and the argument struct that compiled backends take in their place.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "rel_attention.h"

namespace xlnet_kernels {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct Inputs {
  const Tensor &query, &key, &value, &rel_key;
  const OptionalTensor &content_bias, &position_bias, &memory_key, &memory_value, &segment_embed, &segment_bias,
      &query_ids, &key_ids, &query_rank, &key_rank, &query_floor, &sees_self, &mask, &query_positions, &dropout_state;
  int64_t max_distance;
  double dropout_p, scale;
};

// The call as the kernels take it, and the tensors that its pointers need alive.
struct Prepared {
  RelAttention p{};
  std::vector<Tensor> kept;

  Tensor keep(Tensor t);
};

// Raises ValueError for what would lead the kernels out of their tensors; users' mistakes are explained in
// xlnet_kernels/functional.py. Values of query_positions are looked at on the CPU alone: elsewhere that would wait for
// the device, and kernels have to bear any.
Prepared prepare(const Inputs& inputs);

// Raises ValueError unless `t` is missing or has this shape and dtype, on the device of `like`.
void check(const char* name, const OptionalTensor& t, at::IntArrayRef shape, at::ScalarType dtype, const Tensor& like);

Tensor4 strided(const Tensor& t);

// (B, H, rows, D) whose memory is laid out (B, rows, H, D), as projections before and after want it
Tensor empty_rows_first(const Tensor& like, at::ScalarType dtype);

// Every argument of the schema in xlnet_kernels/ops.py after the gradients
#define INPUTS                                                                                                     \
  const Tensor &query, const Tensor &key, const Tensor &value, const Tensor &rel_key,                              \
      const OptionalTensor &content_bias, const OptionalTensor &position_bias, const OptionalTensor &memory_key,   \
      const OptionalTensor &memory_value, const OptionalTensor &segment_embed, const OptionalTensor &segment_bias, \
      const OptionalTensor &query_ids, const OptionalTensor &key_ids, const OptionalTensor &query_rank,            \
      const OptionalTensor &key_rank, const OptionalTensor &query_floor, const OptionalTensor &sees_self,          \
      const OptionalTensor &mask, const OptionalTensor &query_positions, const OptionalTensor &dropout_state,      \
      int64_t max_distance, double dropout_p, double scale, [[maybe_unused]] bool deterministic
#define INPUT_NAMES                                                                                               \
  query, key, value, rel_key, content_bias, position_bias, memory_key, memory_value, segment_embed, segment_bias, \
      query_ids, key_ids, query_rank, key_rank, query_floor, sees_self, mask, query_positions, dropout_state,     \
      max_distance, dropout_p, scale

}  // namespace xlnet_kernels
